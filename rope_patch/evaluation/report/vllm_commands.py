"""Shell commands that run the same tasks through lm-eval on vLLM, with methods as configs."""

from __future__ import annotations

import json
import shlex
from typing import Any

from rope_patch import tasks
from rope_patch.entry_points import check
from rope_patch.evaluation.measures.external_tasks import TaskIndex
from rope_patch.evaluation.request import (
    BASELINE,
    KEY_TOKENS,
    MEASURES,
    PERPLEXITY,
    SLIDING,
    SPEED,
    EvalRequest,
    check_request,
)
from rope_patch.exporting import vllm
from rope_patch.exporting.target import Target, nest_fields
from rope_patch.methods.registry import find_method
from rope_patch.patching.plan import PatchPlan
from rope_patch.pretrained import demo
from rope_patch.pretrained.gguf import split_gguf
from rope_patch.pretrained.loading import empty_model, read_config, read_tokenizer
from rope_patch.pretrained.sidecar import extension_from_sidecar, read_sidecar
from rope_patch.tasks import chat_template
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import Refused, one_line

ENGINES = ("vllm",)

_TRANSFORMERS_ONLY = {
    PERPLEXITY: "reads one document in several ways, which lm-eval has no task for",
    KEY_TOKENS: "needs a second pass over the same tokens with short context",
    SLIDING: "needs windows at chosen places of a document",
    SPEED: "times transformers' own forward passes; time the engine with its own benchmark",
}
_ALTERNATIVE = "evaluate it with transformers (leave --engine out)"


def engine_commands(engine: str, request: EvalRequest) -> list[str]:
    """Return shell commands that run a request's tasks on another engine, through lm-eval.

    The model's weights are not read. Each method becomes a config (`hf_overrides`), each length a
    command, as an engine is started for one config and lm-eval builds tasks for one length. Results
    go to folders of their own in the request's, as lm-eval writes them.

    Args:
        engine: One of `ENGINES`.
        request: What to evaluate.

    Returns:
        Commands, and lines that begin with # where something is left out and why.

    Raises:
        ValueError: An engine that is not known, or a method or a request that it cannot run.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: expected {', '.join(ENGINES)}")
    path = demo.resolve_model_path(request.model)
    if request.quantization is not None:
        raise Refused(
            f"{engine} quantises by itself, so --quantization {request.quantization} does not go "
            f"into its commands: give it a quantised checkpoint, or {_ALTERNATIVE}"
        )
    if split_gguf(path, request.gguf_file)[1] is not None:
        raise ValueError(
            f"{engine} reads no GGUF file within a folder as transformers does: give a folder of "
            f"safetensors, or {_ALTERNATIVE}"
        )
    config = read_config(path)
    check_request(request, path, config)
    _require_native_patch(path)
    chat = chat_template.resolve(request.chat_template, read_tokenizer(path))
    runs = _lm_eval_runs(request, chat)
    if not runs:
        name = request.tasks[0]
        raise ValueError(
            f"{engine} cannot run {name}: it {_TRANSFORMERS_ONLY[name]}; {_ALTERNATIVE}"
        )
    lines = _omission_notes(request)
    methods = dict.fromkeys(request.methods)
    refusals: list[Refused] = []
    for method in methods:
        try:
            lines += _method_commands(request, engine, path, config, method, runs)
        except Refused as error:
            refusals.append(error)
            lines.append(f"# {one_line(error, None)}")
    if len(refusals) == len(methods):
        raise refusals[0]
    return lines


def _method_commands(
    request: EvalRequest,
    engine: str,
    path: str,
    config: Any,
    method: str,
    runs: dict[str, dict[str, Any]],
) -> list[str]:
    """Return the commands for one method; raise if the engine cannot run it."""
    plan = None
    if method != BASELINE:
        plan = check(empty_model(path, config), request.extension(method))
        _require_rotation(plan)
    name_of_folder = atomic_files.safe_filename(str(plan.method) if plan else BASELINE)
    folder = request.folder / engine / name_of_folder
    lines = []
    for name, run in runs.items():
        try:
            overrides = config_overrides(config, plan, run["length"])
        except Refused as error:
            raise Refused(f"{error}; leave it out, or {_ALTERNATIVE}") from error
        arguments = {
            "pretrained": path,
            "dtype": request.dtype,
            "max_model_len": run["length"],
            "hf_overrides": overrides,
            **({"trust_remote_code": True} if request.trust_remote_code else {}),
        }
        words = ["lm_eval", "--model", engine, "--model_args", json.dumps(arguments)]
        words += ["--include_path", str(run["include"])]
        words += ["--tasks", ",".join(run["tasks"]), "--metadata", json.dumps(run["metadata"])]
        words += ["--apply_chat_template"] if run["chat"] else []
        words += ["--batch_size", "auto"]  # one sample at a time otherwise
        words += ["--limit", str(run["limit"])] if run["limit"] else []
        words += ["--output_path", str(folder / name), "--log_samples"]
        lines.append(shlex.join(words))
    return lines


def config_overrides(config: Any, plan: PatchPlan | None, length: int) -> dict[str, Any]:
    """Return the config entries that make a method of a model, as vLLM reads them.

    transformers reads them alike, too.

    Args:
        config: The model's config.
        plan: The method on this model; None for the plain model.
        length: Tokens of the longest sample.

    Returns:
        For `hf_overrides`; nested as the config is.

    Raises:
        ValueError: vLLM cannot run the method, whatever the config entries.
    """
    text = config.get_text_config(decoder=True)
    # vLLM makes cos and sin for so many positions, and refuses a larger max_model_len.
    reached = max(length, text.max_position_embeddings, plan.length or 0 if plan else 0)
    if plan is not None:
        return vllm.overrides(Target.from_plan(plan, config), length, reached)
    if reached == text.max_position_embeddings:
        return {}
    return nest_fields(config, {"max_position_embeddings": reached})


def _require_rotation(plan: PatchPlan) -> None:
    """Raise if a method drops positions: such a model has to be trained first."""
    if not any(frequencies.inv_freq.any() for frequencies in plan.frequencies().values()):
        raise Refused(
            f"vllm cannot run {plan.method}: nothing rotates there, which is to be trained first; "
            f"leave it out, or {_ALTERNATIVE}"
        )


def _require_native_patch(path: str) -> None:
    """Raise if the folder's own config does not express its saved patch in full."""
    saved = read_sidecar(path)
    if saved is None:
        return
    trained = saved["trained_length"]
    extension = extension_from_sidecar(saved)
    follows = find_method(extension.method) is None or extension.resolve(trained)[
        0
    ].is_length_dependent(trained)
    if follows or not saved.get("native"):
        raise ValueError(
            f"vllm cannot run {path} as it was saved: it was patched with {saved['method']}, which "
            f"its config does not say or vLLM reads otherwise; {_ALTERNATIVE}"
        )


def _lm_eval_runs(request: EvalRequest, chat: bool) -> dict[str, dict[str, Any]]:
    """Return what to ask lm-eval for, by output folder; `chat` puts own questions in a chat."""
    own = {
        "samples": len(request.depths) if request.samples is None else request.samples,
        "depths": list(request.depths),
        **request.sample_options(chat=chat),
    }
    index = TaskIndex(request.include_paths)
    names = [m for n in request.harness for m in (index.members(n) if n in index.own else [n])]
    theirs = [name for name in names if index.accepts_length(name)]
    others = [name for name in names if name not in theirs]
    runs: dict[str, dict[str, Any]] = {}

    def add(name: str, chosen: list[str], length: int, metadata: Any, limit: Any = None) -> None:
        if chosen:
            entry = {"tasks": chosen, "length": length, "metadata": metadata, "limit": limit}
            theirs_in_chat = request.chat_template == "on" and chosen != request.short
            runs[name] = entry | {
                "include": index.roots.get(chosen[0], tasks.FOLDER),
                "chat": chat and (chosen == request.retrieval or theirs_in_chat),
            }

    for length in request.lengths:
        add(str(length), request.retrieval, length, {"length": length, **own})
        for name in theirs:
            spelled = index.length_metadata(name, length)
            add(f"{name}-{length}", [name], length, spelled, request.samples)
    short_metadata = {"samples": request.short_samples, "seed": request.seed}
    add("short", request.short, request.longest, short_metadata)
    add("lm_eval", [n for n in others if n not in index.own], request.longest, {}, request.samples)
    for name in others:
        if name in index.own:
            add(name, [name], request.longest, {}, request.samples)
    return runs


def _omission_notes(request: EvalRequest) -> list[str]:
    """Return a comment for each thing that lm-eval on another engine does not measure."""
    notes = [
        f"# {name} is left out: it {_TRANSFORMERS_ONLY[name]}"
        for name in MEASURES
        if name in request.tasks
    ]
    if request.controls and request.retrieval:
        notes.append(
            '# controls are left out; add "planted": false or "closed_book": true to --metadata '
            "for them"
        )
    if request.precision is not None:
        notes.append(
            "# precision is left out: lm-eval takes as many samples as are named in --metadata"
        )
    if request.until_decided:
        notes.append("# until_decided is left out: lm-eval gives no verdict to go by")
    return notes
