"""A method on its own instance of the model: its times in turns with others, and its memory."""

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

from rope_patch.extension import Extension
from rope_patch.patching import Patch, patch_rotation
from rope_patch.patching.dynamic.cache_record import RotationRecord
from rope_patch.patching.position_maps.position_record import PositionRecord
from rope_patch.transformers_api.forwards import cache_arguments

WARMUP_TOKENS = 4  # decoded before any that counts: allocator and compiler have settled by then

# What the fields of a cache's record are called in results.
_RECORD_KEYS = {"row_spans": "bounds", "frequencies": "sets"}


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

    def read(self, ids: torch.Tensor, length: int) -> Any:
        """Read tokens at once into a new cache, of a sequence that will have `length` tokens."""
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
        given = {"position_ids": at, **cache_arguments(self.model, cache)}  # what generate gives
        return partial(self.model, ids, **given, use_cache=True, logits_to_keep=1)


def make_timed_method(name: str, model: Any, extension: Extension | None) -> TimedMethod:
    """Return a method on a copy of a model that shares its weights."""
    weights = {id(parameter): parameter for parameter in model.parameters()}
    instance = copy.deepcopy(model, weights)  # which takes the weights for copied already
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


def compare_times(times: list[list[float]], baseline: list[list[float]]) -> TimesRecord:
    """Return the median time and the ratios of the repeats, each the median over its turns."""
    ratios = [median(map(truediv, *repeat)) for repeat in zip(times, baseline, strict=True)]
    ms = 1e3 * median(chain.from_iterable(times))
    return {"ms": ms, "ratio": median(ratios), "min": min(ratios), "max": max(ratios)}


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


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def rotate_order(items: list[Any], turn: int) -> list[Any]:
    """Return the items in alternating order, so that none always follows the same one."""
    return items[:: -1 if turn % 2 else 1]
