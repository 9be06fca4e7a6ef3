"""Test that impossible configs raise a ValueError that names the field, and change nothing."""

import copy
import json
import math

import pytest
import torch
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    logits,
    make_model,
)

import rope_patch

DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TRAINED}
YARN = {"rope_type": "yarn", **SCALED}
LLAMA3 = {"rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
LONGROPE = {"rope_type": "longrope", **SCALED, **FACTORS}
MISSING = object()


def edited(parameters, **changes):
    """Return config fields with changed `rope_parameters`."""
    changed = {k: v for k, v in {**parameters, **changes}.items() if v is not MISSING}
    is_scaled = parameters["rope_type"] not in ("default", "dynamic")
    return {
        "rope_parameters": changed,
        **({"max_position_embeddings": TARGET} if is_scaled else {}),
    }


NOT_A_NUMBER = [None, "10000", -4.0, 0, math.nan, math.inf, True, [4.0]]
NOT_A_COUNT = ["64", -64, 0, 16.5, True, [64]]
THETA, FACTOR = "rope_theta must be a number", "factor must be a number of at least 1"
ORIGINAL = "original_max_position_embeddings must be a whole number"
FULL = "does not say on how many tokens the model was trained|integer|whole number"
HEAD = "head_dim must be a whole number|neither head_dim nor"
CASES = [
    *((edited(DEFAULT, rope_theta=value), THETA) for value in NOT_A_NUMBER),
    *((edited(YARN, factor=value), FACTOR) for value in NOT_A_NUMBER),
    *((edited(YARN, original_max_position_embeddings=v), ORIGINAL) for v in NOT_A_COUNT),
    (edited(YARN, original_max_position_embeddings=None), "does not say for how many tokens"),
    *(({"max_position_embeddings": value}, FULL) for value in [None, *NOT_A_COUNT]),
    *(({"head_dim": value}, HEAD) for value in [*NOT_A_COUNT, 1]),
    ({"head_dim": 15}, r"rotary_dim must be even.*got rotary_dim=15"),
    *(({"head_dim": None, "hidden_size": v}, HEAD) for v in [None, *NOT_A_COUNT]),
    *(({"rope_parameters": value}, "must be a dict") for value in ["yarn", [1], 5]),
    (edited(YARN, type="linear"), "names two scalings, rope_type='yarn' and type='linear'"),
    (edited(DEFAULT, type="yarn"), "names two scalings, rope_type='default' and type='yarn'"),
    (edited(DEFAULT, rope_type=5), "rope_type must be a name such as 'yarn', got 5"),
    (edited(YARN, factor=MISSING), FACTOR),
    (edited({"rope_type": "linear", "rope_theta": 1e4}), FACTOR),
    (edited({"rope_type": "dynamic", "rope_theta": 1e4}, factor="2"), FACTOR),
    (edited(YARN, beta_fast="32"), "beta_fast must be a number"),
    (edited(YARN, beta_slow=-1.0), "beta_slow must be a number"),
    (edited(YARN, attention_factor="1"), "attention_factor must be a number"),
    (edited(LLAMA3, low_freq_factor=MISSING), "low_freq_factor must be a number"),
    (edited(LLAMA3, high_freq_factor=None), "high_freq_factor must be a number"),
    (edited(LLAMA3, low_freq_factor=4.0), "low_freq_factor must be below high_freq_factor"),
    (edited(YARN, beta_fast=1.0, beta_slow=32.0), "beta_slow must be below beta_fast"),
    (edited(YARN, beta_slow=32.0), "beta_slow must be below beta_fast"),
    (edited(LONGROPE, long_factor=MISSING), "long_factor must be a list of numbers"),
    (edited(LONGROPE, short_factor="1"), "short_factor must be a list of numbers"),
    (edited(LONGROPE, long_factor=[1.0, -1.0]), "long_factor must be a list of numbers above 0"),
    (edited(LONGROPE, long_factor=LONG_FACTOR[1:]), "got 7 and 8"),
    *(
        (edited(DEFAULT, partial_rotary_factor=value), "partial_rotary_factor must")
        for value in [-0.5, "0.5", 0]
    ),
    (edited(DEFAULT, partial_rotary_factor=2.0), "rotary_dim=32 with head_dim=16"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model().save_pretrained(folder)
    return folder


@pytest.fixture
def write(checkpoint, tmp_path):
    """Return a function that writes a changed config.json beside the weights."""

    def change(changes):
        for file in checkpoint.iterdir():
            if file.name != "config.json":
                (tmp_path / file.name).symlink_to(file)
        config = json.loads((checkpoint / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return change


def set_config_fields(model, changes):
    """Change a live model's config without transformers' validation."""
    for name, value in changes.items():
        object.__setattr__(model.config, name, copy.deepcopy(value))


@pytest.mark.parametrize(("changes", "message"), CASES, ids=map(str, range(len(CASES))))
def test_bad_config_of_a_live_model_is_refused(changes, message):
    model = make_model()
    before = logits(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    set_config_fields(model, changes)
    for attempt in (
        lambda: rope_patch.patch(model, "linear", factor=8),
        lambda: rope_patch.patch(model, "dynamic-yarn"),
        lambda: rope_patch.diagnose(model),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert rope_patch.current(model) is None
    for name, value in changes.items():
        assert repr(getattr(model.config, name)) == repr(value)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    model.config = make_model().config
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(("changes", "message"), CASES, ids=map(str, range(len(CASES))))
def test_bad_config_of_a_folder_is_refused(changes, message, write):
    folder = write(changes)
    content = (folder / "config.json").read_text()
    for attempt in (
        lambda: rope_patch.load(folder, "linear", factor=8),
        lambda: rope_patch.diagnose(folder),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert (folder / "config.json").read_text() == content


def test_unknown_rope_type_is_refused(write):
    model = make_model()
    set_config_fields(model, edited(DEFAULT, rope_type="nosuch"))
    with pytest.raises(ValueError, match="nosuch"):
        rope_patch.patch(model, "linear", factor=8)
    with pytest.raises(ValueError, match=r"must be one that transformers knows.*got 'nosuch'"):
        rope_patch.load(write(edited(DEFAULT, rope_type="nosuch")), "linear", factor=8)


def test_equal_type_and_rope_type_are_accepted(write):
    folder = write(edited(YARN, type="yarn"))
    assert rope_patch.current(rope_patch.load(folder, "linear", factor=8)).trained_length == TRAINED
    assert rope_patch.diagnose(folder).healthy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": TRAINED}, "would change nothing"),
        ({"factor": 1}, "would change nothing"),
        ({"length": TRAINED - 1}, "at least the trained length, 64 tokens, got 63"),
        ({"factor": 0.5}, "factor must be at least 1"),
        ({"length": TARGET, "trained_length": 2 * TARGET}, "at least the trained length"),
        ({"factor": 4, "layer_types": ["full_attention"]}, "rotates all layers alike"),
        ({"factor": 4, "layer_types": []}, "rotates all layers alike"),
    ],
)
def test_requests_that_do_not_fit_the_model_are_refused(arguments, message):
    model = make_model()
    before = logits(model)
    with pytest.raises(ValueError, match=message):
        rope_patch.patch(model, "yarn", **arguments)
    assert rope_patch.current(model) is None
    assert torch.equal(logits(model), before)
    if message != "would change nothing":  # diagnose accepts these
        with pytest.raises(ValueError, match=message):
            rope_patch.diagnose(model, "yarn", **arguments)


def test_unknown_layer_type_is_refused():
    model = make_model("gemma3")
    for attempt in (rope_patch.patch, rope_patch.diagnose):
        with pytest.raises(ValueError, match="has the layer types sliding_attention, full_att"):
            attempt(model, "yarn", factor=4, layer_types=["chunked_attention"])
    assert rope_patch.current(model) is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rope_theta", None, THETA),
        ("rope_theta", "1e6", THETA),
        ("factor", -8.0, FACTOR),
        ("original_max_position_embeddings", "64", ORIGINAL),
    ],
)
def test_bad_parameters_of_one_layer_type_are_refused(field, value, message):
    model = make_model("gemma3")
    before = logits(model)
    parameters = copy.deepcopy(model.config.rope_parameters)
    parameters["full_attention"] = {**YARN, "rope_theta": 1e6, field: value}
    set_config_fields(model, {"rope_parameters": parameters})
    for attempt in (rope_patch.patch, rope_patch.diagnose):
        with pytest.raises(ValueError, match=message):
            attempt(model, "linear", factor=8)
    assert rope_patch.current(model) is None
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({**LLAMA3, "low_freq_factor": 9.0}, "low_freq_factor must be below"),
        ({**YARN, "beta_fast": 0.5}, "beta_slow must be below"),
    ],
)
def test_exports_of_impossible_configs_are_refused(parameters, message):
    model = make_model("llama", **edited(parameters))
    for source in (model, model.config):
        for engine in ("vllm", "llama.cpp", "transformers"):
            with pytest.raises(ValueError, match=message):
                rope_patch.export(source, engine)


def test_log_n_needs_a_trained_length_with_a_logarithm():
    with pytest.raises(ValueError, match=r"'log-n' divides by ln\(trained_length\).*got 1"):
        rope_patch.patch(
            make_model("llama"), "linear", factor=4, temperature="log-n", trained_length=1
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7", r"config\.json must hold an object .*got 7"),
        ("heads", "num_attention_heads must be a whole number, at least 1, got 0"),
    ],
)
def test_config_files_that_transformers_cannot_read_are_explained(tmp_path, text, message):
    if text == "heads":
        text = json.dumps({**make_model("llama").config.to_dict(), "num_attention_heads": 0})
    (tmp_path / "config.json").write_text(text)
    calls = [rope_patch.diagnose, lambda path: rope_patch.load(path, "yarn", factor=2.0)]
    if OLD_TRANSFORMERS and text != "7":
        del calls[0]  # 5.0 reads such a config, and `diagnose` notes that no rotation can be made
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(tmp_path)
