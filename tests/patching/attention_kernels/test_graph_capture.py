"""Test what a CUDA graph needs of a decode step: no read of the device, and the same work again.

No GPU is needed: operators are logged as they are dispatched, with Triton's interpreter paused.
"""

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from helpers.tiny_models import OLD_TRANSFORMERS, assert_close, forward, make_model, tokens
from kernel_models import patch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

from rope_patch.patching import LengthHooks, length_warning, stamp

pytest.importorskip("triton")

from rope_patch.ops.kernels import cache_write
from rope_patch.ops.kernels.launcher import Launcher

START, STEPS = 4, 8  # tokens of the prompt, and after it

# Operators whose results or shapes depend on numbers, so a GPU's stream has to be waited for.
READING_OPERATORS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2",
    "unique_dim", "unique_consecutive", "bincount", "repeat_interleave",
}  # fmt: skip

# Methods that read a CPU's tensor without an operator.
READING_METHODS = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
}


@dataclass
class Log:
    """What a step did.

    Attributes:
        reads: What reads the device.
        operators: All operators, with the shapes, strides and dtypes of their results.
        launches: Launches of our kernels.
    """

    reads: list = field(default_factory=list)
    operators: list = field(default_factory=list)
    launches: int = 0
    is_paused: bool = False


class OperatorLog(TorchDispatchMode):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self.log.is_paused:
            name = func.overloadpacket.__name__
            results = out if isinstance(out, tuple | list) else [out]
            tensors = [x for x in results if isinstance(x, torch.Tensor)]
            layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]
            self.log.operators.append((name, layouts))
            has_mask = name in ("index", "index_put", "index_put_") and any(
                x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
            )
            if name in READING_OPERATORS or has_mask:
                self.log.reads.append(name)
        return out


class MethodLog(TorchFunctionMode):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Not "cpu" as a device: that of another tensor is a GPU elsewhere.
        to_host = "cpu" in [x for x in (*args[1:], *(kwargs or {}).values()) if type(x) is str]
        if not self.log.is_paused and (
            func in READING_METHODS or (func is torch.Tensor.to and to_host)
        ):
            self.log.reads.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def paused(log):
    log.is_paused, before = True, log.is_paused
    yield
    log.is_paused = before


@contextmanager
def logged():
    log, launch, prepare = Log(), Launcher.__call__, LengthHooks.prepare

    def count(self, *args):
        log.launches += 1
        with paused(log):
            launch(self, *args)

    def prepare_paused(self, *args):
        with paused(log):
            prepare(self, *args)

    with pytest.MonkeyPatch.context() as monkeypatch, MethodLog(log), OperatorLog(log):
        monkeypatch.setattr(Launcher, "__call__", count)
        monkeypatch.setattr(LengthHooks, "prepare", prepare_paused)
        yield log


class Decoder:
    """Decodes into a static cache, with all inputs given, as a step that is to be captured."""

    def __init__(self, model):
        self.model, self.ids = model, tokens(START + STEPS)
        self.cache = StaticCache(config=model.config, max_cache_len=START + STEPS)
        self.position = 0
        self.step(START)
        self.step()  # makes what is kept from step to step

    @torch.no_grad()
    def step(self, count=1):
        """Return the last token's logits and the step's log."""
        start, self.position = self.position, self.position + count
        positions = torch.arange(start, self.position)
        mask = (torch.arange(START + STEPS) <= positions[:, None])[None, None]
        if len(set(getattr(self.model.config, "layer_types", None) or [None])) > 1:
            mask = dict.fromkeys(self.model.config.layer_types, mask)
        inputs = {"input_ids": self.ids[:, start : self.position], "attention_mask": mask}
        inputs |= {"position_ids": positions[None], "past_key_values": self.cache}
        with logged() as log:
            logits = self.model(**inputs).logits
        return logits[:, -1:], log


@pytest.fixture
def model(request, monkeypatch):
    """Make a model, and let the hooks of its decoder treat its cache as one on a GPU."""
    monkeypatch.setattr(stamp, "known_length", lambda cache: None)
    monkeypatch.setattr(length_warning, "_upper_bound", lambda _: START + STEPS)
    return make_model(request.param)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("llama", "yarn"),
        ("llama", "dynamic-yarn"),
        ("qwen3", "yarn"),
        ("gemma3", "dynamic-yarn"),
        pytest.param("qwen3", "dynamic-yarn", marks=pytest.mark.slow),
        pytest.param("gemma3", "yarn", marks=pytest.mark.slow),
    ],
    indirect=["model"],
)
def test_steps_read_nothing_and_repeat_the_same_operators(model, method):
    """A dynamic method decides ahead of the layers, in `prepare`, which reads the position."""
    if OLD_TRANSFORMERS and model.config.model_type == "qwen3":
        pytest.skip("the model's own forward reads the cache's length")
    patch(model, "triton", method)
    decoder = Decoder(model)
    (_, first), (got, second) = decoder.step(), decoder.step()
    assert first.reads == second.reads == []
    assert first.operators == second.operators
    assert len(first.operators) > 100
    assert first.launches == second.launches == model.config.num_hidden_layers
    patch(model, "hf", method)
    expected = forward(model, decoder.ids[:, : decoder.position])[:, -1:]
    assert_close(got, expected)


READS = {
    "item": lambda x: x.max().item(),
    "a condition": lambda x: bool(x.max() > 3),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 3],
    "a copy to the host": lambda x: x.to("cpu"),
}


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="rotations do not write into its static caches")
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_reads_in_the_rotation_are_seen(model, monkeypatch):
    patch(model, "triton")
    decoder = Decoder(model)
    launch = cache_write.launch
    for name, read in READS.items():

        def read_and_launch(*args, read=read):
            read(args[inspect.getfullargspec(launch).args.index("positions")])
            return launch(*args)

        monkeypatch.setattr(cache_write, "launch", read_and_launch)
        assert len(decoder.step()[1].reads) >= model.config.num_hidden_layers, name


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_an_operator_more_in_a_later_step_is_seen(model):
    patch(model, "triton")
    decoder = Decoder(model)
    _, first = decoder.step()
    model.lm_head.register_forward_hook(lambda module, args, output: output + 0)
    assert decoder.step()[1].operators != first.operators
