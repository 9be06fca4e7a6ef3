"""Time and memory of methods, measured in turns in the same run.

A time says as much about a machine and its other users as about a method; the ratio of two times
taken in turns, milliseconds apart, says it about the method. So every method gets an instance of
the model (all share one set of weights), they take turns token by token, and what counts are
medians of ratios, with the smallest and the largest beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch

from rope_patch.evaluation.measures.timed_method import (
    WARMUP_TOKENS,
    CompileRecord,
    GrowthRecord,
    MemoryRecord,
    TimesRecord,
    TimingRecord,
    count_recompilations,
    decode_start_length,
    make_timed_method,
    measure_memory,
    rotate_order,
    time_call,
    time_decoding,
    timing_row,
)
from rope_patch.evaluation.results_schema import CostRecord
from rope_patch.extension import Extension
from rope_patch.methods.registry import get_method
from rope_patch.original_config import original_config
from rope_patch.patching import check
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import empty_model, read_config, read_model, require_dtype
from rope_patch.pretrained.model_class import auto_class
from rope_patch.rope_config import read_geometries
from rope_patch.utils import provenance
from rope_patch.utils.plain_text import align
from rope_patch.utils.progress import progress_bar

PLAIN = "none"


@dataclass(frozen=True, kw_only=True)
class SpeedRequest:
    """What to measure.

    Attributes:
        model: A folder, a name on the Hub, or `demo`.
        methods: Names from `rope_patch.list_methods()`, and `none` for the plain model; the
            first is the baseline of the ratios.
        factor: Target length / trained length; methods that follow the length need none.
        prompt: Tokens of the prompt; `factor` times the trained length unless given.
        decode: Tokens decoded one by one in each repeat.
        repeats: The number of times that each timed part runs.
        trained_length: Tokens of pretraining; the config's unless given.
        dtype: As in transformers; "auto" is float32 on a CPU and the checkpoint's own elsewhere.
        compiled: Whether to count what torch.compile makes of a decoding step, too.
        random_weights: Draw the weights, so that a config is enough; times are the same.
    """

    model: str
    methods: tuple[str, ...]
    factor: float = 4.0
    prompt: int | None = None
    decode: int = 32
    repeats: int = 5
    trained_length: int | None = None
    dtype: str = "auto"
    compiled: bool = False
    random_weights: bool = False


class OptionalSpeedKeys(TypedDict, total=False):
    """The keys that a method's row has only if the request asks for them.

    Attributes:
        compile: What torch.compile makes of a decode step.
    """

    compile: CompileRecord


class SpeedRow(TimingRecord, OptionalSpeedKeys):
    """Times and memory of a method.

    Attributes:
        method: The method's label.
        memory: The method's memory.
    """

    method: str
    memory: MemoryRecord


class SpeedRecord(TypedDict):
    """The results of `bench`: the request as it was met, and a row for each method.

    Attributes:
        model: See `SpeedRequest`.
        methods: The rows in the order of the request.
        factor: See `SpeedRequest`.
        prompt: Tokens of the prompt.
        decode: See `SpeedRequest`.
        repeats: See `SpeedRequest`.
        trained_length: Tokens.
        dtype: The data type of the weights.
        compiled: See `SpeedRequest`.
        random_weights: See `SpeedRequest`.
        architecture: The model's class.
        layers: The number of layers.
        device: The model's device.
        threads: Threads of torch.
        decode_from: Tokens in the cache when decoding starts.
        date: The time, in UTC.
        versions: The versions of the packages that results depend on.
    """

    model: str
    methods: list[SpeedRow]
    factor: float
    prompt: int
    decode: int
    repeats: int
    trained_length: int
    dtype: str
    compiled: bool
    random_weights: bool
    architecture: str
    layers: int
    device: str
    threads: int
    decode_from: int
    date: str
    versions: dict[str, str]


@torch.no_grad()
def bench_methods(request: SpeedRequest) -> SpeedRecord:
    """Measure prompts, decoding, growth and memory of all methods side by side.

    Args:
        request: What to measure.

    Raises:
        ValueError: A request that cannot be met.
    """
    _validate_request(request)
    path = demo.resolve_model_path(request.model)
    config = read_config(path)
    trained_length = request.trained_length
    text = original_config(config.get_text_config(decoder=True), trained_length=trained_length)
    geometries = read_geometries(text, trained_length)
    trained = next(iter(geometries.values())).trained_length
    empty = empty_model(path, config)
    for name in request.methods:
        if name != PLAIN:
            check(empty, _extension(request, name, trained))

    model = _load_model(request, path, config)
    patches = {
        name: None if name == PLAIN else _extension(request, name, trained)
        for name in request.methods
    }
    prompt = round(request.factor * trained) if request.prompt is None else request.prompt
    rows, start = _measure_rows(model, patches, prompt, request)
    return {
        "model": request.model,
        "methods": rows,
        "factor": request.factor,
        "prompt": prompt,
        "decode": request.decode,
        "repeats": request.repeats,
        "trained_length": trained,
        "dtype": str(model.dtype).removeprefix("torch."),
        "compiled": request.compiled,
        "random_weights": request.random_weights,
        "architecture": type(model).__name__,
        "layers": text.num_hidden_layers,
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "decode_from": start,
        "date": provenance.now(),
        "versions": provenance.versions(),
    }


@torch.no_grad()
def compare_methods(
    model: Any, patches: dict[str, Extension | None], prompt: int, repeats: int = 3
) -> dict[str, CostRecord]:
    """Measure what methods cost on a loaded model, as multiples of the first one's cost.

    Args:
        model: The model, unpatched; it stays unpatched.
        patches: The requests to patch with, by label; None for the plain model.
        prompt: Tokens of the prompt.
        repeats: The number of times that each timed part runs.

    Returns:
        The costs by label.
    """
    request = SpeedRequest(model="", methods=tuple(patches), decode=16, repeats=repeats)
    rows, _ = _measure_rows(model, patches, prompt, request)
    return {
        row["method"]: {
            "prompt_tokens": prompt,
            "prompt_seconds": row["prompt"]["ms"] / 1e3,
            "prompt_ratio": _ratios(row["prompt"]),
            "token_seconds": row["token"]["ms"] / 1e3,
            "token_ratio": _ratios(row["token"]),
            "cache_bytes": row["memory"]["cache"],
            "peak_bytes": row["memory"]["peak"],
        }
        for row in rows
    }


def _ratios(times: TimesRecord) -> list[float]:
    """Return the smallest, the median and the largest ratio."""
    return [times["min"], times["ratio"], times["max"]]


def _measure_rows(
    model: Any, patches: dict[str, Extension | None], prompt: int, request: SpeedRequest
) -> tuple[list[SpeedRow], int]:
    """Return a row for each method, and the length that they decoded from."""
    methods = [make_timed_method(name, model, extension) for name, extension in patches.items()]
    start = decode_start_length(methods, prompt, request.decode)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (1, prompt + 1 + request.decode), generator=generator)
    ids = ids.to(model.device)
    until = start + 1 + request.decode
    for c in progress_bar(methods, desc="warming up", unit="method"):
        c.cache = c.read(ids[:, : start - WARMUP_TOKENS], ids.shape[1])
    for repeat in progress_bar(range(request.repeats), desc="timing", unit="repeat"):
        for c in rotate_order(methods, repeat):
            c.prompt_times.append([time_call(partial(c.read, ids[:, :prompt], ids.shape[1]))])
        time_decoding(methods, ids[:, :until])
    rows: list[SpeedRow] = []
    for c in progress_bar(methods, desc="weighing", unit="method"):
        row: SpeedRow = {
            "method": c.name,
            **timing_row(c, methods[0], start),
            "memory": measure_memory(c, ids, start),
        }
        if request.compiled:
            row["compile"] = count_recompilations(c, ids[:, :until])
        rows.append(row)
    return rows, start


def format_table(results: SpeedRecord) -> str:
    """Return the results as lines of text, a column for each method."""
    r, rows = results, results["methods"]
    lines = {
        "": [row["method"] for row in rows],
        f"prompt of {r['prompt']:,}": [_ratio_text(row["prompt"]) for row in rows],
        f"token after {r['decode_from']:,}": [_ratio_text(row["token"]) for row in rows],
        "turning cached keys": [_growth_text(row["growth"]) for row in rows],
        "cache": [_kilobytes(row["memory"]["cache"]) for row in rows],
        "kept beside it": [_kilobytes(sum(row["memory"]["record"].values())) for row in rows],
        "peak, keys turning": [_kilobytes(row["memory"]["peak"]) for row in rows],
    }
    if r["compiled"]:
        lines["graph breaks"] = [str(row["compile"]["graph_breaks"]) for row in rows]
        lines["recompilations"] = [str(row["compile"]["recompilations"]) for row in rows]
    cells = [[name, *columns] for name, columns in lines.items()]
    padded = align(cells)
    about = (
        f"{r['architecture']}, {r['layers']} layers, {r['dtype']} on {r['device']}, trained on "
        f"{r['trained_length']:,} tokens; medians of {r['repeats']} repeats, as multiples of "
        f"{rows[0]['method']} (smallest to largest)"
    )
    return "\n".join([about, *padded])


def _ratio_text(m: TimesRecord) -> str:
    return f"{m['ms']:,.2f} ms ×{m['ratio']:.3f} ({m['min']:.3f} to {m['max']:.3f})"


def _growth_text(m: GrowthRecord | None) -> str:
    return f"{m['ms']:,.2f} ms, {m['share']:.2%} of {m['tokens']:,} tokens' time" if m else "–"


def _kilobytes(size: int) -> str:
    return f"{size / 1e3:,.1f} kB"


def _extension(request: SpeedRequest, name: str, trained: int) -> Extension:
    """Return the request to patch with a method, so that all methods reach the same length."""
    if get_method(name).is_dynamic:
        length = round(request.factor * trained)
        return Extension(name, length=length, trained_length=request.trained_length)
    return Extension(name, factor=request.factor, trained_length=request.trained_length)


def _load_model(request: SpeedRequest, path: str, config: Any) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = "auto" if device == "cuda" else torch.float32
    if request.dtype != "auto":
        dtype = getattr(torch, request.dtype)
    if not request.random_weights:
        return read_model(path, dtype=dtype).to(device)
    with torch.device(device):
        dtype = config.dtype if dtype == "auto" else dtype
        model: Any = auto_class(config).from_config(config, dtype=dtype)
        return model.eval()


def _validate_request(request: SpeedRequest) -> None:
    """Raise if no model could meet the request."""
    if not request.methods or len(set(request.methods)) < len(request.methods):
        names = ", ".join(request.methods) or "none"
        raise ValueError(f"expected at least one method, and each named once, got {names}")
    for name in ("prompt", "decode", "repeats"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value}")
    if not 1 < request.factor < math.inf:
        raise ValueError(f"factor must be above 1 (target / trained length), got {request.factor}")
    require_dtype(request.dtype)
