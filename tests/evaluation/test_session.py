"""Test what stored answers depend on besides their prompts."""

import pytest
from helpers.method_names import position_maps
from helpers.tiny_models import TRAINED, make_model

import rope_patch
from rope_patch.evaluation.session import _rotation_identity


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
