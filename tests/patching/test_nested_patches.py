"""Leaving a `with` block puts back what was in effect before it, whatever happened inside."""

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
    """Return a model's logits unpatched and under each method, each from its own model."""
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


def test_an_exception_in_the_inner_block_restores_the_outer_patch(model, expected):
    with rope_patch.patch(model, "yarn", factor=4) as outer:
        with pytest.raises(ZeroDivisionError), rope_patch.patch(model, "linear", factor=4):
            raise ZeroDivisionError
        assert rope_patch.current(model) is outer
        assert logits(model).equal(expected["yarn"])
    assert logits(model).equal(expected["none"])


def test_three_blocks_are_left_one_by_one(model, expected):
    with rope_patch.patch(model, "yarn", factor=4):
        with rope_patch.patch(model, "linear", factor=4) as second:
            with rope_patch.patch(model, "ntk", factor=4):
                pass
            assert rope_patch.current(model) is second
            assert logits(model).equal(expected["linear"])
        assert logits(model).equal(expected["yarn"])
    assert logits(model).equal(expected["none"])


def test_undoing_the_inner_patch_by_hand_shows_the_original_until_the_block_ends(model, expected):
    for undo in (lambda handle: handle.undo(), lambda _: rope_patch.unpatch(model)):
        with rope_patch.patch(model, "yarn", factor=4):
            with rope_patch.patch(model, "linear", factor=4) as inner:
                undo(inner)
                assert logits(model).equal(expected["none"])
            assert logits(model).equal(expected["yarn"])
        assert logits(model).equal(expected["none"])


def test_an_outer_patch_that_was_undone_inside_is_not_restored(model, expected):
    with rope_patch.patch(model, "yarn", factor=4) as outer:
        with rope_patch.patch(model, "linear", factor=4):
            outer.undo()
            assert logits(model).equal(expected["linear"])
        assert rope_patch.current(model) is None
    assert logits(model).equal(expected["none"])


def test_a_patch_without_a_block_ends_with_the_block_around_it(model, expected):
    with rope_patch.patch(model, "yarn", factor=4):
        handle = rope_patch.patch(model, "linear", factor=4)
        with rope_patch.patch(model, "ntk", factor=4):
            pass
        assert rope_patch.current(model) is handle
        assert logits(model).equal(expected["linear"])
    assert not handle.active
    assert logits(model).equal(expected["none"])


def test_a_block_within_a_patch_without_one_restores_it(model, expected):
    handle = rope_patch.patch(model, "yarn", factor=4)
    with rope_patch.patch(model, "linear", factor=4):
        pass
    assert rope_patch.current(model) is handle
    assert logits(model).equal(expected["yarn"])
    handle.undo()
    assert logits(model).equal(expected["none"])


def test_blocks_that_are_left_in_the_wrong_order_end_unpatched(model, expected):
    outer = rope_patch.patch(model, "yarn", factor=4).__enter__()
    inner = rope_patch.patch(model, "linear", factor=4).__enter__()
    outer.__exit__()
    assert rope_patch.current(model) is None
    inner.__exit__()
    assert rope_patch.current(model) is None
    assert logits(model).equal(expected["none"])


def test_settings_and_caches_of_the_outer_patch_survive(model):
    """A cache that the outer patch filled before the inner block goes on after it."""
    ids, reference = tokens(76), make_model()
    rope_patch.patch(reference, "dynamic-yarn")
    whole = step_by_step(reference, ids, 60)
    with rope_patch.patch(model, "dynamic-yarn") as outer:
        cache = DynamicCache(config=model.config)
        start = step_by_step(model, ids[:, :70], 60, cache)
        with rope_patch.patch(model, "linear", factor=4):
            logits(model)
        rest = step_by_step(model, ids[:, 70:], 1, cache)
        assert torch.cat([start, rest], dim=1).equal(whole)

        outer.fix_length(LONG)
        fixed = logits(model, SHORT)
        with rope_patch.patch(model, "linear", factor=4):
            pass
        assert logits(model, SHORT).equal(fixed)
        assert not fixed.equal(whole[:, :SHORT])


def test_what_users_change_in_an_inner_block_stays(model):
    with rope_patch.patch(model, "yarn", factor=4):
        model.config.use_cache = False
        with rope_patch.patch(model, "linear", factor=4):
            model.set_attn_implementation("eager")
        assert (model.config._attn_implementation, model.config.use_cache) == ("eager", False)
        assert model.config.rope_parameters["rope_type"] == "yarn"
    assert (model.config._attn_implementation, model.config.use_cache) == ("eager", False)
    assert model.config.rope_parameters["rope_type"] == "default"


def test_a_copy_made_in_an_inner_block_goes_its_own_way(model, expected):
    with rope_patch.patch(model, "yarn", factor=4) as outer:
        with rope_patch.patch(model, "linear", factor=4):
            twin = copy.deepcopy(model)
        assert logits(twin).equal(expected["linear"])
        rope_patch.unpatch(twin)
        assert logits(twin).equal(expected["none"])
        assert rope_patch.current(model) is outer
        assert logits(model).equal(expected["yarn"])


def test_a_patch_that_fails_half_way_leaves_the_one_before(model, expected, monkeypatch):
    handle = rope_patch.patch(model, "yarn", factor=4)
    before = rope_patch.patching.handle.install_kernels

    def fail_once(*args):
        monkeypatch.setattr(rope_patch.patching.handle, "install_kernels", before)
        raise MemoryError

    monkeypatch.setattr(rope_patch.patching.handle, "install_kernels", fail_once)
    with pytest.raises(MemoryError):
        rope_patch.patch(model, "linear", factor=4)
    assert rope_patch.current(model) is handle
    assert logits(model).equal(expected["yarn"])


def test_many_replaced_patches_are_not_held(model):
    """A chain of all that were replaced would hold each one's frequencies."""
    first = weakref.ref(rope_patch.patch(model, "yarn", factor=4))
    for factor in (2, 3, 4):
        rope_patch.patch(model, "linear", factor=factor)
    gc.collect()
    assert first() is None
