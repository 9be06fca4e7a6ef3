"""Test copies and files of patched models: they are independent, also in another process."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
    logits,
    make_model,
    step_by_step,
)
from helpers.tiny_models import tokens as ids_of

import rope_patch

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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
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
    ids = ids_of(LONG)
    expected = step_by_step(model, ids, SHORT)
    rope_patch.current(twin).fix_length(LONG)
    fixed = logits(twin, SHORT)
    assert step_by_step(model, ids, SHORT).equal(expected)
    rope_patch.current(model).fix_length(LONG)
    assert logits(model, SHORT).equal(fixed)
    rope_patch.current(twin).fix_length(None)
    assert step_by_step(twin, ids, SHORT).equal(expected)


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
        content = (model, ids_of(LONG), logits(model), logits(make_model("gemma3")))
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
