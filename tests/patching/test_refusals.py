"""Test that impossible configs and requests raise an error that names why, and change nothing."""

import copy
import inspect
import json
import math

import pytest
import torch
import transformers
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
LONGROPE = {
    "rope_type": "longrope",
    **SCALED,
    "long_factor": LONG_FACTOR,
    "short_factor": SHORT_FACTOR,
}
MISSING = object()


def edited(parameters, **changes):
    """Return config fields with changed `rope_parameters`."""
    changed = {k: v for k, v in {**parameters, **changes}.items() if v is not MISSING}
    is_scaled = parameters["rope_type"] not in ("default", "dynamic")
    return {
        "rope_parameters": changed,
        **({"max_position_embeddings": TARGET} if is_scaled else {}),
    }


def edited_each(parameters, field, values):
    """Return cases of one wrong field, which the error must name."""
    return [(edited(parameters, **{field: value}), field) for value in values]


NOT_A_NUMBER = [None, "10000", -4.0, 0, math.nan, math.inf, True, [4.0]]
NOT_A_COUNT = ["64", -64, 0, 16.5, True, [64]]
# transformers itself refuses some of these in a config's file.
FULL = "does not say on how many tokens the model was trained|integer|whole number"
# Fields of a config, and what the error must name.
BAD_CONFIGS = [
    *edited_each(DEFAULT, "rope_theta", NOT_A_NUMBER),
    *edited_each(YARN, "factor", [*NOT_A_NUMBER, MISSING]),
    *edited_each(YARN, "original_max_position_embeddings", NOT_A_COUNT),
    (edited(YARN, original_max_position_embeddings=None), "does not say for how many tokens"),
    *(({"max_position_embeddings": value}, FULL) for value in [None, *NOT_A_COUNT]),
    *(({"head_dim": value}, "head_dim") for value in [*NOT_A_COUNT, 1]),
    ({"head_dim": 15}, "even.*rotary_dim=15"),
    *(({"head_dim": None, "hidden_size": value}, "head_dim") for value in [None, *NOT_A_COUNT]),
    *(({"rope_parameters": value}, "dict") for value in ["yarn", [1], 5]),
    (edited(YARN, type="linear"), "'yarn' and type='linear'"),
    (edited(DEFAULT, type="yarn"), "'default' and type='yarn'"),
    *edited_each(DEFAULT, "rope_type", [5]),
    *edited_each({"rope_type": "linear", "rope_theta": 1e4}, "factor", [MISSING]),
    *edited_each({"rope_type": "dynamic", "rope_theta": 1e4}, "factor", ["2"]),
    *edited_each(YARN, "beta_fast", ["32"]),
    *edited_each(YARN, "beta_slow", [-1.0]),
    *edited_each(YARN, "attention_factor", ["1"]),
    *edited_each(LLAMA3, "low_freq_factor", [MISSING]),
    *edited_each(LLAMA3, "high_freq_factor", [None]),
    (edited(LLAMA3, low_freq_factor=4.0), "low_freq_factor must be below high_freq_factor"),
    (edited(YARN, beta_fast=1.0, beta_slow=32.0), "beta_slow must be below beta_fast"),
    (edited(YARN, beta_slow=32.0), "beta_slow must be below beta_fast"),
    *edited_each(LONGROPE, "long_factor", [MISSING, [1.0, -1.0]]),
    *edited_each(LONGROPE, "short_factor", ["1"]),
    (edited(LONGROPE, long_factor=LONG_FACTOR[1:]), "got 7 and 8"),
    *edited_each(DEFAULT, "partial_rotary_factor", [-0.5, "0.5", 0]),
    (edited(DEFAULT, partial_rotary_factor=2.0), "rotary_dim=32 with head_dim=16"),
]
BAD_CONFIG_IDS = list(map(str, range(len(BAD_CONFIGS))))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model(num_hidden_layers=1).save_pretrained(folder)
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


@pytest.mark.parametrize(("changes", "fact"), BAD_CONFIGS, ids=BAD_CONFIG_IDS)
def test_bad_config_of_a_live_model_is_refused(changes, fact):
    model = make_model(num_hidden_layers=1)
    before = logits(model, 4)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    set_config_fields(model, changes)
    for attempt in (
        lambda: rope_patch.patch(model, "linear", factor=8),
        lambda: rope_patch.patch(model, "dynamic-yarn"),
        lambda: rope_patch.diagnose(model),
    ):
        with pytest.raises(ValueError, match=fact):
            attempt()
    assert rope_patch.current(model) is None
    for name, value in changes.items():
        assert repr(getattr(model.config, name)) == repr(value)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    model.config = make_model(num_hidden_layers=1).config
    assert torch.equal(logits(model, 4), before)


@pytest.mark.parametrize(("changes", "fact"), BAD_CONFIGS, ids=BAD_CONFIG_IDS)
def test_bad_config_of_a_folder_is_refused(changes, fact, write):
    folder = write(changes)
    content = (folder / "config.json").read_text()
    for attempt in (
        lambda: rope_patch.load(folder, "linear", factor=8),
        lambda: rope_patch.diagnose(folder),
    ):
        with pytest.raises(ValueError, match=fact):
            attempt()
    assert (folder / "config.json").read_text() == content


def test_unknown_rope_type_is_refused(write):
    model = make_model()
    set_config_fields(model, edited(DEFAULT, rope_type="nosuch"))
    with pytest.raises(ValueError, match="nosuch"):
        rope_patch.patch(model, "linear", factor=8)
    with pytest.raises(ValueError, match=r"transformers knows.*nosuch"):
        rope_patch.load(write(edited(DEFAULT, rope_type="nosuch")), "linear", factor=8)


def test_equal_type_and_rope_type_are_accepted(write):
    folder = write(edited(YARN, type="yarn"))
    assert rope_patch.current(rope_patch.load(folder, "linear", factor=8)).trained_length == TRAINED
    assert rope_patch.diagnose(folder).healthy


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_theta", None), ("rope_theta", "1e6"), ("factor", -8.0),
     ("original_max_position_embeddings", "64")],
)  # fmt: skip
def test_bad_parameters_of_one_layer_type_are_refused(field, value):
    model = make_model("gemma3")
    before = logits(model)
    parameters = copy.deepcopy(model.config.rope_parameters)
    parameters["full_attention"] = {**YARN, "rope_theta": 1e6, field: value}
    set_config_fields(model, {"rope_parameters": parameters})
    for attempt in (rope_patch.patch, rope_patch.diagnose):
        with pytest.raises(ValueError, match=field):
            attempt(model, "linear", factor=8)
    assert rope_patch.current(model) is None
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("parameters", "fact"),
    [
        ({**LLAMA3, "low_freq_factor": 9.0}, "low_freq_factor"),
        ({**YARN, "beta_fast": 0.5}, "beta_fast"),
    ],
)
def test_exports_of_impossible_configs_are_refused(parameters, fact):
    model = make_model(**edited(parameters))
    for source in (model, model.config):
        for engine in ("vllm", "llama.cpp", "transformers"):
            with pytest.raises(ValueError, match=fact):
                rope_patch.export(source, engine)


@pytest.mark.parametrize(
    ("text", "fact"), [("7", r"config\.json.*got 7"), ("heads", "num_attention_heads.*got 0")]
)
def test_config_files_that_transformers_cannot_read_are_explained(tmp_path, text, fact):
    if text == "heads":
        text = json.dumps({**make_model().config.to_dict(), "num_attention_heads": 0})
    (tmp_path / "config.json").write_text(text)
    calls = [rope_patch.diagnose, lambda path: rope_patch.load(path, "yarn", factor=2.0)]
    if OLD_TRANSFORMERS and text != "7":
        del calls[0]  # 5.0 reads such a config, and `diagnose` notes that no rotation can be made
    for call in calls:
        with pytest.raises(ValueError, match=fact):
            call(tmp_path)


# -- requests --------------------------------------------------------------------------------------

NOTHING = "would change nothing"
# What is asked of Llama: method, arguments, error, what it must name.
BAD_REQUESTS = [
    ("yarn", {"factor": 1}, ValueError, NOTHING),
    ("yarn", {"length": TRAINED}, ValueError, NOTHING),
    ("default", {"factor": 4}, ValueError, NOTHING),
    ("abf", {"factor": 4, "new_theta": 10000}, ValueError, NOTHING),
    ("yarn", {"factor": 0.5}, ValueError, "at least 1"),
    ("yarn", {"factor": 0}, ValueError, "at least 1"),
    ("yarn", {"factor": math.nan}, ValueError, "finite"),
    ("yarn", {"factor": math.inf}, ValueError, "finite"),
    ("yarn", {"factor": "four"}, ValueError, "got 'four'"),
    ("yarn", {"factor": True}, TypeError, "got True"),
    ("yarn", {"factor": 4, "length": 256}, ValueError, "exactly one of factor"),
    ("yarn", {}, ValueError, "neither.*factor=4, or length=256"),
    ("yarn", {"length": 63}, ValueError, "64.*got 63"),
    ("yarn", {"length": TARGET, "trained_length": 2 * TARGET}, ValueError, "trained length"),
    ("yarn", {"length": math.nan}, ValueError, "finite"),
    ("yarn", {"length": "256.5"}, ValueError, "length"),
    ("yarn", {"factor": 4, "trained_length": 0}, ValueError, "trained_length"),
    ("yarn", {"factor": 4, "trained_length": -64}, ValueError, "trained_length"),
    ("yarn", {"factor": 4, "trained_length": "4x"}, ValueError, "trained_length"),
    ("yran", {"factor": 4}, ValueError, "did you mean 'yarn'.*list all"),
    ("yarn", {"factor": 4, "beta_fst": 16}, ValueError, "did you mean 'beta_fast'.*beta_slow"),
    ("linear", {"factor": 4, "beta_fast": 16}, ValueError, "beta_fast"),
    ("longrope", {"factor": 4}, ValueError, "long_factor"),
    ("longrope", {"factor": 4, "long_factor": LONG_FACTOR[1:]}, ValueError, "8 .*got 7"),
    ("yarn", {"factor": 4, "beta_fast": 1, "beta_slow": 32}, ValueError, "below beta_fast"),
    ("yarn", {"factor": 4, "layer_types": ["full_attention"]}, ValueError, "layer_types out"),
    ("yarn", {"factor": 4, "layer_types": []}, ValueError, "layer_types out"),
    ("dynamic-yarn", {"factor": 4, "length": 256}, ValueError, "exactly one of factor"),
    ("dynamic-yarn", {"factor": 0.5}, ValueError, "at least 1"),
    ("dynamic", {"factor": 0.5}, ValueError, "at least 1"),
    ("dynamic-yarn", {"length": 8}, ValueError, "trained length"),
    ("dynamic-yarn", {"growth": "x"}, ValueError, "growth"),
    ("yarn", {"factor": 4, "kernels": "cuda"}, ValueError, "auto, reference, triton, hf.*'cuda'"),
    ("yarn", {"factor": 2, "start": "x"}, ValueError, "auto, unscaled, running.*'x'"),
    (
        "linear",
        {"factor": 4, "temperature": "log-n", "trained_length": 1},
        ValueError,
        r"ln\(trained_length\).*got 1$",
    ),
]


def assert_refused(model, method, arguments, error, fact):
    """Assert that an unpatched and a patched model refuse a request, and stay as they are."""
    for handle in (None, "linear"):
        handle = handle and rope_patch.patch(model, handle, factor=2)
        before, config = logits(model), model.config.to_dict()
        with pytest.raises(error, match=fact):
            rope_patch.patch(model, method, **arguments)
        assert rope_patch.current(model) is handle
        assert model.config.to_dict() == config
        assert logits(model).equal(before)
        if handle is not None:
            assert handle.active
            handle.undo()


@pytest.fixture(scope="module")
def llama():
    model = make_model()
    yield model
    assert logits(model).equal(logits(make_model()))


@pytest.mark.parametrize(
    ("method", "arguments", "error", "fact"),
    BAD_REQUESTS,
    ids=[f"{method} {arguments}" for method, arguments, *_ in BAD_REQUESTS],
)
def test_bad_requests_change_nothing(method, arguments, error, fact, llama):
    assert_refused(llama, method, arguments, error, fact)


@pytest.mark.parametrize("layer_types", [["full"], ["chunked_attention"], []])
def test_unknown_layer_types_are_refused(layer_types):
    model, arguments = make_model("gemma3"), {"factor": 4, "layer_types": layer_types}
    fact = "layer_types" if not layer_types else "sliding_attention, full_attention"
    assert_refused(model, "yarn", arguments, ValueError, fact)
    with pytest.raises(ValueError, match=fact):
        rope_patch.diagnose(model, "yarn", **arguments)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"length": TRAINED - 1}, "64 tokens, got 63"),
        ({"factor": 0.5}, "at least 1"),
        ({"length": TARGET, "trained_length": 2 * TARGET}, "trained length"),
        ({"factor": 4, "layer_types": ["full_attention"]}, "layer_types out|all layers alike"),
    ],
)
def test_diagnoses_of_requests_that_do_not_fit_are_refused(arguments, fact, llama):
    with pytest.raises(ValueError, match=fact):
        rope_patch.diagnose(llama, "yarn", **arguments)


def test_positional_factor_error_names_the_argument(llama):
    with pytest.raises(TypeError, match=r"factor=4, or length="):
        rope_patch.patch(llama, "yarn", 4)
    assert rope_patch.current(llama) is None
    assert "factor" in inspect.signature(rope_patch.patch).parameters  # what editors show


@pytest.mark.parametrize("value", ["llama", None, {"model": 1}])
def test_non_modules_are_refused(value):
    with pytest.raises(TypeError, match=f"got {type(value).__name__}"):
        rope_patch.patch(value, "yarn", factor=4)


def test_modules_without_rope_are_refused():
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with pytest.raises(ValueError, match=r"'yarn'.*GPT2LMHeadModel"):
        rope_patch.patch(model, "yarn", factor=4)
    assert rope_patch.current(model) is None
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
