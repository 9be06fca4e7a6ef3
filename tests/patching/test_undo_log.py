"""Test how a patch ends: undo, blocks within blocks, and what was changed or lost meanwhile.

That undo restores every bit, of every patch and of copies, is tested in test_every_patch.py.
"""

import copy
import gc
import weakref

import pytest
import torch
from helpers.tiny_models import (
    FAMILIES,
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_differs,
    logits,
    make_config,
    make_model,
    step_by_step,
    tokens,
)
from helpers.vision_models import gemma3_with_vision
from transformers import DynamicCache

import rope_patch

LONGROPE = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
REQUESTS = [("linear", {}), ("yarn", {}), ("longrope", LONGROPE), ("dynamic-yarn", {})]


@pytest.fixture(scope="module")
def expected():
    """Return logits without a patch and under each method, each from a new model."""
    results = {"none": logits(make_model())}
    for method in ("yarn", "linear", "ntk"):
        model = make_model()
        rope_patch.patch(model, method, factor=4)
        results[method] = logits(model)
    return results


@pytest.fixture
def model():
    return make_model()


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dict_and_names_are_unchanged_while_patched(family):
    model = make_model(family)
    modules, keys = dict(model.named_modules()), list(model.state_dict())
    buffers = [name for name, _ in model.named_buffers()]
    rope_patch.patch(model, "longrope", factor=4, **LONGROPE)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_buffers()] == buffers
    assert all(modules[name] is module for name, module in model.named_modules())


def by_handle(model):
    rope_patch.patch(model, "yarn", factor=4).undo()


def by_unpatch(model):
    rope_patch.patch(model, "yarn", factor=4)
    rope_patch.unpatch(model)


def by_with_block(model):
    with rope_patch.patch(model, "yarn", factor=4) as handle:
        assert rope_patch.current(model) is handle


def by_exception(model):
    with pytest.raises(KeyError), rope_patch.patch(model, "yarn", factor=4):
        raise KeyError


def by_undoing_twice(model):
    handle = rope_patch.patch(model, "yarn", factor=4)
    handle.undo()
    handle.undo()


@pytest.mark.parametrize(
    "patch_and_undo", [by_handle, by_unpatch, by_with_block, by_exception, by_undoing_twice]
)
def test_every_way_of_undoing_is_bit_exact(patch_and_undo, model, expected):
    patch_and_undo(model)
    assert rope_patch.current(model) is None
    assert logits(model).equal(expected["none"])
    with pytest.raises(ValueError, match="not patched"):
        rope_patch.unpatch(model)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_second_patch_replaces_the_first(family):
    model, fresh = make_model(family), make_model(family)
    before = logits(model)
    first = rope_patch.patch(model, "longrope", factor=2, **LONGROPE)
    second = rope_patch.patch(model, "yarn", factor=4)
    rope_patch.patch(fresh, "yarn", factor=4)
    assert logits(model).equal(logits(fresh))  # starts from the original, not from the first
    assert model.config.to_dict() == fresh.config.to_dict()
    assert (first.active, second.active) == (False, True)

    patched = logits(model)
    first.undo()  # has no effect, because it was replaced
    assert logits(model).equal(patched)
    assert rope_patch.current(model) is second

    second.undo()
    assert logits(model).equal(before)
    assert model.config.max_position_embeddings == TRAINED


def test_other_model_of_the_same_config_is_unchanged():
    config = make_config("gemma3")
    model, other = make_model("gemma3", config), make_model("gemma3", config, seed=7)
    before, text = logits(other), copy.deepcopy(config.to_dict())
    rope_patch.patch(model, "yarn", factor=4)
    assert other.config is config
    assert config.to_dict() == text
    assert logits(other).equal(before)
    assert rope_patch.current(other) is None
    assert logits(make_model("gemma3", config, seed=7)).equal(before)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_frequencies_stay_exact_through_casts(family):
    model, cast_before = make_model(family), make_model(family).to(torch.bfloat16)
    handle = rope_patch.patch(model, "yarn", factor=4)
    model.to(torch.bfloat16)
    rotary = model.model.rotary_emb
    for kind, exact in handle.frequencies.items():
        live = getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq")
        assert live.dtype == torch.float32
        assert live.equal(exact.inv_freq.float())
    assert model.lm_head.weight.dtype == torch.bfloat16

    rope_patch.patch(cast_before, "yarn", factor=4)  # replaces the rounded frequencies
    assert logits(cast_before).equal(logits(model))

    handle.undo()
    for name, buffer in make_model(family).model.rotary_emb.named_buffers():
        if "original" not in name:  # transformers' own spare copy, cast by transformers
            assert getattr(rotary, name).equal(buffer)


def test_rounded_buffer_is_reported_and_restored(model, caplog):
    model.to(torch.bfloat16)
    rounded, before = model.model.rotary_emb.inv_freq, logits(model)
    with rope_patch.patch(model, "yarn", factor=4):
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    for part in ("inv_freq", "LlamaRotaryEmbedding", "bfloat16"):
        assert part in caplog.text
    assert model.model.rotary_emb.inv_freq is rounded
    assert logits(model).equal(before)


# -- what is changed while the patch is in effect --------------------------------------------------


def test_config_changes_survive_undo():
    config = make_config()
    model = make_model(config=config)
    handle = rope_patch.patch(model, "yarn", factor=4)
    model.config.use_cache = False
    model.resize_token_embeddings(130, mean_resizing=False)
    handle.undo()
    assert model.config.use_cache is False
    assert model.config.vocab_size == 130
    assert model.config.max_position_embeddings == TRAINED
    assert model.config.rope_parameters == make_config().rope_parameters
    assert (config.use_cache, config.vocab_size) == (True, 128)  # other models may share it

    with rope_patch.patch(model, "linear", factor=4):
        assert (model.config.use_cache, model.config.vocab_size) == (False, 130)


def by_attention_kernel(model):
    model.set_attn_implementation("eager")


def by_experts_kernel(model):
    model.config._experts_implementation = "eager"


def by_new_attribute(model):
    model.config.note = {"set by": ["a user"]}


@pytest.mark.parametrize("change", [by_attention_kernel, by_experts_kernel, by_new_attribute])
def test_settings_outside_of_config_equality_survive(change, model):
    """Undo and a second patch keep the settings that the user changed in between."""
    changed = make_model()
    change(changed)
    rope_patch.patch(model, "yarn", factor=4)
    change(model)
    handle = rope_patch.patch(model, "linear", factor=4)
    assert model.config.rope_parameters["rope_type"] == "linear"
    handle.undo()
    assert vars(model.config) == vars(changed.config)
    assert model.model.config is model.config


def test_settings_of_a_multimodal_text_config_survive():
    model = gemma3_with_vision()
    with rope_patch.patch(model, "linear", factor=4):
        model.set_attn_implementation({"text_config": "eager"})
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.model.language_model.config is model.config.text_config
    assert model.config.text_config.max_position_embeddings == TRAINED
    with rope_patch.patch(model, "linear", factor=4):
        patched_config = model.config
    assert model.config is not patched_config  # nothing was changed in this block


def test_changed_rope_field_survives_undo_with_a_warning(model, caplog):
    handle = rope_patch.patch(model, "yarn", factor=4)
    model.config.max_position_embeddings = 100
    handle.undo()
    assert model.config.max_position_embeddings == 100
    assert model.config.rope_parameters == make_config().rope_parameters
    assert "LlamaConfig.max_position_embeddings" in caplog.text


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(("method", "options"), REQUESTS)
def test_wrapper_around_a_patched_forward_survives_undo(method, options, kernels, model, caplog):
    """Undo keeps a user's wrapper; the forward inside it is the unpatched one again."""
    before = logits(model)
    handle = rope_patch.patch(model, method, factor=4, kernels=kernels, **options)
    patched, calls = logits(model), []

    def wrap(module):
        inner = module.forward
        module.forward = lambda *args, **kwargs: calls.append(module) or inner(*args, **kwargs)
        return module.forward

    attention = model.model.layers[0].self_attn
    wrappers = {module: wrap(module) for module in (attention, model.model.rotary_emb)}
    assert logits(model).equal(patched)
    handle.undo()
    assert logits(model).equal(before)
    assert all(module.forward is wrapper for module, wrapper in wrappers.items())
    assert "LlamaAttention.forward" in caplog.text

    calls.clear()
    second = rope_patch.patch(model, method, factor=4, **options)
    assert "the forward of LlamaAttention was replaced" in second.summary()
    torch.testing.assert_close(logits(model), patched, rtol=0, atol=1e-5)
    assert attention in calls  # the second patch does not replace the wrapper


def test_modules_replaced_under_a_patch_survive_undo(model):
    other, plain = make_model(seed=1), make_model()
    handle = rope_patch.patch(model, "yarn", factor=4)
    for each in (model, plain):
        each.model.layers[0].self_attn.q_proj = other.model.layers[0].self_attn.q_proj
    model.double()
    handle.undo()
    assert logits(model).equal(logits(plain.double()))


# -- blocks within blocks --------------------------------------------------------------------------


# What is done in turn, and the method in effect then. "leave" leaves the innermost block, "leave
# yarn" that of this method, "raise" the innermost one by an exception.
BLOCKS = {
    "two": "with yarn: yarn, with linear: linear, leave: yarn, leave: none",
    "three": "with yarn: yarn, with linear: linear, with ntk: ntk, leave: linear, leave: yarn",
    "an exception": "with yarn: yarn, with linear: linear, raise: yarn, leave: none",
    "inner undone": "with yarn: yarn, with linear: linear, undo linear: none, leave: yarn",
    "unpatched inside": "with yarn: yarn, with linear: linear, unpatch: none, leave: yarn",
    "outer undone inside": "with yarn: yarn, with linear: linear, undo yarn: linear, leave: none",
    "no inner block": "with yarn: yarn, patch linear: linear, with ntk: ntk, leave: linear",
    "no outer block": "patch yarn: yarn, with linear: linear, leave: yarn, unpatch: none",
    "outer left first": "with yarn: yarn, with linear: linear, leave yarn: none, leave: none",
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_restore_what_was_in_effect(case, model, expected):
    config, handles, open_blocks = model.config, {}, []
    for step in BLOCKS[case].split(", "):
        done, in_effect = step.split(": ")
        action, _, method = done.partition(" ")
        if action in ("with", "patch"):
            handles[method] = rope_patch.patch(model, method, factor=4)
        if action == "with":
            open_blocks.append(handles[method].__enter__())
        elif action == "undo":
            handles[method].undo()
        elif action == "unpatch":
            rope_patch.unpatch(model)
        elif action in ("leave", "raise"):
            block = handles[method] if method else open_blocks[-1]
            open_blocks.remove(block)
            error = ZeroDivisionError() if action == "raise" else None
            assert not block.__exit__(error and type(error), error, None)
        assert rope_patch.current(model) is handles.get(in_effect)
        active = [method for method, handle in handles.items() if handle.active]
        assert active == ([] if in_effect == "none" else [in_effect])
        assert logits(model).equal(expected[in_effect])
    for block in reversed(open_blocks):
        block.__exit__()
    assert model.config is config
    assert logits(model).equal(expected["none"])


def test_inner_block_preserves_settings_and_caches_of_the_outer_patch(model):
    """Continue a cache of the outer patch after the inner block."""
    ids, reference = tokens(TRAINED + 4), make_model()
    rope_patch.patch(reference, "dynamic-yarn")
    whole = step_by_step(reference, ids, 60)
    with rope_patch.patch(model, "dynamic-yarn") as outer:
        cache = DynamicCache(config=model.config)
        start = step_by_step(model, ids[:, : TRAINED + 2], 60, cache)
        with rope_patch.patch(model, "linear", factor=4):
            logits(model)
        continued = step_by_step(model, ids[:, TRAINED + 2 :], 1, cache)
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


def test_failed_patch_restores_the_previous_one(model, expected):
    handle = rope_patch.patch(model, "yarn", factor=4)
    attention = model.model.layers[1].self_attn

    class FailsOnce(type(attention)):
        has_failed = False

        def __setattr__(self, name, value):
            if name == "forward" and not FailsOnce.has_failed:
                FailsOnce.has_failed = True
                raise MemoryError
            super().__setattr__(name, value)

    attention.__class__ = FailsOnce
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


# -- frequencies that were lost --------------------------------------------------------------------

THETA = {"rope_theta": 1e4}
ORIGINAL = {"original_max_position_embeddings": TRAINED}
SCALINGS = {
    "default": {"rope_type": "default", **THETA},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **THETA, **ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **THETA},
    "longrope": {"rope_type": "longrope", "factor": 4.0, **LONGROPE, **THETA, **ORIGINAL},
}


def scaled(name):
    return make_model("llama", rope_parameters=dict(SCALINGS[name]), max_position_embeddings=TARGET)


def rotary_buffers(model):
    return {n: b.clone() for n, b in model.named_buffers() if n.endswith("inv_freq")}


def assert_same_buffers(model, expected):
    buffers = rotary_buffers(model)
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, expected[name]), name


def zero(model):
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.zero_()
    return model


def through_meta(model):
    """Give the model new memory, as sharded loaders do, and load its checkpoint into it."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.fill_(float("nan"))  # to_empty may by chance return the old memory
    model.load_state_dict(weights)
    return model


def unscaled(model):
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(1.0 / (1e4 ** (torch.arange(0, 16, 2) / 16)))
    return model


@pytest.mark.parametrize("lose", [zero, through_meta, torch.nn.Module.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_of_a_newly_built_model(family, lose):
    fresh, model = rotary_buffers(make_model(family)), make_model(family)
    lose(model)
    assert set(rope_patch.restore(model)) == fresh.keys()
    assert_same_buffers(model, fresh)
    buffers = dict(model.named_buffers())
    assert rope_patch.restore(model) == []
    assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())


@pytest.mark.parametrize("lose", [zero, through_meta, unscaled])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits_of_a_newly_built_model(scaling, lose):
    before = logits(scaled(scaling))
    model = lose(scaled(scaling))
    rope_patch.restore(model)
    assert_same_buffers(model, rotary_buffers(scaled(scaling)))
    assert torch.equal(logits(model), before)


def test_meta_buffer_beside_real_weights(model, expected):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.to("meta")
    assert rope_patch.restore(model) == ["model.rotary_emb.inv_freq"]
    assert torch.equal(logits(model), expected["none"])


def test_model_without_memory_is_refused(model):
    with pytest.raises(ValueError, match="to_empty"):
        rope_patch.restore(model.to("meta"))
    with pytest.raises(TypeError, match="transformers model"):
        rope_patch.restore(make_config())


def test_config_edited_after_loading_takes_effect(model):
    model.config.rope_parameters = dict(SCALINGS["yarn"])
    model.config.max_position_embeddings = TARGET
    lost = rope_patch.restore(model)
    assert "model.rotary_emb.attention_scaling" in lost
    assert torch.equal(logits(model), logits(scaled("yarn")))


@pytest.mark.parametrize(("method", "options"), REQUESTS[1:])
@pytest.mark.parametrize("lose", [zero, unscaled])
def test_patched_model_keeps_its_patch(method, options, lose, model, expected):
    handle = rope_patch.patch(model, method, factor=4, **options)
    patched, buffers = logits(model), rotary_buffers(model)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        lose(each)
        lost = rope_patch.restore(each)
        assert "model.rotary_emb.original_inv_freq" in lost or lose is unscaled
        assert_same_buffers(each, buffers)
        assert torch.equal(logits(each), patched)
        assert rope_patch.restore(each) == []
    assert_differs(patched, expected["none"])
    handle.undo()
    assert torch.equal(logits(model), expected["none"])


def test_casts_keep_the_patch_after_in_place_writes(model, expected):
    rope_patch.patch(model, "yarn", factor=4)
    zero(model)
    model.float()  # moves and casts set the exact values again
    assert torch.equal(logits(model), expected["yarn"])


@pytest.mark.parametrize("lose", [zero, through_meta])
def test_undo_restores_what_was_lost_before_the_patch(lose, model, expected):
    lose(model)
    with rope_patch.patch(model, "yarn", factor=4):
        patched = logits(model)
        assert "model.rotary_emb.inv_freq" in rope_patch.restore(model)
        assert torch.equal(logits(model), patched)
    assert torch.equal(logits(model), expected["none"])


def test_undo_stays_bit_exact_without_losses(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * (1 + 1e-7)  # as another device rounds
    before = rotary.inv_freq.clone()
    with rope_patch.patch(model, "yarn", factor=4):
        assert rope_patch.restore(model) == []
    assert torch.equal(rotary.inv_freq, before)


def test_restoring_in_an_inner_block(model, expected):
    zero(model)
    with rope_patch.patch(model, "linear", factor=2):
        linear = logits(model)
        with rope_patch.patch(model, "yarn", factor=4):
            rope_patch.restore(model)
        assert torch.equal(logits(model), linear)
    assert torch.equal(logits(model), expected["none"])


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 reads no scaling for Gemma 3")
def test_patch_of_one_layer_type():
    model = make_model("gemma3")
    rope_patch.patch(model, "yarn", factor=4)
    patched, buffers = logits(model), rotary_buffers(model)
    zero(model)
    lost = rope_patch.restore(model)
    assert "model.rotary_emb.sliding_attention_inv_freq" in lost
    assert_same_buffers(model, buffers)
    assert torch.equal(logits(model), patched)
