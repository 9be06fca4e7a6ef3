"""Test that undo restores the model, and that patching changes nothing else."""

import copy
import pickle

import pytest
import torch
import transformers
from helpers.tiny_models import (
    FAMILIES,
    LONG_FACTOR,
    SHORT_FACTOR,
    logits,
    make_config,
    make_model,
)

import rope_patch

LONGROPE = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
REQUESTS = [("linear", {}), ("yarn", {}), ("longrope", LONGROPE), ("dynamic-yarn", {})]


def snapshot(model):
    """Return the attributes and buffers of all modules: tensors with dtype, others by identity."""
    values = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_buffers", "_parameters"):
                tensors = {k: t for k, t in value.items() if t is not None}
                values[name, key] = {k: (t.dtype, t.clone()) for k, t in tensors.items()}
            elif key == "_non_persistent_buffers_set" or "hooks" in key:
                values[name, key] = copy.copy(value)
            else:
                values[name, key] = value
    return values


def assert_same(after, before):
    assert after.keys() == before.keys()
    for key, value in before.items():
        if key[1] in ("_buffers", "_parameters"):
            assert after[key].keys() == value.keys()
            for name, (dtype, tensor) in value.items():
                assert after[key][name][0] == dtype
                assert torch.equal(after[key][name][1], tensor), (key, name)
        else:
            assert after[key] is value or after[key] == value, key


@pytest.mark.parametrize(("method", "options"), REQUESTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_undo_restores_every_module(family, method, options):
    model = make_model(family)
    config, text = model.config, copy.deepcopy(model.config.to_dict())
    before = snapshot(model)
    handle = rope_patch.patch(model, method, factor=4, **options)
    logits(model)  # longrope changes frequencies in this call
    handle.undo()
    assert_same(snapshot(model), before)
    assert model.config is config
    assert config.to_dict() == text


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
def test_every_way_of_undoing_is_bit_exact(patch_and_undo):
    model = make_model()
    before = logits(model)
    patch_and_undo(model)
    assert rope_patch.current(model) is None
    assert logits(model).equal(before)


def test_unpatch_without_a_patch_is_an_error():
    model = make_model()
    with pytest.raises(ValueError, match="not patched"):
        rope_patch.unpatch(model)
    by_handle(model)
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
    assert rope_patch.current(model) is second

    patched = logits(model)
    first.undo()  # has no effect, because it was replaced
    assert logits(model).equal(patched)
    assert rope_patch.current(model) is second

    second.undo()
    assert logits(model).equal(before)
    assert model.config.max_position_embeddings == 64


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


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
@pytest.mark.parametrize(("method", "options"), REQUESTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_copies_are_undone_independently(family, method, options, duplicate):
    model = make_model(family)
    before = logits(model)
    rope_patch.patch(model, method, factor=4, **options)
    patched = logits(model)
    twin = duplicate(model)
    assert logits(twin).equal(patched)
    assert twin.config.max_position_embeddings == model.config.max_position_embeddings

    rope_patch.unpatch(twin)
    assert logits(twin).equal(before)
    assert twin.config.max_position_embeddings == 64
    assert logits(model).equal(patched)
    assert rope_patch.current(model).active

    second = duplicate(model)
    rope_patch.unpatch(model)
    assert logits(model).equal(before)
    assert logits(second).equal(patched)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_frequencies_stay_exact_through_casts(family):
    model, cast_before = make_model(family), make_model(family).to(torch.bfloat16)
    handle = rope_patch.patch(model, "yarn", factor=4)
    model.to(torch.bfloat16)
    rotary = model.model.rotary_emb
    for kind, expected in handle.frequencies.items():
        live = getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq")
        assert live.dtype == torch.float32
        assert live.equal(expected.inv_freq.float())
    assert model.lm_head.weight.dtype == torch.bfloat16

    rope_patch.patch(cast_before, "yarn", factor=4)  # replaces the rounded frequencies
    assert logits(cast_before).equal(logits(model))

    handle.undo()
    for name, buffer in make_model(family).model.rotary_emb.named_buffers():
        if "original" not in name:  # transformers' own spare copy, cast by transformers
            assert getattr(rotary, name).equal(buffer)


def test_rounded_buffer_is_reported_and_restored(caplog):
    model = make_model().to(torch.bfloat16)
    rounded, before = model.model.rotary_emb.inv_freq, logits(model)
    with rope_patch.patch(model, "yarn", factor=4):
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert "inv_freq of LlamaRotaryEmbedding had been cast to bfloat16" in caplog.text
    assert model.model.rotary_emb.inv_freq is rounded
    assert logits(model).equal(before)


def test_config_changes_survive_undo():
    config = make_config()
    model = make_model(config=config)
    handle = rope_patch.patch(model, "yarn", factor=4)
    model.config.use_cache = False
    model.resize_token_embeddings(130, mean_resizing=False)
    handle.undo()
    assert model.config.use_cache is False
    assert model.config.vocab_size == 130
    assert model.config.max_position_embeddings == 64
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
def test_settings_outside_of_config_equality_survive(change):
    """Undo and a second patch keep the settings that the user changed in between."""
    changed, model = make_model(), make_model()
    change(changed)
    handle = rope_patch.patch(model, "yarn", factor=4)
    change(model)
    handle = rope_patch.patch(model, "linear", factor=4)
    assert model.config.rope_parameters["rope_type"] == "linear"
    handle.undo()
    assert vars(model.config) == vars(changed.config)
    assert model.model.config is model.config


def test_settings_of_a_multimodal_text_config_survive():
    sizes = make_config("gemma3").to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=sizes, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with rope_patch.patch(model, "linear", factor=4):
        model.set_attn_implementation({"text_config": "eager"})
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.model.language_model.config is model.config.text_config
    assert model.config.text_config.max_position_embeddings == 64
    with rope_patch.patch(model, "linear", factor=4):
        patched_config = model.config
    assert model.config is not patched_config  # nothing was changed in this block


def test_changed_rope_field_survives_undo_with_a_warning(caplog):
    model = make_model()
    handle = rope_patch.patch(model, "yarn", factor=4)
    model.config.max_position_embeddings = 100
    handle.undo()
    assert model.config.max_position_embeddings == 100
    assert model.config.rope_parameters == make_config().rope_parameters
    assert "LlamaConfig.max_position_embeddings: replaced" in caplog.text


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(("method", "options"), REQUESTS)
def test_wrapper_around_a_patched_forward_survives_undo(method, options, kernels, caplog):
    """Undo keeps a user's wrapper; the forward inside it is the unpatched one again."""
    model = make_model()
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


def test_modules_replaced_under_a_patch_survive_undo():
    model, other = make_model(), make_model(seed=1)
    handle = rope_patch.patch(model, "yarn", factor=4)
    model.model.layers[0].self_attn.q_proj = other.model.layers[0].self_attn.q_proj
    model.double()
    handle.undo()
    expected = make_model()
    expected.model.layers[0].self_attn.q_proj = other.model.layers[0].self_attn.q_proj
    assert logits(model).equal(logits(expected.double()))
