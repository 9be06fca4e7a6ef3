"""Test what stored answers depend on besides their prompts."""

import pytest
from helpers.tiny_models import TRAINED, make_model

import rope_patch
from rope_patch.evaluation.session import _rotation_identity


def identity(method, length=TRAINED // 2, end=TRAINED, **options):
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
    assert identity("dynamic-yarn") is None  # up to the trained length
    assert identity("default", factor=1, temperature=2) == {"temperature": [2, TRAINED]}
