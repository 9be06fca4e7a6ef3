"""Test what stored answers depend on besides their prompts."""

import pytest
from helpers.method_names import position_maps
from helpers.tiny_models import TRAINED, make_model

import rope_patch
from rope_patch.evaluation.session import _other_config, _rotation_identity
from rope_patch.utils.provenance import config_fingerprint, fingerprint


def identity(method, length=2 * TRAINED, end=2 * TRAINED, **options):
    return _rotation_identity(rope_patch.patch(make_model(), method, **options), length, end)


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_temperatures_have_answers_of_their_own(method):
    options = {"factor": 4} if method == "yarn" else {}
    identities = [
        identity(method, temperature=temperature, **options)
        for temperature in (None, "log-n", "llama4", 2)
    ]
    assert all(identities.count(each) == 1 for each in identities)


def test_a_temperature_alone_is_not_the_plain_model():
    assert identity("dynamic-yarn", end=TRAINED, length=TRAINED // 2) is None
    assert identity("default", factor=1, temperature=2) == {"temperature": ["constant", 2, TRAINED]}


@pytest.mark.parametrize("temperature", ["log-n", "llama4", "drope:0.1"])
def test_a_temperature_of_1_shares_the_plain_models_answers(temperature):
    assert identity("default", factor=1, temperature=temperature, end=TRAINED) is None
    assert identity("default", factor=1, temperature=temperature, end=TRAINED + 1) is not None


def test_position_maps_have_answers_of_their_own():
    requests: list[tuple[str, dict]] = [
        (name, {"groups": (2, 4)} if name == "dpe" else {}) for name in position_maps()
    ]
    requests += [
        ("rerope", {"window": 8}),
        ("rerope", {"temperature": "none"}),
        ("rerope", {"on": "yarn:1.5"}),
        ("self-extend", {"window": TRAINED // 4, "group": 4}),
    ]
    identities = [identity(name, **options) for name, options in requests]
    assert None not in identities
    assert all(identities.count(each) == 1 for each in identities)


@pytest.mark.parametrize("name", ["rerope", "self-extend", "jet-long"])
def test_position_maps_share_the_plain_models_answers_up_to_the_trained_length(name):
    assert identity(name, length=TRAINED, end=TRAINED) is None
    assert identity(name, length=TRAINED, end=TRAINED + 1) is not None


def test_string_changes_answers_within_the_trained_length():
    assert identity("string", length=TRAINED, end=TRAINED) is not None


@pytest.mark.parametrize("method", ["dynamic-yarn", "self-extend"])
def test_only_equal_bits_share_the_plain_models_answer(method):
    short = {"length": TRAINED // 2, "end": TRAINED}
    assert identity(method, **short) is None
    assert identity(method, **short, kernels="hf") is None
    assert identity(method, **short, kernels="reference") == {"kernels": "reference"}


def test_the_same_weights_under_another_config_have_answers_of_their_own(tmp_path):
    """An edited theta is in no weight: the plain model of before answered for that of now."""
    model = make_model()
    weights, config = fingerprint(model), config_fingerprint(model.config)
    model.config.rope_parameters["rope_theta"] *= 100
    edited = config_fingerprint(model.config)
    model.config._name_or_path = "elsewhere"
    assert config_fingerprint(model.config) == edited != config
    assert fingerprint(model) == weights
    found = [_other_config(tmp_path, weights, each) for each in (config, edited, config, edited)]
    assert found == [None, edited, None, edited]  # the first keeps the keys of earlier releases
    assert _other_config(tmp_path, "other weights", edited) is None


def test_what_a_dynamic_method_starts_from_has_answers_of_its_own():
    """Beyond the trained length both follow the text, one from the config's own scaling on."""
    scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    found = []
    for start in ("running", "unscaled"):
        model = make_model(rope_parameters=scaling)
        handle = rope_patch.patch(model, "dynamic-yarn", trained_length=TRAINED, start=start)
        found.append(_rotation_identity(handle, TRAINED, 2 * TRAINED))
    assert found[0] != found[1]


def test_a_dynamic_method_on_some_layers_has_answers_of_its_own():
    """Beyond the trained length, layers with a window rotate as before unless they are named."""
    found = []
    for layer_types in (None, ["full_attention"], ["full_attention", "sliding_attention"]):
        handle = rope_patch.patch(make_model("gemma3"), "dynamic-yarn", layer_types=layer_types)
        found.append(_rotation_identity(handle, TRAINED, 2 * TRAINED))
    assert found[0] == found[1] != found[2]
    assert len(identity("dynamic-yarn", length=TRAINED)) == 2  # as earlier releases stored it
