"""The command `eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rope_patch.cli import options
from rope_patch.cli.evaluation import Folder, parse_methods, run_and_report, server_fields
from rope_patch.cli.options import argument, option
from rope_patch.cli.runtime import command_line, requires_extra


def evaluate(
    *,
    model: str = argument(..., f"{options.MODEL} Or a running server's address, http://HOST:PORT."),
    method: list[str] | None = option(
        None,
        "A method, `none` for the model as it is, or the folder of a search's result; several are "
        "compared. None with a server, which rotates as it was started.",
    ),
    factor: options.Factor = None,
    length: options.Length = None,
    lengths: str = option("4096,8192", "Lengths of the retrieval samples, in tokens, by commas."),
    tasks: str = option(
        "rp_niah_single_2,perplexity",
        "By commas: rp_ruler (RULER's 13 tasks), rp_hard (harder than needles), rp_reasoning "
        "(graphs, dialogues, programs), rp_ruler2 (RULERv2's ladders), rp_oolong (counts and "
        "comparisons over all lines), their single tasks such as rp_niah_single_2, each with _ll "
        "for the answer's likelihood in one forward pass instead of generation, some with _mc for "
        "the choice among answers; rp_short (ordinary tasks); perplexity, key_tokens (LongPPL), "
        "sliding, speed; any task of lm-eval whose data is at hand.",
    ),
    sample_options: options.SampleOptions,
    controls: bool = option(False, "Ask questions of texts without the answer, and of no text."),
    text_options: options.TextOptions,
    perplexity_length: int | None = option(
        None, "Tokens of a document; the longest of --lengths if left out.", written=True
    ),
    window: int | None = option(None, "Tokens in one point of the perplexity curve.", written=True),
    control_context: int | None = option(
        None, "Context of the control, in tokens; the trained length if left out.", written=True
    ),
    stride: int = option(256, "Tokens scored in each window of sliding perplexity.", min=1),
    windows: int = option(8, "Windows of sliding perplexity in each document.", min=1),
    short_samples: int = option(100, "Samples of each ordinary short task.", min=1),
    method_options: options.MethodOptions,
    loading: options.MeasuredLoadingOptions,
    server_options: options.ServerOptions,
    seed: options.Seed = 42,
    engine: str | None = option(
        None,
        "vllm: print the lm_eval commands that run the same tasks on vLLM, with the methods as "
        "configs that it reads, instead of running anything.",
    ),
    out: Folder = Path("out"),
    as_json: options.Json = False,
) -> None:
    """Measure methods on a model, and write a report.

    The model is loaded here, or it is what a server holds (vLLM, SGLang, llama.cpp): that one is
    measured as it is, with prompts of token ids.

    Writes report.html (one file, no network), report.md, report.json, model-index.yaml (for a model
    card), the figures, and lm-eval's own results. The same command continues a run that was
    stopped, and tries again what failed. Nothing is downloaded but the model: texts and samples
    come with the package. On several GPUs: accelerate launch --no_python rope-patch eval ...

    \b
    Examples:
      rope-patch eval demo --method none --method yarn --factor 2 --lengths 4096,12288
      rope-patch eval ./my-model --method yarn --factor 4 --tasks perplexity --text book.txt
      rope-patch eval ./my-model --method none,yarn --factor 4 --tasks rp_ruler --precision 0.05
      rope-patch eval http://localhost:8000 --tokenizer ./my-model --lengths 4096,32768
    """
    server = server_fields(model, server_options)
    if method is None and server is None:
        raise ValueError("name at least one --method, `none` for the model as it is")
    parsed: dict[str, Any] = {
        **parse_methods(method or ["none"], method_options.trained_length, method_options.start),
        "lengths": tuple(options.parse_lengths("lengths", lengths)),
        **sample_options.arguments(),
        **text_options.arguments(),
        **method_options.arguments(),
        **loading.arguments(),
    }
    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.request import EvalRequest
    request = EvalRequest(
        model=model,
        factor=factor,
        length=length,
        tasks=tuple(options.split_commas(tasks)),
        controls=controls,
        perplexity_length=perplexity_length,
        window=window,
        control_context=control_context,
        stride=stride,
        windows=windows,
        short_samples=short_samples,
        seed=seed,
        folder=out,
        command=command_line(),
        **parsed,
    )
    if engine is None:
        run_and_report(request, as_json, server)
        return
    if server is not None:
        raise ValueError("--engine prints commands for a model's folder, got a server's address")
    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.report import vllm_commands

    print("\n\n".join(vllm_commands.engine_commands(engine, request)))
