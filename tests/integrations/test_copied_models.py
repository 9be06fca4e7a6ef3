"""Test copies, files, casts and replicas of patched models: each rotates as its own patch says.

Replicas are made by torch for nn.DataParallel; only the copy to another device is replaced, by one
that halves the weights, which shows without two devices whose weights a replica uses.
"""

import copy
import gc
import logging
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch.nn.parallel
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
    TRAINED,
    forward,
    logits,
    make_model,
    step_by_step,
    tokens,
)

import rope_patch

replicate = sys.modules["torch.nn.parallel.replicate"]

# -- copies and files ------------------------------------------------------------------------------

METHODS = {
    "yarn": {"factor": 4},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
    "dynamic-yarn": {},
    "ntk": {"factor": 4, "temperature": "log-n"},
}


def make_patched(family, method):
    model = make_model(family)
    rope_patch.patch(model, method, **METHODS[method])
    return model


def tensor_pointers(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named if tensor.numel()}


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "longrope"), ("llama", "ntk"), ("gemma3", "yarn"), ("gemma3", "dynamic-yarn")],
)
def test_copy_shares_nothing_with_the_original(family, method):
    model = make_patched(family, method)
    plain = logits(make_model(family))
    expected = logits(model)
    twin = copy.deepcopy(model)
    handle, twin_handle = rope_patch.current(model), rope_patch.current(twin)
    assert handle is not twin_handle
    assert (handle.active, twin_handle.active) == (True, True)
    assert not set(tensor_pointers(model).values()) & set(tensor_pointers(twin).values())
    assert not {id(module) for module in model.modules()} & {id(m) for m in twin.modules()}

    twin_handle.undo()
    assert logits(twin).equal(plain)
    assert logits(model).equal(expected)
    assert handle.active

    # Changes to the copy do not reach the original.
    rope_patch.patch(twin, "linear", factor=2)
    twin.bfloat16()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert logits(model).equal(expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_model_patched_through_a_wrapper_can_be_copied(duplicate):
    model = make_model()
    expected = {"none": logits(model)}
    handle = rope_patch.patch(torch.compile(model, backend="eager"), "yarn", factor=4)
    expected["yarn"] = logits(model)
    twin = duplicate(model)
    assert logits(twin).equal(expected["yarn"])
    with rope_patch.patch(twin, "linear", factor=4):  # its end restores the copy's patch
        assert not logits(twin).equal(expected["yarn"])
    assert logits(twin).equal(expected["yarn"])
    rope_patch.unpatch(twin)
    assert logits(twin).equal(expected["none"])
    assert handle.active


def test_copies_have_independent_lengths():
    """Use the original and its copy in turn, with different lengths and caches."""
    model = make_patched("llama", "dynamic-yarn")
    twin = copy.deepcopy(model)
    ids, prompt = tokens(TRAINED + 6), TRAINED - 4
    expected = step_by_step(model, ids, prompt)
    rope_patch.current(twin).fix_length(LONG)
    fixed = logits(twin, SHORT)
    assert step_by_step(model, ids, prompt).equal(expected)
    rope_patch.current(model).fix_length(LONG)
    assert logits(model, SHORT).equal(fixed)
    rope_patch.current(twin).fix_length(None)
    assert step_by_step(twin, ids, prompt).equal(expected)


@pytest.mark.parametrize("method", METHODS)
def test_torch_saved_model_loads_patched(method, tmp_path):
    model = make_patched("llama", method)
    plain, expected = logits(make_model()), logits(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert logits(loaded).equal(expected)
    assert str(rope_patch.current(loaded)) == str(rope_patch.current(model))
    rope_patch.unpatch(loaded)
    assert logits(loaded).equal(plain)
    assert logits(model).equal(expected)


def test_torch_saved_models_load_in_another_process(tmp_path):
    """Load in a process that has imported neither rope_patch nor the model's code."""
    for method in METHODS:
        model = make_patched("gemma3", method)
        content = (model, tokens(LONG), logits(model), logits(make_model("gemma3")))
        torch.save(content, tmp_path / f"{method}.pt")
    program = """
import sys, torch
torch.set_num_threads(1)
for path in sys.argv[1:]:
    model, ids, expected, plain = torch.load(path, weights_only=False)
    import rope_patch
    with torch.no_grad():
        assert model(input_ids=ids, use_cache=False).logits.equal(expected), path
        rope_patch.unpatch(model)
        assert model(input_ids=ids, use_cache=False).logits.equal(plain), path
print("all read")
"""
    command = [sys.executable, "-c", program, *(str(p) for p in tmp_path.glob("*.pt"))]
    package = str(Path(rope_patch.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert result.stdout == "all read\n", result.stderr


# -- casts -----------------------------------------------------------------------------------------
# The reference is a model with cast weights and uncast buffers of the rotary module.

CASTS = {
    "bfloat16()": lambda model: model.bfloat16(),
    "half()": lambda model: model.half(),
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "to(dtype=float16)": lambda model: model.to(dtype=torch.float16),
    "to(cpu, float64)": lambda model: model.to("cpu", torch.float64),
}
ALIKE = ("half()", "to(bfloat16)")
casts = pytest.mark.parametrize(
    "cast", [pytest.param(c, marks=pytest.mark.slow if c in ALIKE else ()) for c in CASTS]
)


def cast_weights_only(family, cast):
    """Return a cast model with restored frequencies."""
    model = make_model(family)
    rotary = model.model.rotary_emb
    exact = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    cast(model)
    for name, buffer in exact.items():
        rotary._buffers[name] = buffer
    return model


@casts
@pytest.mark.parametrize(
    ("family", "method", "options"),
    [("llama", "yarn", {"factor": 4}), ("gemma3", "dynamic-yarn", {})],
)
def test_cast_before_or_after_a_patch_changes_weights_only(family, cast, method, options):
    truth = cast_weights_only(family, CASTS[cast])
    rope_patch.patch(truth, method, **options)
    before, after = CASTS[cast](make_model(family)), make_model(family)
    rope_patch.patch(before, method, **options)
    rope_patch.patch(after, method, **options)
    CASTS[cast](after)
    assert after.lm_head.weight.dtype == truth.lm_head.weight.dtype != torch.float32
    for length in (SHORT, LONG):
        expected = logits(truth, length)
        assert logits(before, length).equal(expected)
        assert logits(after, length).equal(expected)


@casts
def test_far_positions_match_the_formula(cast):
    """Compare with float64; a cast buffer errs by more than a quarter of a rotation."""
    model = CASTS[cast](make_model())
    positions = torch.tensor([[0, 100, 2000, 60_000]])
    x = torch.zeros(1, dtype=torch.float64)
    pair = torch.arange(8, dtype=torch.float64)
    plain = positions[0, :, None] / 10_000 ** (pair / 8)

    def largest_error(angles):
        cos, sin = model.model.rotary_emb(x, positions)
        expected = torch.cat([angles, angles], -1)
        return max((cos - expected.cos()).abs().max(), (sin - expected.sin()).abs().max())

    if "float64" not in cast:
        assert largest_error(plain) > 1
    rope_patch.patch(model, "linear", factor=4)
    assert largest_error(plain / 4) < 0.01  # float32's rounding at 60,000 tokens


def logged_messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rope_patch"]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_repaired_frequencies_are_logged_once(family, caplog):
    model = make_model(family).half()
    with caplog.at_level(logging.WARNING, logger="rope_patch"):
        rope_patch.patch(model, "yarn", factor=4)
        logits(model)
        model.bfloat16()
        logits(model)
    (message,) = logged_messages(caplog)
    assert "float16" in message
    for name, _ in make_model(family).model.rotary_emb.named_buffers():
        assert (name in message) != ("original" in name)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_casts_after_a_patch_are_logged_once_and_moves_never(family, caplog):
    model = make_model(family)
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        rope_patch.patch(model, "yarn", factor=4)
        caplog.clear()
        model.to("cpu").float()
        assert not logged_messages(caplog)
        for cast in CASTS.values():
            cast(model)
        model.to("cpu")
    (message,) = logged_messages(caplog)
    assert "float32" in message


# -- replicas --------------------------------------------------------------------------------------

START = {"factor": 4, "long_factor": LONG_FACTOR, "start_tokens": 4}
REQUESTS = [
    ("llama", "yarn", {"factor": 4, "kernels": "auto"}),
    ("llama", "longrope", {"kernels": "auto", **START}),
    ("qwen3", "yarn", {"factor": 4, "kernels": "reference"}),
    ("gemma3", "dynamic-yarn", {"kernels": "hf"}),
    ("llama", "yarn", {"factor": 4, "kernels": "hf", "temperature": "log-n"}),
    ("qwen3", "dynamic-yarn", {"kernels": "reference", "temperature": 1.5}),
]


@pytest.fixture
def replicas(monkeypatch):
    """Make two replicas of a model, the second with half of each parameter."""

    def copies(tensors, devices, detach=False):
        parameter = [isinstance(tensor, torch.nn.Parameter) for tensor in tensors]
        return [
            [t * scale if p else t.clone() for t, p in zip(tensors, parameter, strict=True)]
            for scale in (1.0, 0.5)
        ]

    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(replicate, "_get_device_index", lambda device, *_: device)
    return lambda model: replicate.replicate(model, [0, 1])


@pytest.mark.parametrize(("family", "method", "options"), REQUESTS)
def test_replicas_use_their_weights(family, method, options, replicas):
    model = make_model(family)
    halved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in halved.parameters():
            parameter.mul_(0.5)
    for each in (model, halved):
        rope_patch.patch(each, method, **options)
    ids = tokens(100, batch=2)
    first, second = replicas(model)
    expected = forward(halved, ids)
    assert not forward(model, ids).equal(expected)
    torch.testing.assert_close(forward(second, ids), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(forward(first, ids), forward(model, ids), rtol=0, atol=1e-5)

    references = [
        weakref.ref(second.model.layers[0].self_attn),
        weakref.ref(second.model.rotary_emb),
    ]
    gc.disable()
    try:
        del first, second
        assert [reference() for reference in references] == [None, None]  # without a gc run
    finally:
        gc.enable()
    rope_patch.unpatch(model)
    assert forward(model, ids).equal(forward(make_model(family), ids))


def test_gradients_of_replicas_reach_the_original(replicas):
    """The gradients of both replicas are summed, as in a model without our kernels."""
    model, plain = make_model("qwen3"), make_model("qwen3")
    rope_patch.patch(model, "yarn", factor=4, kernels="reference")
    rope_patch.patch(plain, "yarn", factor=4, kernels="hf")
    ids = tokens(40)
    for each in (model, plain):
        total = [r(input_ids=ids, use_cache=False).logits.pow(2).mean() for r in replicas(each)]
        sum(total).backward()
    for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_bound_method_of_another_object_is_called(replicas):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    attention = model.model.layers[0].self_attn
    calls = []

    class Counter:
        def __init__(self, forward):
            self.wrapped = forward

        def forward(self, *args, **kwargs):
            calls.append(1)
            return self.wrapped(*args, **kwargs)

    attention.forward = Counter(attention.forward).forward
    first, _ = replicas(model)
    assert forward(first, tokens(20)).equal(forward(model, tokens(20)))
    assert len(calls) == 2
