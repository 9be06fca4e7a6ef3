"""Test that all readers of a folder that `save` wrote agree on what was trained."""

import json

import pytest
import torch
from helpers.published_yarn import (
    PUBLISHED,
    kind_of,
    logits,
    make_model,
    multiplied,
    present_length,
)
from helpers.tiny_models import OLD_TRANSFORMERS, TARGET, TRAINED
from helpers.tiny_models import logits as logits_of_family
from helpers.tiny_models import make_model as make_family
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.original_config import FIELD

pytestmark = pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs nested YaRN and new model types")
FOUR_TIMES = [name for name in PUBLISHED if name != "DeepSeek-V3"]  # whose lengths can be followed


def save_extended(folder, name, **changes):
    """Save a published checkpoint at four times its length; return it."""
    model = make_model(name, **changes)
    rope_patch.patch(model, "yarn", factor=4)
    rope_patch.save(model, folder)
    return model


def plain_model(folder):
    """Load a folder by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def trained_lengths(folder):
    """Return what diagnose, load, and patch on a model of transformers take for trained."""
    plain = plain_model(folder)
    tables = [
        next(iter(rope_patch.diagnose(subject).rotations.values())) for subject in (folder, plain)
    ]
    handles = [
        rope_patch.current(rope_patch.load(folder)),
        rope_patch.current(rope_patch.load(folder, "yarn", factor=8)),
        rope_patch.patch(plain, "yarn", factor=8),
    ]
    return {table.geometry.trained_length for table in tables} | {
        handle.trained_length for handle in handles
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_plain_transformers_rotates_as_the_saved_patch(name, tmp_path):
    patched = save_extended(tmp_path, name)
    expected, mscales = multiplied(name, 4)
    plain = plain_model(tmp_path)
    torch.testing.assert_close(logits(plain), logits(patched), rtol=0, atol=1e-5)
    loaded = rope_patch.current(rope_patch.load(tmp_path))
    assert loaded.frequencies[kind_of(name)].close_to(expected)
    assert loaded.softmax_mscale == pytest.approx(next(iter(mscales), 1.0), rel=1e-9)
    assert loaded.length == plain.config.max_position_embeddings == 4 * present_length(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_readers_agree_on_the_trained_length(name, tmp_path):
    save_extended(tmp_path, name)
    assert trained_lengths(tmp_path) == {present_length(name)}
    assert "trained in" in str(rope_patch.diagnose(tmp_path))


@pytest.mark.parametrize("name", PUBLISHED)
def test_patch_on_a_saved_model_replaces_the_saved_patch(name, tmp_path):
    save_extended(tmp_path, name)
    plain, fresh = plain_model(tmp_path), make_model(name)
    before, present = logits(plain), present_length(name)
    with pytest.raises(ValueError, match=rf"reads {4 * present:,} tokens.*ends at {2 * present:,}"):
        rope_patch.patch(plain, "yarn", factor=2)
    assert logits(plain).equal(before)
    handle = rope_patch.patch(plain, "yarn", factor=2, trained_length=present)
    rope_patch.patch(fresh, "yarn", factor=2)
    assert logits(plain).equal(logits(fresh))
    assert handle.length == 2 * present
    handle.undo()
    assert logits(plain).equal(before)


@pytest.mark.parametrize("method", ["yarn", "linear", "ntk"])
def test_shorter_request_on_a_saved_model_is_refused_with_both_lengths(method, tmp_path):
    model = make_family("llama")
    rope_patch.patch(model, method, factor=4)
    rope_patch.save(model, tmp_path)
    plain = plain_model(tmp_path)
    refusal = rf"reads {TARGET} tokens.*ends at {2 * TRAINED}.*trained_length={TRAINED}"
    with pytest.raises(ValueError, match=refusal):
        rope_patch.patch(plain, method, factor=2)
    for answer in ({"trained_length": TRAINED}, {"start": "unscaled"}):
        with rope_patch.patch(plain, method, factor=2, **answer) as handle:
            assert (handle.trained_length, handle.length) == (TRAINED, 2 * TRAINED)


@pytest.mark.parametrize("name", FOUR_TIMES)
def test_dynamic_patch_on_a_saved_model_is_the_checkpoint_up_to_its_length(name, tmp_path):
    present = round(16 * PUBLISHED[name][2]["factor"])
    sizes = {"original_max_position_embeddings": 16, "length": present}
    save_extended(tmp_path, name, **sizes)
    plain, checkpoint = plain_model(tmp_path), make_model(name, **sizes)
    assert not logits(plain).equal(logits(checkpoint))
    rope_patch.patch(plain, "dynamic-yarn")
    assert logits(plain, present).equal(logits(checkpoint, present))


@pytest.mark.parametrize("options", [{}, {"beta_fast": 16, "truncate": False}])
def test_saved_yarn_does_not_count_as_trained(options, tmp_path):
    """A config that states constants of the formula would count, had the patch not been saved."""
    model = make_family("llama")
    rope_patch.patch(model, "yarn", factor=4, **options)
    rope_patch.save(model, tmp_path)
    assert trained_lengths(tmp_path) == {TRAINED}
    assert "put on by rope_patch" in str(rope_patch.diagnose(tmp_path))
    assert "put on by rope_patch" in str(rope_patch.export(plain_model(tmp_path), "transformers"))
    assert rope_patch.diagnose(tmp_path).length == TARGET


def test_diagnosis_of_a_saved_model_shows_its_own_rotation(tmp_path):
    save_extended(tmp_path, "gpt-oss")
    (table,) = rope_patch.diagnose(tmp_path).rotations.values()
    expected = multiplied("gpt-oss", 4)[0].inv_freq.tolist()
    now = [pair.turns_at_length / (4 * present_length("gpt-oss")) for pair in table.pairs]
    assert [2 * torch.pi * turns for turns in now] == pytest.approx(expected, rel=1e-5)


def test_saved_layer_types_are_restored_where_a_patch_leaves_them(tmp_path):
    layer_types = ["sliding_attention", "full_attention"]
    model = make_family("gemma3")
    rope_patch.patch(model, "yarn", factor=4, layer_types=layer_types)
    rope_patch.save(model, tmp_path)
    plain, fresh = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), make_family("gemma3")
    before = logits_of_family(plain)
    for each in (plain, fresh):
        rope_patch.patch(each, "yarn", factor=8, layer_types=["full_attention"])
    assert logits_of_family(plain).equal(logits_of_family(fresh))
    rope_patch.unpatch(plain)
    assert logits_of_family(plain).equal(before)


def test_folders_without_the_field_are_read_by_their_sidecar(tmp_path):
    """As folders of rope_patch 0.1."""
    save_extended(tmp_path, "gpt-oss")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config[FIELD]
    path.write_text(json.dumps(config))
    (table,) = rope_patch.diagnose(tmp_path).rotations.values()
    loaded = rope_patch.current(rope_patch.load(tmp_path))
    assert {table.geometry.trained_length, loaded.trained_length} == {present_length("gpt-oss")}


def test_second_save_records_the_checkpoint(tmp_path):
    save_extended(tmp_path / "one", "gpt-oss")
    plain = plain_model(tmp_path / "one")
    rope_patch.patch(plain, "yarn", factor=8)
    rope_patch.save(plain, tmp_path / "two")
    assert trained_lengths(tmp_path / "two") == {present_length("gpt-oss")}
    one, two = (
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("one", "two")
    )
    assert one[FIELD] == two[FIELD]


def test_damaged_field_is_refused(tmp_path):
    save_extended(tmp_path, "gpt-oss")
    plain = plain_model(tmp_path)
    setattr(plain.config, FIELD, {"original": {}})
    with pytest.raises(ValueError, match=r"must hold the original max_position_embeddings"):
        rope_patch.patch(plain, "yarn", factor=2)
