"""The evaluation: methods x tasks x lengths on one model, continued where it stopped, reported."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rope_patch import demo
from rope_patch.eval import files, perplexity, provenance, retrieval, tasks, texts
from rope_patch.geometry import read_geometries
from rope_patch.loading import empty_model, load, read_config, read_model, read_tokenizer
from rope_patch.methods import registered
from rope_patch.patching import Patch, check, current, patch
from rope_patch.saving import read_sidecar

BASELINE = "none"
PERPLEXITY = "perplexity"
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to evaluate.

    Attributes:
        model: A folder, a name on the Hub, or `demo`.
        methods: Names from `rope_patch.methods()`, and `none` for the model as it is.
        factor: Target length / trained length, for the methods; or `length`.
        length: Target length in tokens.
        lengths: Lengths of the retrieval samples, in tokens.
        tasks: `perplexity` and names from `rope_patch.eval.tasks.names()`.
        limit: Retrieval samples at each length; one at each depth unless given.
        depths: Where needles go, in percent.
        text: The long document: a name from `texts.names()` or a file.
        perplexity_length: Tokens of it; the longest of `lengths` unless given.
        window: Tokens averaged into one point of the perplexity curve.
        control_context: Tokens of context that the control gets; half the trained length unless
            given.
        trained_length: Tokens of pretraining, if the config does not tell the truth about them.
        options: The methods' options.
        dtype: As in transformers; "auto" is float32 on a CPU and the checkpoint's own elsewhere.
        device_map: As in transformers; "auto" where there is a GPU.
        gguf_file: The GGUF file within the model's folder.
        seed: For the retrieval samples.
        folder: Where everything is written.
        command: The command line, to record.
    """

    model: str
    methods: tuple[str, ...]
    factor: float | None = None
    length: int | None = None
    lengths: tuple[int, ...] = (4096,)
    tasks: tuple[str, ...] = ("niah_single", PERPLEXITY)
    limit: int | None = None
    depths: tuple[int, ...] = (10, 50, 90)
    text: str = "emma"
    perplexity_length: int | None = None
    window: int | None = None
    control_context: int | None = None
    trained_length: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    device_map: str | None = None
    gguf_file: str | None = None
    seed: int = 42
    folder: Path = Path("out")
    command: str = ""

    def patch_arguments(self, method: str) -> dict[str, Any]:
        """What `patch` gets for one of the methods."""
        known = registered()[method].__dataclass_fields__ if method in registered() else {}
        return {
            "method": method,
            "factor": self.factor,
            "length": self.length,
            "trained_length": self.trained_length,
            **{key: value for key, value in self.options.items() if key in known},
        }


def evaluate(request: Request) -> dict[str, Any]:
    """Evaluates and writes the report.

    Everything finished is kept in the folder, so the same request continues where it was stopped.

    Args:
        request: What to evaluate.

    Returns:
        The results that the report shows (`report.json`).

    Raises:
        ValueError: A request that cannot be met; found out before weights are read.
    """
    from rope_patch.eval.report import write_report

    started = time.monotonic()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is meant here
    path = demo.resolve(request.model)
    config = read_config(path, gguf_file=request.gguf_file)
    _check(request, path, config)
    tokenizer = read_tokenizer(path, gguf_file=request.gguf_file)
    tokenizer.model_max_length = 10**9  # lengths are ours to check; it would warn of each prompt
    run = _Run(request, path, config, tokenizer)
    run.measure_control()
    for method in request.methods:
        run.measure(method)
    results = run.results(time.monotonic() - started)
    write_report(results, request.folder)
    return results


class _Run:
    """One evaluation under way: the model, the samples, and what came out so far."""

    def __init__(self, request: Request, path: str, config: Any, tokenizer: Any) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.longest = max((*request.lengths, request.perplexity_length or 0))
        text_config = config.get_text_config(decoder=True)
        self.geometries = read_geometries(text_config, request.trained_length)
        self.trained_length = next(iter(self.geometries.values())).trained_length
        self.seconds: dict[str, float] = {}
        self.methods: list[dict[str, Any]] = []
        self.curves: dict[str, Any] = {}
        self.control: dict[str, Any] | None = None
        self.cells: dict[str, dict[str, Any]] = {name: {} for name in self._retrieval_tasks()}

        self.ids: list[int] = []
        if PERPLEXITY in request.tasks:
            length = request.perplexity_length or max(request.lengths)
            self.ids = texts.tokens(request.text, tokenizer, length)
        limit = request.limit or len(request.depths)
        self.built = {
            name: retrieval.build(
                name, tokenizer, list(request.lengths), limit, list(request.depths), request.seed
            )
            for name in self._retrieval_tasks()
        }
        # A model that was saved with a patch is, as it is, one with that patch.
        self.model = (read_model if read_sidecar(path) is None else load)(
            path,
            dtype=_dtype(request),
            device_map=request.device_map or ("auto" if torch.cuda.is_available() else None),
            gguf_file=request.gguf_file,
        )
        self.weights = provenance.fingerprint(self.model)

    def measure_control(self) -> None:
        """Perplexity with only the near past as context, by the model as it is."""
        if not self.ids:
            return
        window = self._window()
        context = self.request.control_context or self.trained_length // 2
        if context <= window:
            raise ValueError(
                f"the control's context must be longer than the window of {window} tokens that is "
                f"scored, got {context}"
            )
        points = []
        with self._timed(PERPLEXITY):
            for end in perplexity.control_ends(len(self.ids), window, context):
                measure = partial(
                    perplexity.control_point, self.model, self.ids, end, window, context
                )
                points.append(self._cached({"control": [end, window, context]}, measure))
        self.control = {"context": context, "points": points}

    def measure(self, method: str) -> None:
        """Runs all tasks under one method."""
        with self._patched(method) as handle:
            label = BASELINE if handle is None else str(handle.method)
            self.methods.append(_describe(label, handle, self.longest or len(self.ids)))
            if self.ids:
                window = self._window()
                # Short texts are what such a method leaves alone: they are read as short texts.
                follows = handle and handle.method.follows_length(self.trained_length)
                piece = {"curve": window} | ({"alone": self.trained_length} if follows else {})
                measure = partial(
                    perplexity.curve, self.model, self.ids, window, label, piece.get("alone", 0)
                )
                with self._timed(PERPLEXITY):
                    self.curves[label] = self._cached(piece, measure)
            for name in self._retrieval_tasks():
                with self._timed(name):
                    self._retrieval(name, label, method)

    def results(self, total: float) -> dict[str, Any]:
        """Everything the report shows."""
        request, model = self.request, self.model
        return {
            "run": {
                "model": request.model,
                "name": demo.NAME if request.model == "demo" else Path(request.model).name,
                "architecture": type(model).__name__,
                "parameters": model.num_parameters(),
                "dtype": str(model.dtype).removeprefix("torch."),
                "attention": model.config._attn_implementation,
                "device": str(model.device),
                "trained_length": self.trained_length,
                "geometry": {
                    kind or "all": {
                        "head_dim": g.head_dim,
                        "rotary_dim": g.rotary_dim,
                        "theta": g.theta,
                        "trained_length": g.trained_length,
                    }
                    for kind, g in self.geometries.items()
                },
                "seed": request.seed,
                "date": provenance.now(),
                "seconds": {**self.seconds, "total": total},
                "peak_memory": provenance.peak_memory(),
                "weights": self.weights,
                "versions": provenance.versions(),
                "command": request.command,
            },
            "methods": self.methods,
            "perplexity": {
                "text": request.text,
                "tokens": len(self.ids),
                "window": self._window(),
                "curves": self.curves,
                "control": self.control,
            }
            if self.ids
            else None,
            "retrieval": [
                {
                    "task": name,
                    "lengths": list(request.lengths),
                    "depths": list(request.depths),
                    "cells": cells,
                }
                for name, cells in self.cells.items()
            ],
        }

    def _retrieval(self, name: str, label: str, method: str) -> None:
        from rope_patch.eval.language_model import LongContextLM

        info = {"model": self.request.model, "weights": self.weights}
        lm = LongContextLM(self.model, self.tokenizer, self.longest, info)
        results = retrieval.evaluate(
            lm, self.built[name], self._identity(), self.request.folder, f"{name}-{method}"
        )
        self.cells[name][label] = retrieval.cells(results)

    def _cached(self, piece: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """A piece of the perplexity results, computed unless an earlier run left it."""
        text = hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()
        identity = {**self._identity(), **piece, "tokens": text}
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        path = self.request.folder / "cache" / f"{PERPLEXITY}-{key}.json"
        if not path.is_file():
            files.write_json(path, compute())
        return json.loads(path.read_text())

    def _identity(self) -> dict[str, Any]:
        """What results depend on, besides the prompts and texts."""
        handle = current(self.model)
        return {
            "weights": self.weights,
            "dtype": str(self.model.dtype),
            "attention": self.model.config._attn_implementation,
            "method": None if handle is None else [handle.method.name, handle.method.options()],
            "trained_length": self.trained_length,
            "versions": provenance.versions(),
        }

    @contextlib.contextmanager
    def _patched(self, method: str) -> Iterator[Patch | None]:
        if method == BASELINE:
            yield current(self.model)
        else:
            patch(self.model, **self.request.patch_arguments(method))
            try:
                yield current(self.model)
            finally:
                if handle := current(self.model):
                    handle.undo()

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0) + time.monotonic() - started

    def _window(self) -> int:
        return self.request.window or perplexity.default_window(len(self.ids))

    def _retrieval_tasks(self) -> list[str]:
        return [name for name in self.request.tasks if name != PERPLEXITY]


def _check(request: Request, path: str, config: Any) -> None:
    """Refuses a request that cannot be met, before anything large is read."""
    known = [PERPLEXITY, *tasks.names()]
    for name in request.tasks:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown task {name!r}{hint}; expected one of: {', '.join(known)}")
    if not request.tasks or not request.methods or not request.lengths:
        raise ValueError("expected at least one task, one method and one length")
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit must be at least 1 sample a length, got {request.limit}")
    if request.dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {request.dtype!r}")
    _check_saved(request, read_sidecar(path))
    model = None
    for method in request.methods:
        if method == BASELINE:
            continue
        model = model or empty_model(path, config)
        check(model, **request.patch_arguments(method))
    fields = {
        key
        for m in request.methods
        if m != BASELINE
        for key in registered()[m].__dataclass_fields__
    }
    if unused := sorted(request.options.keys() - fields):
        raise ValueError(
            f"none of the methods {', '.join(request.methods)} has the option {unused[0]!r}; their "
            f"options are: {', '.join(sorted(fields)) or 'none'}"
        )


def _check_saved(request: Request, saved: dict[str, Any] | None) -> None:
    """Refuses to patch a saved patch again."""
    if saved is None or set(request.methods) == {BASELINE}:
        return
    raise ValueError(
        f"{request.model} holds a model that was saved with {saved['method']} in it: evaluate it "
        f"as it is (--method {BASELINE}), or evaluate the original checkpoint with --method "
        f"{saved['method']}"
    )


def _describe(label: str, handle: Patch | None, longest: int) -> dict[str, Any]:
    if handle is None:
        return {"label": label, "method": None}
    # A method that follows the length is shown as it is where the evaluation goes.
    shown = handle.frequencies_at(longest) if handle.method.grows else handle.frequencies
    return {
        "label": label,
        "method": handle.method.name,
        "paper": handle.method.paper,
        "factor": handle.factor,
        "length": handle.length,
        "follows_length": handle.method.follows_length(handle.trained_length),
        "options": handle.method.options(),
        "rope_parameters": {
            kind or "all": handle.method.rope_parameters(geometry)
            for kind, geometry in handle.geometries.items()
        },
        "frequencies": {
            kind or "all": {
                "unscaled": handle.geometries[kind].inv_freq().tolist(),
                "inv_freq": frequencies.inv_freq.tolist(),
                "attention_factor": frequencies.attention_factor,
            }
            for kind, frequencies in shown.items()
        },
    }


def _dtype(request: Request) -> Any:
    if request.dtype != "auto":
        return getattr(torch, request.dtype)
    return "auto" if torch.cuda.is_available() else torch.float32
