"""Measure whole models with random weights: compiled decode steps, and a training step.

The weights are drawn on the device, so a config is enough, and everything compared runs in turns
in one process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import StaticCache

from rope_patch.benchmarks.kernels.implementations import describe_error
from rope_patch.benchmarks.kernels.timing import peak_memory
from rope_patch.entry_points import patch_rotation
from rope_patch.evaluation.measures.speed import (
    PLAIN,
    WARMUP_TOKENS,
    compare_times,
    make_timed_method,
    rotate_order,
    time_call,
)
from rope_patch.extension import Extension
from rope_patch.methods.registry import get_method
from rope_patch.pretrained.loading import auto_class, read_config
from rope_patch.training.memory.model import memory_need
from rope_patch.training.objective.chunked_loss import install_loss

_FACTOR = 4
_METHODS = (PLAIN, "yarn", "dynamic-yarn")
EAGER, COMPILED, GRAPHS = "eager", "compiled", "CUDA graphs"
_MODES = {COMPILED: None, GRAPHS: "reduce-overhead"}  # modes of torch.compile


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _random_model(path: str, layers: int | None) -> Any:
    """Return a random model of a folder's config; bfloat16 on a GPU, float32 on a CPU."""
    config = read_config(path)
    if layers is not None:
        config.num_hidden_layers = min(layers, config.num_hidden_layers)
    dtype = torch.bfloat16 if _device().type == "cuda" else torch.float32
    torch.manual_seed(0)
    with _device():
        return auto_class(config).from_config(config, dtype=dtype)


@torch.no_grad()
def measure_compiled(
    path: str,
    *,
    prompt: int,
    decode: int,
    repeats: int,
    layers: int | None = None,
    backend: str = "inductor",
) -> dict[str, Any]:
    """Time decode steps with a static cache: eager, compiled, and in CUDA graphs.

    Args:
        path: Folder of a config.
        prompt: Tokens before the first step.
        decode: Steps of a repeat.
        repeats: Repeats.
        layers: Layers of the model, to compile in less time; the config's if None.
        backend: Of torch.compile; CUDA graphs are Inductor's.

    Returns:
        For each method and mode: milliseconds a token, the ratio to the plain model's eager steps,
        or the reason why it was not measured.
    """
    model = _random_model(path, layers).eval()
    steps = WARMUP_TOKENS + repeats * decode
    ids = torch.randint(3, model.config.vocab_size, (1, prompt + steps), device=_device())
    calls: dict[tuple[str, str], list[Callable[[], Any]]] = {}
    rows: list[dict[str, Any]] = []
    for method in _METHODS:
        for mode in (EAGER, *_MODES):
            try:
                if mode == GRAPHS and (_device().type != "cuda" or backend != "inductor"):
                    raise ValueError("CUDA graphs need a GPU and Inductor")
                calls[method, mode] = _decode_calls(model, method, mode, ids, prompt, backend)
            except Exception as error:  # measure the others whatever it is
                if (method, mode) == (PLAIN, EAGER):
                    raise
                rows.append({"method": method, "mode": mode, "not_measured": describe_error(error)})
    seconds: dict[tuple[str, str], list[list[float]]] = {
        key: [[] for _ in range(repeats)] for key in calls
    }
    for index in range(repeats * decode):
        for key in rotate_order(list(calls), index):
            call = calls[key][WARMUP_TOKENS + index]
            if key[1] == GRAPHS:
                torch.compiler.cudagraph_mark_step_begin()
            seconds[key][index // decode].append(time_call(call))
    for (method, mode), times in seconds.items():
        row = compare_times(times, seconds[PLAIN, EAGER])
        rows.append({"method": method, "mode": mode, **row})
    return {"model": path, "layers": model.config.num_hidden_layers, "prompt": prompt, "rows": rows}


def _decode_calls(
    model: Any, method: str, mode: str, ids: torch.Tensor, prompt: int, backend: str
) -> list[Callable[[], Any]]:
    """Return the calls of all decode steps, the first of which have run."""
    length = ids.shape[1]
    follows = method != PLAIN and get_method(method).is_dynamic
    target = max(length, _FACTOR * model.config.max_position_embeddings)
    extension = Extension(
        method, factor=None if follows else _FACTOR, length=target if follows else None
    )
    timed = make_timed_method(method, model, None if method == PLAIN else extension)
    cache = StaticCache(config=timed.model.config, max_cache_len=length)
    timed.read(ids[:, :prompt], length, cache)
    if mode != EAGER:
        compiled = torch.compile(timed.model, backend=backend, mode=_MODES[mode])
        timed = replace(timed, model=compiled)
    calls = list(timed.decode(ids, cache))
    for call in calls[:WARMUP_TOKENS]:
        if mode == GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        call()
    return calls


def measure_training_step(path: str, *, length: int, repeats: int) -> dict[str, Any]:
    """Time a training step with activation checkpointing, and weigh its peak.

    Args:
        path: Folder of a config; its model is trained from random weights, by AdamW.
        length: Tokens of the row.
        repeats: Repeats.

    Returns:
        For transformers' own code and for this package's kernels and loss: seconds of a step, the
        ratio, the measured peak and the planned one, in bytes.
    """
    contenders = [_TrainingModel(path, length, is_ours=is_ours) for is_ours in (False, True)]
    peaks = [each.peak() for each in contenders]
    seconds: list[list[list[float]]] = [[] for _ in contenders]
    for repeat in range(repeats):
        for times, each in rotate_order(list(zip(seconds, contenders, strict=True)), repeat):
            times.append([time_call(each.step)])
    rows = [
        {
            "code": each.name,
            "loss": each.loss,
            **compare_times(times, seconds[0]),
            "peak": peak,
            "planned": each.planned(),
            "planned_over_peak": each.planned() / peak,
        }
        for each, times, peak in zip(contenders, seconds, peaks, strict=True)
    ]
    return {"model": path, "length": length, "rows": rows}


class _TrainingModel:
    """A model in training, with its optimizer and a row of tokens."""

    def __init__(self, path: str, length: int, *, is_ours: bool) -> None:
        self.name = "rope_patch" if is_ours else "transformers"
        self._model = _random_model(path, None).train()
        self.loss = "full"
        if is_ours:
            patch_rotation(self._model, "yarn", factor=_FACTOR)
            self.loss, _ = install_loss(self._model, "auto")
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        vocabulary = self._model.config.vocab_size
        self._ids = torch.randint(3, vocabulary, (1, length), device=_device())
        self.step()  # creates the optimizer's states

    def step(self) -> None:
        """Run forward, backward and the optimizer."""
        self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def peak(self) -> int:
        """Return the peak bytes of a step, with weights and the optimizer's states."""
        gc.collect()
        states = (t for state in self._optimizer.state.values() for t in state.values())
        held = (*self._model.parameters(), *self._model.buffers(), *states, self._ids)
        return _storage_bytes(held) + peak_memory(self.step)

    def planned(self) -> int:
        """Return the bytes that `finetune --plan` would say."""
        return memory_need(
            self._model.config,
            length=self._ids.shape[1],
            dtype=self._model.dtype,
            loss=self.loss,
            checkpointing=True,
        ).total


def _storage_bytes(values: Iterable[Any]) -> int:
    storages = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
