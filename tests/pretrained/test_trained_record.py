"""Test what a model starts from that was trained under a patch, for every kind of method.

The weights are random: what counts is that they are recorded as trained.
"""

import json

import pytest
import torch
from helpers.releases import plain_transformers
from helpers.tiny_models import (
    FACTOR,
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    logits,
    make_model,
)
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.original_config import FIELD
from rope_patch.original_config import TRAINED as RECORD
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.pretrained.sidecar import SIDECAR
from rope_patch.pretrained.trained_rotation import mark_trained

STATED = {  # by a config of transformers
    "linear": {"factor": FACTOR},
    "ntk": {"factor": FACTOR},
    "ntk-by-parts": {"factor": FACTOR},
    "yarn": {"factor": FACTOR, "beta_fast": 16},
    "llama3": {"factor": FACTOR},
    "abf": {"factor": FACTOR},
    "longrope": {"factor": FACTOR, "long_factor": LONG_FACTOR},
    "clipped": {"factor": FACTOR},
    "mixed-ntk": {"factor": FACTOR},
}
UNSTATED = {
    "dynamic": {"factor": 2},
    "dynamic-yarn": {},
    "mixed-yarn": {"length": TARGET},
    "mixed-longrope": {
        "length": TARGET,
        "long_factor": LONG_FACTOR,
        "attention_factor": 1.2,
    },
    "self-extend": {},
    "nope": {"temperature": "drope:0.4"},
    "yarn": {"length": TARGET, "temperature": "log-n"},
    "longrope": {"length": TARGET, "long_factor": LONG_FACTOR, "start_tokens": 4},
}


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def save_trained(folder, method, family="llama", **arguments):
    """Save a model that counts as trained under a patch; return it."""
    model = make_model(family)
    rope_patch.patch(model, method, **arguments)
    mark_trained(model)
    rope_patch.save(model, folder)
    return model


def rotation(model):
    """Return what transformers' module rotates by."""
    return find_rotaries(model)[0].module.inv_freq


@pytest.mark.parametrize("method", STATED)
def test_stated_rotation_is_the_start_of_others(method, tmp_path):
    save_trained(tmp_path, method, **STATED[method])
    model, expected = plain_model(tmp_path), plain_model(tmp_path)
    handle = rope_patch.patch(model, "dynamic-yarn", factor=2)
    assert (handle.trained_length, handle.length) == (TARGET, 2 * TARGET)
    # transformers computes the long set of frequencies in float32.
    tolerance = 1e-3 if method in ("longrope", "mixed-ntk") else 0
    torch.testing.assert_close(
        logits(model, TARGET), logits(expected, TARGET), rtol=0, atol=tolerance
    )
    assert not logits(model, TARGET + 40).equal(logits(expected, TARGET + 40))
    handle = rope_patch.patch(model, "linear", factor=2)
    assert (handle.trained_length, handle.length) == (TARGET, 2 * TARGET)
    if tolerance == 0:  # modules with two sets start with the short one
        torch.testing.assert_close(rotation(model) * 2, rotation(expected), rtol=1e-6, atol=0)
    handle.undo()
    assert logits(model).equal(logits(expected))


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs configs by layer type")
@pytest.mark.parametrize("family", ["gemma3", "phi3"])
def test_layer_types_and_longrope_alone_continue(family, tmp_path):
    save_trained(tmp_path, "yarn", family, factor=FACTOR)
    model, expected = plain_model(tmp_path), plain_model(tmp_path)
    handle = rope_patch.patch(model, "dynamic-yarn", factor=2)
    assert (handle.trained_length, handle.length) == (TARGET, 2 * TARGET)
    assert logits(model, TARGET).equal(logits(expected, TARGET))


@pytest.mark.parametrize("method", UNSTATED)
def test_unstated_rotation_is_restored_or_replaced_but_never_guessed(method, tmp_path):
    arguments = UNSTATED[method]
    trained = save_trained(tmp_path / "one", method, **arguments)
    loaded = rope_patch.load(tmp_path / "one")
    assert logits(loaded, LONG).equal(logits(trained, LONG))
    with plain_transformers():  # 5.0 has no rope type for pairs that do not rotate
        subjects = [plain_model(tmp_path / "one"), loaded]
    for model in subjects:
        before = logits(model)
        with pytest.raises(ValueError, match=rf"trained under {method}.*start='unscaled'"):
            rope_patch.patch(model, "ntk", factor=2)
        assert logits(model).equal(before)
        with rope_patch.patch(model, "ntk", factor=2, start="unscaled") as handle:
            assert (handle.trained_length, handle.length) == (TRAINED, 2 * TRAINED)
    with pytest.raises(ValueError, match=f"trained under {method}"):
        rope_patch.load(tmp_path / "one", "ntk", factor=2)
    with pytest.raises(ValueError, match=f"trained under {method}"):
        rope_patch.patch(subjects[0], method, **{**arguments, "temperature": 1.5})
    rope_patch.patch(subjects[0], method, **arguments)  # the very request of the training
    assert logits(subjects[0], LONG).equal(logits(trained, LONG))
    for number, model in enumerate(subjects):
        rope_patch.save(model, tmp_path / str(number))
        again = plain_model(tmp_path / str(number))
        with pytest.raises(ValueError, match=f"trained under {method}"):
            rope_patch.patch(again, "ntk", factor=2)


def test_training_again_records_the_last_rotation(tmp_path):
    save_trained(tmp_path / "one", "yarn", factor=2)
    model = plain_model(tmp_path / "one")
    rope_patch.patch(model, "yarn", factor=2)
    mark_trained(model)
    rope_patch.save(model, tmp_path / "two")
    handles = [
        rope_patch.patch(plain_model(tmp_path / "two"), "yarn", factor=2),
        rope_patch.current(rope_patch.load(tmp_path / "two", "yarn", factor=2)),
        rope_patch.patch(rope_patch.load(tmp_path / "two"), "yarn", factor=2),
    ]
    assert {(handle.trained_length, handle.length) for handle in handles} == {
        (4 * TRAINED, 8 * TRAINED)
    }
    restored = rope_patch.current(rope_patch.load(tmp_path / "two"))
    assert (restored.trained_length, restored.length) == (2 * TRAINED, 4 * TRAINED)
    handle = rope_patch.patch(plain_model(tmp_path / "two"), "yarn", factor=2, start="unscaled")
    assert (handle.trained_length, handle.length) == (TRAINED, 2 * TRAINED)


def rewrite(path, change):
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def forget_record(folder):
    """Make a folder one of a release before the record."""
    rewrite(folder / "config.json", lambda fields: fields[FIELD].pop(RECORD))
    rewrite(folder / SIDECAR, lambda fields: fields.pop(RECORD))


def read_plainly(folder, **arguments):
    return rope_patch.patch(plain_model(folder), **arguments)


def read_by_us(folder, method, **arguments):
    return rope_patch.current(rope_patch.load(folder, method, **arguments))


@pytest.mark.parametrize("read", [read_plainly, read_by_us])
@pytest.mark.parametrize("method", ["yarn", "linear", "ntk", "llama3"])
def test_folder_without_the_record_is_refused_with_both_lengths(read, method, tmp_path):
    model = make_model("llama")
    rope_patch.patch(model, method, factor=FACTOR)
    rope_patch.save(model, tmp_path)
    forget_record(tmp_path)
    assert logits(rope_patch.load(tmp_path)).equal(logits(model))
    with pytest.raises(ValueError, match=rf"trained_length={TARGET} if.*trained_length={TRAINED}"):
        read(tmp_path, method="yarn", factor=8)
    for length in (TRAINED, TARGET):
        handle = read(tmp_path, method="yarn", factor=8, trained_length=length)
        assert (handle.trained_length, handle.length) == (length, 8 * length)
    handle = read(tmp_path, method="yarn", factor=8, start="unscaled")
    assert handle.trained_length == TRAINED
    handle = read(tmp_path, method="yarn", factor=8, start="running")
    assert handle.trained_length == TARGET


def test_card_of_an_earlier_finetune_says_that_it_trained(tmp_path):
    save_trained(tmp_path, "yarn", factor=FACTOR)
    forget_record(tmp_path)
    (tmp_path / "README.md").write_text("Made by `rope-patch finetune --config recipe.yaml` with\n")
    assert read_by_us(tmp_path, "yarn", factor=2).trained_length == TARGET
    assert rope_patch.patch(rope_patch.load(tmp_path), "yarn", factor=2).trained_length == TARGET
    (table,) = rope_patch.diagnose(tmp_path).rotations.values()
    assert table.geometry.trained_length == TARGET


def test_files_that_disagree_are_refused(tmp_path):
    save_trained(tmp_path, "yarn", factor=FACTOR)
    rewrite(tmp_path / SIDECAR, lambda fields: fields.update({RECORD: False}))
    refusal = rf"config.json says .* trained for {TARGET} tokens, and {SIDECAR} .* not trained"
    for read in (rope_patch.load, rope_patch.diagnose):
        with pytest.raises(ValueError, match=refusal):
            read(tmp_path)


def test_damaged_record_is_refused(tmp_path):
    save_trained(tmp_path, "yarn", factor=FACTOR)
    model = plain_model(tmp_path)
    getattr(model.config, FIELD)[RECORD].pop("rope_parameters")
    with pytest.raises(ValueError, match="must hold the trained max_position_embeddings"):
        rope_patch.patch(model, "yarn", factor=2)


def test_undoing_leaves_the_record(tmp_path):
    model = save_trained(tmp_path, "longrope", **STATED["longrope"], short_factor=SHORT_FACTOR)
    rope_patch.unpatch(model)
    handle = rope_patch.patch(model, "yarn", factor=2)
    assert (handle.trained_length, handle.length) == (TARGET, 2 * TARGET)
