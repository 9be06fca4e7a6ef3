"""Test requests: impossible ones raise a clear error and leave the model unchanged."""

import inspect
import math

import pytest
import torch
import transformers
from helpers.tiny_models import LONG_FACTOR, TRAINED, assert_close, logits, make_model, make_native

import rope_patch

# name: (family, method, arguments, error, message)
BAD = {
    "factor-one": ("llama", "yarn", {"factor": 1}, ValueError, "would change nothing"),
    "length-trained": ("llama", "yarn", {"length": 64}, ValueError, "would change nothing"),
    "default": ("llama", "default", {"factor": 4}, ValueError, "would change nothing"),
    "abf-same-theta": (
        "llama",
        "abf",
        {"factor": 4, "new_theta": 10000},
        ValueError,
        "would change nothing",
    ),
    "factor-below-one": ("llama", "yarn", {"factor": 0.5}, ValueError, "at least 1"),
    "factor-zero": ("llama", "yarn", {"factor": 0}, ValueError, "at least 1"),
    "factor-nan": ("llama", "yarn", {"factor": math.nan}, ValueError, "finite"),
    "factor-inf": ("llama", "yarn", {"factor": math.inf}, ValueError, "finite"),
    "factor-str": ("llama", "yarn", {"factor": "4"}, TypeError, "must be a number, got '4'"),
    "factor-bool": ("llama", "yarn", {"factor": True}, TypeError, "must be a number, got True"),
    "both": ("llama", "yarn", {"factor": 4, "length": 256}, ValueError, "exactly one of factor"),
    "neither": ("llama", "yarn", {}, ValueError, "got neither.*factor=4, or length=256"),
    "length-below": ("llama", "yarn", {"length": 63}, ValueError, "trained length, 64.*got 63"),
    "length-nan": ("llama", "yarn", {"length": math.nan}, ValueError, "finite"),
    "length-str": ("llama", "yarn", {"length": "256"}, TypeError, "length must be a number"),
    "trained-zero": (
        "llama",
        "yarn",
        {"factor": 4, "trained_length": 0},
        ValueError,
        "trained_len",
    ),
    "trained-negative": (
        "llama",
        "yarn",
        {"factor": 4, "trained_length": -64},
        ValueError,
        "trained_length",
    ),
    "trained-str": ("llama", "yarn", {"factor": 4, "trained_length": "64"}, TypeError, "a number"),
    "unknown-method": ("llama", "yran", {"factor": 4}, ValueError, "did you mean 'yarn'.*list all"),
    "unknown-option": (
        "llama",
        "yarn",
        {"factor": 4, "beta_fst": 16},
        ValueError,
        "did you mean 'beta_fast'.*beta_slow",
    ),
    "another-methods-option": (
        "llama",
        "linear",
        {"factor": 4, "beta_fast": 16},
        ValueError,
        "no option 'beta_fast'",
    ),
    "missing-option": (
        "llama",
        "longrope",
        {"factor": 4},
        ValueError,
        "needs the option 'long_factor'",
    ),
    "wrong-factor-count": (
        "llama",
        "longrope",
        {"factor": 4, "long_factor": LONG_FACTOR[1:]},
        ValueError,
        "8 rotated pairs, got 7",
    ),
    "betas-swapped": (
        "llama",
        "yarn",
        {"factor": 4, "beta_fast": 1, "beta_slow": 32},
        ValueError,
        "below beta_fast",
    ),
    "unknown-layer-type": (
        "gemma3",
        "yarn",
        {"factor": 4, "layer_types": ["full"]},
        ValueError,
        "has the layer types.*full_attention",
    ),
    "no-layer-type": (
        "gemma3",
        "yarn",
        {"factor": 4, "layer_types": []},
        ValueError,
        "layer_types",
    ),
    "layer-types-on-llama": (
        "llama",
        "yarn",
        {"factor": 4, "layer_types": ["full_attention"]},
        ValueError,
        "rotates all layers alike; leave layer_types out",
    ),
    "dynamic-both": (
        "llama",
        "dynamic-yarn",
        {"factor": 4, "length": 256},
        ValueError,
        "exactly one of factor",
    ),
    "dynamic-yarn-below-one": (
        "llama",
        "dynamic-yarn",
        {"factor": 0.5},
        ValueError,
        "at least 1",
    ),
    "dynamic-below-one": ("llama", "dynamic", {"factor": 0.5}, ValueError, "at least 1"),
    "dynamic-length-below": ("llama", "dynamic-yarn", {"length": 8}, ValueError, "trained length"),
    "dynamic-growth": ("llama", "dynamic-yarn", {"growth": "x"}, ValueError, "growth must be"),
    "kernels": (
        "llama",
        "yarn",
        {"factor": 4, "kernels": "cuda"},
        ValueError,
        "one of auto, reference, triton, hf, got 'cuda'",
    ),
}


@pytest.mark.parametrize("is_patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("name", BAD)
def test_bad_requests_change_nothing(name, is_patched):
    family, method, arguments, error, message = BAD[name]
    model = make_model(family)
    handle = rope_patch.patch(model, "linear", factor=2) if is_patched else None
    before, config = logits(model), model.config.to_dict()
    with pytest.raises(error, match=message):
        rope_patch.patch(model, method, **arguments)
    assert rope_patch.current(model) is handle
    assert model.config.to_dict() == config
    assert logits(model).equal(before)
    if handle is not None:
        assert handle.active
        handle.undo()
        assert logits(model).equal(logits(make_model(family)))


def test_model_without_rope_is_refused():
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with pytest.raises(ValueError, match="'yarn' does not extend GPT2LMHeadModel's positions"):
        rope_patch.patch(model, "yarn", factor=4)
    assert rope_patch.current(model) is None


@pytest.mark.parametrize("value", ["llama", None, {"model": 1}])
def test_non_modules_are_refused(value):
    got = type(value).__name__
    with pytest.raises(TypeError, match=f"expected a transformers model, got {got}"):
        rope_patch.patch(value, "yarn", factor=4)


def test_module_without_config_is_refused():
    with pytest.raises(ValueError, match="Linear has no transformers config"):
        rope_patch.patch(torch.nn.Linear(2, 2), "yarn", factor=4)


@pytest.mark.parametrize("change", [lambda f: 2 * f, lambda f: f[:4]], ids=["faster", "fewer"])
def test_rotation_that_differs_from_its_config_is_refused(change):
    model = make_model()

    class Own(type(model.model.rotary_emb)):
        def __init__(self, config):
            super().__init__(config)
            self.inv_freq = change(self.inv_freq)

    model.model.rotary_emb = Own(model.config)
    with pytest.raises(ValueError, match="Own does not rotate as its config says"):
        rope_patch.patch(model, "yarn", factor=4)
    assert rope_patch.current(model) is None


def yarn(factor):
    return {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": factor,
        "original_max_position_embeddings": TRAINED,
    }


def test_yarn_in_the_config_is_replaced():
    model = make_model("llama", rope_parameters=yarn(2.0), max_position_embeddings=128)
    before = logits(model)
    handle = rope_patch.patch(model, "yarn", factor=4)
    assert (handle.trained_length, handle.length) == (TRAINED, 4 * TRAINED)
    native = make_native(model, "llama", rope_parameters=yarn(4.0), max_position_embeddings=256)
    assert_close(logits(model), logits(native))
    handle.undo()
    assert logits(model).equal(before)


def test_same_yarn_as_in_the_config_is_refused():
    model = make_model("llama", rope_parameters=yarn(2.0), max_position_embeddings=128)
    with pytest.raises(ValueError, match="would change nothing"):
        rope_patch.patch(model, "yarn", length=128)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_scaling_in_the_config_without_origin_needs_a_trained_length(kind):
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    model = make_model("llama", rope_parameters=parameters)
    before = logits(model, TRAINED)
    with pytest.raises(ValueError, match=r"pass trained_length=\.\.\."):
        rope_patch.patch(model, "yarn", factor=4)
    handle = rope_patch.patch(model, "yarn", factor=8, trained_length=TRAINED // 2)
    origin = {"original_max_position_embeddings": TRAINED // 2}
    native = make_native(model, "llama", rope_parameters={**yarn(8.0), **origin})
    assert_close(logits(model), logits(native))
    handle.undo()
    assert logits(model, TRAINED).equal(before)


@pytest.mark.parametrize("read_only", ["forward", "config"])
@pytest.mark.parametrize("method", ["linear", "yarn", "longrope"])
def test_failed_patch_leaves_the_model_unchanged(method, read_only):
    model = make_model("gemma3")
    config, before = model.config, logits(model)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    attention = model.model.layers[1].self_attn

    class Sealed(type(attention)):
        def __setattr__(self, name, value):
            if name == read_only:
                raise RuntimeError(f"{name} cannot be set")
            super().__setattr__(name, value)

    attention.__class__ = Sealed
    options = {"long_factor": LONG_FACTOR} if method == "longrope" else {}
    with pytest.raises(RuntimeError, match=f"{read_only} cannot be set"):
        rope_patch.patch(model, method, factor=4, **options)
    assert rope_patch.current(model) is None
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert logits(model).equal(before)
    assert model.config is config


# -- length-dependent methods ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "length", "factor"),
    [
        ({}, None, None),
        ({"length": 256}, 256, 4),
        ({"factor": 4}, 256, 4),
    ],
)
def test_dynamic_methods_need_no_factor(request_, length, factor):
    model = make_model()
    handle = rope_patch.patch(model, "dynamic-yarn", **request_)
    assert (handle.length, handle.factor, handle.trained_length) == (length, factor, TRAINED)
    expected = handle.frequencies_at(length or TRAINED)[None]
    assert handle.frequencies[None].same_as(expected)
    # Configs cannot hold this method, so the config keeps the trained length.
    assert model.config.max_position_embeddings == TRAINED
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("request_", "length", "in_formula"),
    [
        ({}, None, 1),
        ({"length": 256}, 256, 1),
        ({"factor": 4}, 256, 4),
        ({"factor": 2, "length": 1024}, 1024, 2),
    ],
)
def test_factor_of_dynamic_ntk_is_part_of_its_formula(request_, length, in_formula):
    model = make_model()
    handle = rope_patch.patch(model, "dynamic", **request_)
    assert (handle.length, handle.method.factor) == (length, in_formula)
    assert model.config.max_position_embeddings == TRAINED
    assert model.config.rope_parameters == {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": in_formula,
    }


def test_dynamic_handle_describes_the_method(capsys):
    model = make_model()
    handle = rope_patch.patch(model, "dynamic-yarn")
    assert str(handle) == "dynamic-yarn, 64 → any length"
    assert "growth=stepped" in handle.summary()
    assert (
        "of 8 pairs changed at 128 tokens (slowest: ×2), attention factor 1.06931"
        in handle.summary()
    )
    assert "dynamic-yarn, 64 → any length" in str(model)
    assert str(rope_patch.patch(model, "dynamic", factor=2)) == "dynamic, factor 2, 64 → 128 tokens"


def test_positional_factor_error_names_the_argument():
    model = make_model()
    with pytest.raises(TypeError, match=r"write factor=4, or length="):
        rope_patch.patch(model, "yarn", 4)
    assert rope_patch.current(model) is None
    assert "factor" in inspect.signature(rope_patch.patch).parameters  # what editors show
