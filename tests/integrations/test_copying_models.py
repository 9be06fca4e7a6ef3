"""Copies and files of patched models: each stands on its own, in this process and in another."""

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
}


def made(family, method):
    model = make_model(family)
    rope_patch.patch(model, method, **METHODS[method])
    return model


def tensors_of(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named if tensor.numel()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_copy_shares_nothing_with_the_original(family, method):
    model = made(family, method)
    plain = logits(make_model(family))
    expected = logits(model)
    twin = copy.deepcopy(model)
    ours, theirs = rope_patch.current(model), rope_patch.current(twin)
    assert ours is not theirs
    assert (ours.active, theirs.active) == (True, True)
    assert not set(tensors_of(model).values()) & set(tensors_of(twin).values())
    assert not {id(module) for module in model.modules()} & {id(m) for m in twin.modules()}

    theirs.undo()
    assert logits(twin).equal(plain)
    assert logits(model).equal(expected)
    assert ours.active

    # What is done to a copy, patched anew, stays there.
    rope_patch.patch(twin, "linear", factor=2)
    twin.bfloat16()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert logits(model).equal(expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_what_was_patched_through_a_wrapper_is_copied_without_it(copied):
    model = make_model()
    expected = {"none": logits(model)}
    handle = rope_patch.patch(torch.compile(model, backend="eager"), "yarn", factor=4)
    expected["yarn"] = logits(model)
    twin = copied(model)
    assert logits(twin).equal(expected["yarn"])
    with rope_patch.patch(twin, "linear", factor=4):  # leaving it restores the copy's own patch
        assert not logits(twin).equal(expected["yarn"])
    assert logits(twin).equal(expected["yarn"])
    rope_patch.unpatch(twin)
    assert logits(twin).equal(expected["none"])
    assert handle.active


def test_copies_that_follow_lengths_do_so_by_themselves():
    """Each to its own length, with caches in use in turns."""
    model = made("llama", "dynamic-yarn")
    twin = copy.deepcopy(model)
    ids = ids_of(LONG)
    alone = step_by_step(model, ids, SHORT)
    rope_patch.current(twin).fix_length(LONG)
    fixed = logits(twin, SHORT)
    assert step_by_step(model, ids, SHORT).equal(alone)
    rope_patch.current(model).fix_length(LONG)
    assert logits(model, SHORT).equal(fixed)
    rope_patch.current(twin).fix_length(None)
    assert step_by_step(twin, ids, SHORT).equal(alone)


@pytest.mark.parametrize("method", METHODS)
def test_a_file_of_a_whole_model_comes_back_patched(method, tmp_path):
    model = made("llama", method)
    plain, expected = logits(make_model()), logits(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert logits(loaded).equal(expected)
    assert str(rope_patch.current(loaded)) == str(rope_patch.current(model))
    rope_patch.unpatch(loaded)
    assert logits(loaded).equal(plain)
    assert logits(model).equal(expected)


def test_another_process_reads_such_files(tmp_path):
    """One that has imported nothing of ours, nor the model's code, until it reads them."""
    for method in METHODS:
        model = made("gemma3", method)
        given = (model, ids_of(LONG), logits(model), logits(make_model("gemma3")))
        torch.save(given, tmp_path / f"{method}.pt")
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
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.stdout == "all read\n", done.stderr
