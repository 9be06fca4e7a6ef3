"""Test how `rope_parameters` of a vLLM server are read; needs no vLLM."""

import re
from types import SimpleNamespace

import pytest
from helpers.processes import run_code

from rope_patch import Refused
from rope_patch.methods import registered_methods
from rope_patch.serving import (
    method_name,
    our_parameters,
    read_request,
    require_readable,
    rope_type_for,
)

PARAMETERS = {
    "rope_type": "dynamic-yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", registered_methods())
def test_every_method_has_a_rope_type_that_names_it(name):
    assert method_name(rope_type_for(name)) == name


@pytest.mark.parametrize("name", ["default", "yarn", "linear", "ntk", "dynamic", "llama3", "su"])
def test_vllms_own_names_stay_vllms(name):
    assert method_name(name) is None
    assert method_name(f"rope_patch:{name}") == name


@pytest.mark.parametrize("rope_type", [None, "no-such-type", 3])
def test_what_nobody_knows_is_left_to_vllm(rope_type):
    assert method_name(rope_type) is None


def test_only_layer_types_that_name_a_method_are_ours():
    windows = {"rope_type": "default", "rope_theta": 1e3}
    nested = {"full_attention": PARAMETERS, "sliding_attention": windows}
    assert our_parameters(nested) == our_parameters(PARAMETERS) == [PARAMETERS]
    assert our_parameters(windows) == our_parameters(None) == our_parameters({}) == []


def test_options_are_the_methods_and_null_is_their_default():
    request = read_request(PARAMETERS | {"beta_fast": 16.0, "attention_factor": None})
    assert (request.theta, request.trained_length) == (1e4, 64)
    assert request.method.beta_fast == 16
    assert request.method.attention_factor is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": None}, "expected rope_theta"),
        ({"original_max_position_embeddings": 0.5}, "whole number of tokens"),
        ({"betafast": 16}, "'betafast'.*'beta_fast'"),
        ({"rope_type": "mixed-yarn", "factor": None}, "expected a factor"),
        ({"rope_type": "mixed-yarn", "factor": 0.5}, "at least 1"),
        ({"rope_type": "dynamic-yarn", "factor": 0.5}, "at least 1, got 0.5"),
        ({"rope_type": "mixed-longrope"}, "'long_factor'"),
        ({"rope_type": "self-extend"}, "mapped positions"),
        ({"rope_type": "rope_patch:yran"}, "'yran'.*'yarn'"),
        ({"temperature": "log-n"}, "acts on queries"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(changes, message):
    with pytest.raises(Refused, match=message) as error:
        read_request(PARAMETERS | changes)
    assert "rope_type" in str(error.value)


@pytest.mark.parametrize("rope_type", ["dynamic-yarn", "mixed-yarn", "rope_patch:dynamic"])
@pytest.mark.parametrize("name", ["factor", "rope_theta", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", ["four", True, [4.0]])
def test_what_is_no_number_is_named_with_the_value(rope_type, name, value):
    parameters = PARAMETERS | {"rope_type": rope_type, name: value}
    message = rf"{rope_type}.*{name} must be a number, got {re.escape(repr(value))}"
    with pytest.raises(TypeError, match=message):
        read_request(parameters)
    config = SimpleNamespace(rope_parameters=parameters, max_position_embeddings=64)
    with pytest.raises(ValueError, match=message):
        require_readable(SimpleNamespace(hf_text_config=config))


@pytest.mark.parametrize("nested", [False, True])
def test_a_trained_length_above_the_positions_is_refused(nested):
    windows = {"rope_type": "default", "rope_theta": 1e3}
    both = {"full_attention": PARAMETERS, "sliding_attention": windows}
    config = SimpleNamespace(rope_parameters=both if nested else PARAMETERS)
    for positions in (64, 1024, None):
        config.max_position_embeddings = positions
        require_readable(SimpleNamespace(hf_text_config=config))
    config.max_position_embeddings = 63
    with pytest.raises(Refused, match=r"\(63\), got 64"):
        require_readable(SimpleNamespace(hf_text_config=config))


def test_what_names_no_method_is_left_to_vllm():
    for rope in (None, {}, {"rope_type": "yarn", "factor": "four"}):
        config = SimpleNamespace(rope_parameters=rope, max_position_embeddings=64)
        require_readable(SimpleNamespace(hf_text_config=config))


def test_reading_and_importing_need_no_vllm():
    code = """
import sys; sys.modules['vllm'] = None
import rope_patch, rope_patch.exporting, rope_patch.serving.vllm.plugin
from rope_patch.serving import admitted_length, make_profiles, read_request, require_readable
"""
    run_code(code)
