"""Time and memory of methods, measured in turns in the same run.

A time says as much about a machine and its other users as about a method; the ratio of two times
taken in turns, milliseconds apart, says it about the method. So every method gets an instance of
the model (all share one set of weights), they take turns token by token, and what counts are
medians of ratios, with the smallest and the largest beside them.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from operator import truediv
from statistics import median
from typing import Any, TypedDict

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from rope_patch.entry_points import check, patch_rotation
from rope_patch.evaluation.results_schema import CostRecord
from rope_patch.extension import Extension
from rope_patch.methods.registry import get_method
from rope_patch.original_config import original_config
from rope_patch.patching import Patch
from rope_patch.patching.dynamic.cache_record import RotationRecord
from rope_patch.patching.position_maps.forward_view import PositionRecord
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import (
    auto_class,
    empty_model,
    read_config,
    read_model,
    require_dtype,
)
from rope_patch.rope_config import read_geometries
from rope_patch.transformers_api.forwards import cache_arguments
from rope_patch.transformers_api.remote_code import (
    CodeIdentity,
    code_identity,
    takes_remote_code,
    trust_argument,
)
from rope_patch.units import parse_factor, parse_tokens
from rope_patch.utils import provenance
from rope_patch.utils.terminal import align, progress_bar

WARMUP_TOKENS = 4  # decoded before any that counts: allocator and compiler have settled by then
# What the fields of a cache's record are called in results.
_RECORD_KEYS = {"row_spans": "bounds", "frequencies": "sets"}
PLAIN = "none"
_WRITTEN = {"factor": parse_factor, "prompt": parse_tokens, "trained_length": parse_tokens}


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
        anyway: See `rope_patch.patch`.
        dtype: As in transformers; "auto" is float32 on a CPU and the checkpoint's own elsewhere.
        compiled: Whether to count what torch.compile makes of a decoding step, too.
        random_weights: Draw the weights, so that a config is enough; times are the same.
        trust_remote_code: Whether to execute Python code that the checkpoint brings.
    """

    model: str
    methods: tuple[str, ...]
    factor: float = 4.0
    prompt: int | None = None
    decode: int = 32
    repeats: int = 5
    trained_length: int | None = None
    anyway: bool = False
    dtype: str = "auto"
    compiled: bool = False
    random_weights: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, parse in _WRITTEN.items():
            object.__setattr__(self, name, parse(name, getattr(self, name)))


@takes_remote_code
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
        **code_identity(model),
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


def _load_model(request: SpeedRequest, path: str, config: Any) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = "auto" if device == "cuda" else torch.float32
    if request.dtype != "auto":
        dtype = getattr(torch, request.dtype)
    if not request.random_weights:
        return read_model(path, dtype=dtype).to(device)
    with torch.device(device):
        dtype = config.dtype if dtype == "auto" else dtype
        model: Any = auto_class(config).from_config(config, dtype=dtype, **trust_argument())
        return model.eval()


def _extension(request: SpeedRequest, name: str, trained: int) -> Extension:
    """Return the request to patch with a method, so that all methods reach the same length."""
    follows = get_method(name).is_dynamic
    return Extension(
        name,
        factor=None if follows else request.factor,
        length=round(request.factor * trained) if follows else None,
        trained_length=request.trained_length,
        anyway=request.anyway,
    )


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


def _ratios(times: TimesRecord) -> list[float]:
    """Return the smallest, the median and the largest ratio."""
    return [times["min"], times["ratio"], times["max"]]


@dataclass(kw_only=True)
class TimedMethod:
    """A method on its own instance of the model, with its times in seconds, a list a repeat."""

    name: str
    model: Any
    handle: Patch | None
    cache: Any = None
    prompt_times: list[list[float]] = field(default_factory=list)
    token_times: list[list[float]] = field(default_factory=list)
    growth_times: list[list[float]] = field(default_factory=list)

    def valid_until(self, length: int) -> float:
        """Return up to which length in tokens keys stay as they were cached at `length`."""
        if self.handle is None or not self.handle.method.is_dynamic or self._is_admitted:
            return math.inf
        return self.handle.method.valid_until(length, self.handle.trained_length)

    @property
    def _is_admitted(self) -> bool:
        return self.handle is not None and self.handle.method.fixed_at_admission

    def read(self, ids: torch.Tensor, length: int, cache: Any = None) -> Any:
        """Read tokens into a cache, a new one if None, of a sequence of `length` tokens in all."""
        if cache is None:
            cache = DynamicCache(config=self.model.config)
        if self.handle is not None and self._is_admitted:
            self.handle.fix_length(length)
        self._forward(ids, 0, cache)()
        if self.handle is not None and self._is_admitted:
            self.handle.fix_length(None)
        return cache

    def decode(self, ids: torch.Tensor, cache: Any) -> Iterator[Callable[[], Any]]:
        """Yield calls that read one token each, of all that the cache does not hold yet."""
        for at in range(cache.get_seq_length(), ids.shape[1]):
            yield self._forward(ids[:, at : at + 1], at, cache)

    def _forward(self, ids: torch.Tensor, start: int, cache: Any) -> Callable[[], Any]:
        at = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        given = {"position_ids": at, **cache_arguments(self.model, cache)}  # generate's arguments
        return partial(self.model, ids, **given, use_cache=True, logits_to_keep=1)


def make_timed_method(name: str, model: Any, extension: Extension | None) -> TimedMethod:
    """Return a method on a copy of a model that shares its weights."""
    weights = {id(parameter): parameter for parameter in model.parameters()}
    instance = copy.deepcopy(model, weights)  # with this memo deepcopy shares the weights
    handle = None if extension is None else patch_rotation(instance, extension)
    return TimedMethod(name=name, model=instance, handle=handle)


def decode_start_length(methods: list[TimedMethod], prompt: int, decode: int) -> int:
    """Return the longest length up to the prompt's after which one more token re-rotates keys.

    Where no method's do, the prompt's own length.

    Raises:
        ValueError: There is no room for the lead before it, or keys would turn again after it.
    """
    followers = [c for c in methods if c.valid_until(1) < math.inf]
    ends = (n for n in range(prompt, 0, -1) if all(c.valid_until(n) < n + 1 for c in followers))
    start = next(ends, prompt)
    if start <= WARMUP_TOKENS:
        raise ValueError(f"the prompt must be longer than {WARMUP_TOKENS} tokens, got {prompt}")
    room = min((int(c.valid_until(start + 1)) - start - 1 for c in followers), default=decode)
    if decode > room:
        raise ValueError(
            f"decode must be at most {room} tokens, because after {start + 1 + room:,} the cached "
            f"keys turn again, got {decode}: decode fewer, or give a longer prompt"
        )
    return start


def compare_times(times: list[list[float]], baseline: list[list[float]]) -> TimesRecord:
    """Return the median time and the ratios of the repeats, each the median over its turns."""
    ratios = [median(map(truediv, *repeat)) for repeat in zip(times, baseline, strict=True)]
    ms = 1e3 * median(chain.from_iterable(times))
    return {"ms": ms, "ratio": median(ratios), "min": min(ratios), "max": max(ratios)}


def rotate_order(items: list[Any], turn: int) -> list[Any]:
    """Return the items in alternating order, so that none always follows the same one."""
    return items[:: -1 if turn % 2 else 1]


def timing_row(method: TimedMethod, baseline: TimedMethod, start: int) -> TimingRecord:
    """Return a method's times; cached keys are re-rotated at `start` tokens."""
    token = compare_times(method.token_times, baseline.token_times)
    growth: GrowthRecord | None = None
    if method.valid_until(start) < start + 1:
        ms = 1e3 * median(chain.from_iterable(method.growth_times))
        tokens = int(method.valid_until(start + 1)) - start
        growth = {"ms": ms, "tokens": tokens, "share": ms / (tokens * token["ms"])}
    return {
        "prompt": compare_times(method.prompt_times, baseline.prompt_times),
        "token": token,
        "growth": growth,
    }


def time_decoding(methods: list[TimedMethod], ids: torch.Tensor) -> None:
    """Time one repeat of decoding, in turns: warm-up, the re-rotating token, and the rest."""
    calls = [c.decode(ids, copy.deepcopy(c.cache)) for c in methods]
    times_of_methods: list[list[float]] = [[] for _ in methods]
    for turn, steps in enumerate(zip(*calls, strict=True)):
        for times, step in rotate_order(list(zip(times_of_methods, steps, strict=True)), turn):
            times.append(time_call(step))
    for method, times in zip(methods, times_of_methods, strict=True):
        first, *steady = times[WARMUP_TOKENS:]
        method.token_times.append(steady)
        method.growth_times.append([first - median(steady)])


def time_call(call: Callable[[], Any]) -> float:
    """Return how long a call takes, with the work that it queues on a GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else bool
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def measure_memory(method: TimedMethod, ids: torch.Tensor, start: int) -> MemoryRecord:
    """Return the memory at `start` tokens, and the peak of the next decode step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or some builds of torch report on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cache = copy.deepcopy(method.cache)
        for step in method.decode(ids[:, :start], cache):
            step()
        record = getattr(cache, "rotation", None)
        record_fields = vars(record) if isinstance(record, RotationRecord) else {}
        cache_bytes = sum(
            _storage_bytes(t) for layer in cache.layers for t in (layer.keys, layer.values)
        )
        record_bytes = {
            _RECORD_KEYS.get(k, k): _storage_bytes(t)
            for k, t in record_fields.items()
            if isinstance(t, torch.Tensor)
        }
        for step in method.decode(ids[:, : start + 1], cache):
            step()
        if isinstance(record, PositionRecord) and record.turned:  # made anew in a copied cache
            copies = (keys.buffer for keys in record.turned.values())
            record_bytes["turned keys"] = sum(map(_storage_bytes, copies))
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak = max(accumulate(event.nbytes() for event in events))
    return {"cache": cache_bytes, "record": record_bytes, "peak": peak}


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def count_recompilations(method: TimedMethod, ids: torch.Tensor) -> CompileRecord:
    """Count graph breaks of compiled decoding, and recompilations after the first token.

    Cached keys turn on the way. The graphs run as they are traced: making them fast takes a backend
    minutes and changes neither number.
    """
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    compiled = replace(method, model=torch.compile(method.model, backend=backend))
    traced = []
    for step in compiled.decode(ids, copy.deepcopy(method.cache)):
        step()
        traced.append(len(graphs))
    torch._dynamo.reset()
    return {"graph_breaks": sum(breaks.values()), "recompilations": traced[-1] - traced[0]}


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


class TimesRecord(TypedDict):
    """A time and its ratios to the baseline's over the repeats.

    Attributes:
        ms: The median, in milliseconds.
        ratio: The median ratio.
        min: The smallest ratio.
        max: The largest ratio.
    """

    ms: float
    ratio: float
    min: float
    max: float


class GrowthRecord(TypedDict):
    """The time of re-rotating all cached keys.

    Attributes:
        ms: The median that it adds to a decode step, in milliseconds.
        tokens: Tokens that are decoded until the next re-rotation.
        share: `ms` as a share of these tokens' time.
    """

    ms: float
    tokens: int
    share: float


class TimingRecord(TypedDict):
    """A method's times.

    Attributes:
        prompt: The time to read the prompt.
        token: The time to decode a token.
        growth: The time of a re-rotation; None if the method has none.
    """

    prompt: TimesRecord
    token: TimesRecord
    growth: GrowthRecord | None


class MemoryRecord(TypedDict):
    """A method's memory in bytes.

    Attributes:
        cache: The cached keys and values.
        record: The cache's record of its rotation, by field, with the turned copies of keys that a
            position map keeps.
        peak: The cache and what decoding one token more holds at most.
    """

    cache: int
    record: dict[str, int]
    peak: int


class CompileRecord(TypedDict):
    """What torch.compile makes of a decode step.

    Attributes:
        graph_breaks: Graph breaks.
        recompilations: Recompilations after the first token.
    """

    graph_breaks: int
    recompilations: int


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


class SpeedRecord(CodeIdentity):
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
