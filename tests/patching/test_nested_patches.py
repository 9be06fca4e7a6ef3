"""Test that leaving a `with` block restores the patch that was in effect before it."""

import copy
import gc
import weakref

import pytest
import torch
from helpers.tiny_models import LONG, SHORT, logits, make_model, step_by_step, tokens
from transformers import DynamicCache

import rope_patch


@pytest.fixture(scope="module")
def expected():
    """Return logits without a patch and under each method, each from a new model."""
    plain = {"none": logits(make_model())}
    for method, options in [("yarn", {"factor": 4}), ("linear", {"factor": 4})]:
        model = make_model()
        rope_patch.patch(model, method, **options)
        plain[method] = logits(model)
    return plain


@pytest.fixture
def model():
    return make_model()


def test_leaving_the_inner_block_restores_the_outer_patch(model, expected):
    config = model.config
    with rope_patch.patch(model, "yarn", factor=4) as outer:
        with rope_patch.patch(model, "linear", factor=4) as inner:
            assert logits(model).equal(expected["linear"])
            assert (outer.active, inner.active) == (False, True)
        assert rope_patch.current(model) is outer
        assert (outer.active, inner.active) == (True, False)
        assert logits(model).equal(expected["yarn"])
        assert model.config.rope_parameters["rope_type"] == "yarn"
    assert rope_patch.current(model) is None
    assert logits(model).equal(expected["none"])
    assert model.config is config


def test_exception_in_the_inner_block_restores_the_outer_patch(model, expected):
    with rope_patch.patch(model, "yarn", factor=4) as outer:
        with pytest.raises(ZeroDivisionError), rope_patch.patch(model, "linear", factor=4):
            raise ZeroDivisionError
        assert rope_patch.current(model) is outer
        assert logits(model).equal(expected["yarn"])
    assert logits(model).equal(expected["none"])


def test_three_nested_blocks_restore_one_by_one(model, expected):
    with rope_patch.patch(model, "yarn", factor=4):
        with rope_patch.patch(model, "linear", factor=4) as second:
            with rope_patch.patch(model, "ntk", factor=4):
                pass
            assert rope_patch.current(model) is second
            assert logits(model).equal(expected["linear"])
        assert logits(model).equal(expected["yarn"])
    assert logits(model).equal(expected["none"])


def test_undo_in_the_inner_block_unpatches_until_its_end(model, expected):
    for undo in (lambda handle: handle.undo(), lambda _: rope_patch.unpatch(model)):
        with rope_patch.patch(model, "yarn", factor=4):
            with rope_patch.patch(model, "linear", factor=4) as inner:
                undo(inner)
                assert logits(model).equal(expected["none"])
            assert logits(model).equal(expected["yarn"])
        assert logits(model).equal(expected["none"])


def test_outer_patch_undone_inside_is_not_restored(model, expected):
    with rope_patch.patch(model, "yarn", factor=4) as outer:
        with rope_patch.patch(model, "linear", factor=4):
            outer.undo()
            assert logits(model).equal(expected["linear"])
        assert rope_patch.current(model) is None
    assert logits(model).equal(expected["none"])


def test_patch_without_a_block_ends_with_the_enclosing_block(model, expected):
    with rope_patch.patch(model, "yarn", factor=4):
        handle = rope_patch.patch(model, "linear", factor=4)
        with rope_patch.patch(model, "ntk", factor=4):
            pass
        assert rope_patch.current(model) is handle
        assert logits(model).equal(expected["linear"])
    assert not handle.active
    assert logits(model).equal(expected["none"])


def test_block_restores_a_patch_without_a_block(model, expected):
    handle = rope_patch.patch(model, "yarn", factor=4)
    with rope_patch.patch(model, "linear", factor=4):
        pass
    assert rope_patch.current(model) is handle
    assert logits(model).equal(expected["yarn"])
    handle.undo()
    assert logits(model).equal(expected["none"])


def test_blocks_left_in_the_wrong_order_end_unpatched(model, expected):
    outer = rope_patch.patch(model, "yarn", factor=4).__enter__()
    inner = rope_patch.patch(model, "linear", factor=4).__enter__()
    outer.__exit__()
    assert rope_patch.current(model) is None
    inner.__exit__()
    assert rope_patch.current(model) is None
    assert logits(model).equal(expected["none"])


def test_inner_block_preserves_settings_and_caches_of_the_outer_patch(model):
    """Continue a cache of the outer patch after the inner block."""
    ids, reference = tokens(76), make_model()
    rope_patch.patch(reference, "dynamic-yarn")
    whole = step_by_step(reference, ids, 60)
    with rope_patch.patch(model, "dynamic-yarn") as outer:
        cache = DynamicCache(config=model.config)
        start = step_by_step(model, ids[:, :70], 60, cache)
        with rope_patch.patch(model, "linear", factor=4):
            logits(model)
        continued = step_by_step(model, ids[:, 70:], 1, cache)
        assert torch.cat([start, continued], dim=1).equal(whole)

        outer.fix_length(LONG)
        fixed = logits(model, SHORT)
        with rope_patch.patch(model, "linear", factor=4):
            pass
        assert logits(model, SHORT).equal(fixed)
        assert not fixed.equal(whole[:, :SHORT])


def test_config_changes_in_an_inner_block_persist(model):
    with rope_patch.patch(model, "yarn", factor=4):
        model.config.use_cache = False
        with rope_patch.patch(model, "linear", factor=4):
            model.set_attn_implementation("eager")
        assert (model.config._attn_implementation, model.config.use_cache) == ("eager", False)
        assert model.config.rope_parameters["rope_type"] == "yarn"
    assert (model.config._attn_implementation, model.config.use_cache) == ("eager", False)
    assert model.config.rope_parameters["rope_type"] == "default"


def test_copy_from_an_inner_block_is_independent(model, expected):
    with rope_patch.patch(model, "yarn", factor=4) as outer:
        with rope_patch.patch(model, "linear", factor=4):
            twin = copy.deepcopy(model)
        assert logits(twin).equal(expected["linear"])
        rope_patch.unpatch(twin)
        assert logits(twin).equal(expected["none"])
        assert rope_patch.current(model) is outer
        assert logits(model).equal(expected["yarn"])


def test_failed_patch_restores_the_previous_one(model, expected, monkeypatch):
    handle = rope_patch.patch(model, "yarn", factor=4)
    before = rope_patch.patching.handle.install_kernels

    def fail_once(*args, **kwargs):
        monkeypatch.setattr(rope_patch.patching.handle, "install_kernels", before)
        raise MemoryError

    monkeypatch.setattr(rope_patch.patching.handle, "install_kernels", fail_once)
    with pytest.raises(MemoryError):
        rope_patch.patch(model, "linear", factor=4)
    assert rope_patch.current(model) is handle
    assert logits(model).equal(expected["yarn"])


def test_replaced_patches_are_freed(model):
    """A chain of replaced patches would keep the frequencies of each one."""
    first = weakref.ref(rope_patch.patch(model, "yarn", factor=4))
    for factor in (2, 3, 4):
        rope_patch.patch(model, "linear", factor=factor)
    gc.collect()
    assert first() is None
