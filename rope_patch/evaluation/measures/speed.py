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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from operator import truediv
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DynamicCache

from rope_patch.methods.registry import get_method
from rope_patch.patching import Patch, check, patch
from rope_patch.patching.dynamic.cache_record import RotationRecord
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import empty_model, read_config, read_model, require_dtype
from rope_patch.rope_config import read_geometries
from rope_patch.utils import provenance
from rope_patch.utils.progress import progress_bar

PLAIN = "none"
_WARMUP_TOKENS = (
    4  # tokens decoded before any that counts: allocator and compiler have settled by then
)


@dataclass(frozen=True, kw_only=True)
class SpeedRequest:
    """What to measure.

    Attributes:
        model: A folder, a name on the Hub, or `demo`.
        methods: Names from `rope_patch.list_methods()`, and `none` for the model as it is; the
            first is what the others are compared with.
        factor: Target length / trained length; methods that follow the length need none.
        prompt: Tokens of the prompt; `factor` times the trained length unless given.
        decode: Tokens decoded one by one in each repeat.
        repeats: How often everything that is timed is done.
        trained_length: Tokens to take for those of pretraining; what the config says unless given.
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
        if self.handle is None or not self.handle.method.is_dynamic:
            return math.inf
        return self.handle.method.valid_until(length, self.handle.trained_length)

    def read(self, ids: torch.Tensor) -> Any:
        """Read tokens at once into a new cache."""
        cache = DynamicCache(config=self.model.config)
        self._forward(ids, 0, cache)()
        return cache

    def decode(self, ids: torch.Tensor, cache: Any) -> Iterator[Callable[[], Any]]:
        """Yield calls that read one token each, of all that the cache does not hold yet."""
        for at in range(cache.get_seq_length(), ids.shape[1]):
            yield self._forward(ids[:, at : at + 1], at, cache)

    def _forward(self, ids: torch.Tensor, start: int, cache: Any) -> Callable[[], Any]:
        at = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        cache_arguments = {"position_ids": at, "past_key_values": cache}  # what generate gives
        return partial(self.model, ids, **cache_arguments, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def bench(request: SpeedRequest) -> dict[str, Any]:
    """Measure prompts, decoding, growth and memory of all methods side by side.

    Args:
        request: What to measure.

    Returns:
        The setting, and a row for each method: see `timing_row`, `measure_memory` and
        `count_recompilations`.

    Raises:
        ValueError: A request that cannot be met.
    """
    _validate_request(request)
    path = demo.resolve_model_path(request.model)
    config = read_config(path)
    text = config.get_text_config(decoder=True)
    geometries = read_geometries(text, request.trained_length)
    trained = next(iter(geometries.values())).trained_length
    empty = empty_model(path, config)
    for name in request.methods:
        if name != PLAIN:
            check(empty, **_patch_arguments(request, name, trained))

    model = _load_model(request, path, config)
    patches = {
        name: None if name == PLAIN else _patch_arguments(request, name, trained)
        for name in request.methods
    }
    prompt = request.prompt or round(request.factor * trained)
    rows, start = _measure_rows(model, patches, prompt, request)
    return {
        **asdict(request),
        "architecture": type(model).__name__,
        "layers": text.num_hidden_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "trained_length": trained,
        "prompt": prompt,
        "decode_from": start,
        "date": provenance.now(),
        "versions": provenance.versions(),
        "methods": rows,
    }


@torch.no_grad()
def compare_methods(
    model: Any, patches: dict[str, dict[str, Any] | None], prompt: int, repeats: int = 3
) -> dict[str, Any]:
    """Measure what methods cost on a loaded model, as multiples of the first one's cost.

    Args:
        model: The model, unpatched; it is left as it is.
        patches: What `patch` gets, by label; None is the model as it is.
        prompt: Tokens of the prompt.
        repeats: How often everything is timed.

    Returns:
        By label: prompt_tokens, prompt_seconds and token_seconds (medians), prompt_ratio and
        token_ratio (smallest, median and largest over the repeats), cache_bytes and peak_bytes.
    """
    request = SpeedRequest(model="", methods=tuple(patches), decode=16, repeats=repeats)
    rows, _ = _measure_rows(model, patches, prompt, request)
    return {
        row["method"]: {
            "prompt_tokens": prompt,
            "prompt_seconds": row["prompt"]["ms"] / 1e3,
            "prompt_ratio": [row["prompt"][key] for key in ("min", "ratio", "max")],
            "token_seconds": row["token"]["ms"] / 1e3,
            "token_ratio": [row["token"][key] for key in ("min", "ratio", "max")],
            "cache_bytes": row["memory"]["cache"],
            "peak_bytes": row["memory"]["peak"],
        }
        for row in rows
    }


def _measure_rows(
    model: Any, patches: dict[str, dict[str, Any] | None], prompt: int, request: SpeedRequest
) -> tuple[list[dict[str, Any]], int]:
    """Return a row for each method, and the length that they decoded from."""
    contenders = [
        _make_timed_method(name, model, patch_arguments)
        for name, patch_arguments in patches.items()
    ]
    start = decode_start_length(contenders, prompt, request.decode)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (1, prompt + 1 + request.decode), generator=generator)
    ids = ids.to(model.device)
    until = start + 1 + request.decode
    for c in progress_bar(contenders, desc="warming up", unit="method"):
        c.cache = c.read(ids[:, : start - _WARMUP_TOKENS])
    for repeat in progress_bar(range(request.repeats), desc="timing", unit="repeat"):
        for c in _rotate_order(contenders, repeat):
            c.prompt.append([time_call(partial(c.read, ids[:, :prompt]))])
        time_decoding(contenders, ids[:, :until])
    rows = []
    for c in progress_bar(contenders, desc="weighing", unit="method"):
        row = {
            "method": c.name,
            **timing_row(c, contenders[0], start),
            "memory": measure_memory(c, ids, start),
        }
        if request.compiled:
            row["compile"] = count_recompilations(c, ids[:, :until])
        rows.append(row)
    return rows, start


def decode_start_length(contenders: list[TimedMethod], prompt: int, decode: int) -> int:
    """Return the longest length up to the prompt's after which one more token re-rotates keys.

    Where no method's do, the prompt's own length.

    Raises:
        ValueError: There is no room for the lead before it, or keys would turn again after it.
    """
    followers = [c for c in contenders if c.valid_until(1) < math.inf]
    ends = (n for n in range(prompt, 0, -1) if all(c.valid_until(n) < n + 1 for c in followers))
    start = next(ends, prompt)
    if start <= _WARMUP_TOKENS:
        raise ValueError(f"the prompt must be longer than {_WARMUP_TOKENS} tokens, got {prompt}")
    room = min((int(c.valid_until(start + 1)) - start - 1 for c in followers), default=decode)
    if decode > room:
        raise ValueError(
            f"decode must be at most {room} tokens, because after {start + 1 + room:,} the cached "
            f"keys turn again, got {decode}: decode fewer, or give a longer prompt"
        )
    return start


def time_decoding(contenders: list[TimedMethod], ids: torch.Tensor) -> None:
    """Time one repeat of decoding, in turns: warm-up, the re-rotating token, and the rest."""
    calls = [c.decode(ids, copy.deepcopy(c.cache)) for c in contenders]
    times_of_methods: list[list[float]] = [[] for _ in contenders]
    for turn, steps in enumerate(zip(*calls, strict=True)):
        for times, step in _rotate_order(list(zip(times_of_methods, steps, strict=True)), turn):
            times.append(time_call(step))
    for contender, times in zip(contenders, times_of_methods, strict=True):
        first, *steady = times[_WARMUP_TOKENS:]
        contender.token_times.append(steady)
        contender.growth_times.append([first - median(steady)])


def time_call(call: Callable[[], Any]) -> float:
    """Return how long a call takes, with the work that it queues on a GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else bool
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def timing_row(contender: TimedMethod, baseline: TimedMethod, start: int) -> dict[str, Any]:
    """Return the times to report, in milliseconds and as ratios to the baseline's.

    `growth_times` is what turning all cached keys at `start` tokens adds to a step, also as a share
    of the time of the tokens that are decoded until they turn again; None where they do not turn.
    """
    token, growth = compare_times(contender.token_times, baseline.token_times), None
    if contender.valid_until(start) < start + 1:
        ms = 1e3 * median(chain.from_iterable(contender.growth_times))
        tokens = int(contender.valid_until(start + 1)) - start
        growth = {"ms": ms, "tokens": tokens, "share": ms / (tokens * token["ms"])}
    return {
        "prompt": compare_times(contender.prompt_times, baseline.prompt_times),
        "token": token,
        "growth": growth,
    }


def compare_times(times: list[list[float]], baseline: list[list[float]]) -> dict[str, float]:
    """Return median milliseconds and the ratios of the repeats, each the median over its turns."""
    ratios = [median(map(truediv, *repeat)) for repeat in zip(times, baseline, strict=True)]
    ms = 1e3 * median(chain.from_iterable(times))
    return {"ms": ms, "ratio": median(ratios), "min": min(ratios), "max": max(ratios)}


def measure_memory(contender: TimedMethod, ids: torch.Tensor, start: int) -> dict[str, Any]:
    """Return bytes of the cache and its record at `start` tokens, and the peak of re-rotation.

    That peak is of the cache and of what decoding one token more holds for a moment.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or some builds of torch report on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cache = copy.deepcopy(contender.cache)
        for step in contender.decode(ids[:, :start], cache):
            step()
        record = getattr(cache, "rotation", None)
        record_fields = vars(record) if isinstance(record, RotationRecord) else {}
        sizes = {
            "cache": sum(
                _storage_bytes(t) for layer in cache.layers for t in (layer.keys, layer.values)
            ),
            "record": {
                k: _storage_bytes(t)
                for k, t in record_fields.items()
                if isinstance(t, torch.Tensor)
            },
        }
        for step in contender.decode(ids[:, : start + 1], cache):
            step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return {**sizes, "peak": max(accumulate(event.nbytes() for event in events))}


def count_recompilations(contender: TimedMethod, ids: torch.Tensor) -> dict[str, int]:
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
    compiled = replace(contender, model=torch.compile(contender.model, backend=backend))
    traced = []
    for step in compiled.decode(ids, copy.deepcopy(contender.cache)):
        step()
        traced.append(len(graphs))
    torch._dynamo.reset()
    return {"graph_breaks": sum(breaks.values()), "recompilations": traced[-1] - traced[0]}


def format_table(results: dict[str, Any]) -> str:
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
        for name in ("graph_breaks", "recompilations"):
            lines[name.replace("_", " ")] = [str(row["compile"][name]) for row in rows]
    cells = [[name, *columns] for name, columns in lines.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    about = (
        f"{r['architecture']}, {r['layers']} layers, {r['dtype']} on {r['device']}, trained on "
        f"{r['trained_length']:,} tokens; medians of {r['repeats']} repeats, as multiples of "
        f"{rows[0]['method']} (smallest to largest)"
    )
    return "\n".join([about, *padded])


def _ratio_text(m: dict[str, float]) -> str:
    return f"{m['ms']:,.2f} ms ×{m['ratio']:.3f} ({m['min']:.3f} to {m['max']:.3f})"


def _growth_text(m: dict[str, float] | None) -> str:
    return f"{m['ms']:,.2f} ms, {m['share']:.2%} of {m['tokens']:,} tokens' time" if m else "–"


def _kilobytes(size: int) -> str:
    return f"{size / 1e3:,.1f} kB"


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _rotate_order(items: list[Any], turn: int) -> list[Any]:
    """Return the items in alternating order, so that none always follows the same one."""
    return items[:: -1 if turn % 2 else 1]


def _patch_arguments(request: SpeedRequest, name: str, trained: int) -> dict[str, Any]:
    """Return what `patch` gets, so that all methods reach the same length."""
    arguments = {"method": name, "trained_length": request.trained_length}
    if get_method(name).is_dynamic:
        return {**arguments, "length": round(request.factor * trained)}
    return {**arguments, "factor": request.factor}


def _make_timed_method(
    name: str, model: Any, patch_arguments: dict[str, Any] | None
) -> TimedMethod:
    weights = {id(parameter): parameter for parameter in model.parameters()}
    instance = copy.deepcopy(model, weights)  # which takes the weights for copied already
    handle = None if patch_arguments is None else patch(instance, **patch_arguments)
    return TimedMethod(name=name, model=instance, handle=handle)


def _load_model(request: SpeedRequest, path: str, config: Any) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = "auto" if device == "cuda" else torch.float32
    if request.dtype != "auto":
        dtype = getattr(torch, request.dtype)
    if not request.random_weights:
        return read_model(path, dtype=dtype).to(device)
    with torch.device(device):
        dtype = config.dtype if dtype == "auto" else dtype
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


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
