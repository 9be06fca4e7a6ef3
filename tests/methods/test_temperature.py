"""Test temperatures against their formulas, one position at a time."""

import math

import pytest
import torch
from transformers.models.ministral3 import modeling_ministral3

from rope_patch.methods import Temperature, build, registered_methods

POSITIONS = [0, 1, 62, 63, 64, 65, 127, 128, 200, 1000, 1_000_000]
FORMULAS = {
    1.5: lambda p, trained: 1.5,
    "log-n": lambda p, trained: max(1, math.log(p + 1) / math.log(trained)),
    "llama4": lambda p, trained: 1 + 0.1 * math.log(1 + p // trained),
    "llama4:0.3": lambda p, trained: 1 + 0.3 * math.log(1 + p // trained),
    "drope:0.412": lambda p, trained: 1 + 0.412 * math.log(max(1, (p + 1) / trained)),
}


@pytest.mark.parametrize("trained", [64, 1000, 8192])
@pytest.mark.parametrize("value", FORMULAS)
def test_factors_follow_the_formula(value, trained):
    got = Temperature.parse(value).factors(torch.tensor(POSITIONS), trained, torch.float64)
    expected = [float(FORMULAS[value](p, trained)) for p in POSITIONS]
    torch.testing.assert_close(got.tolist(), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("value", [value for value in FORMULAS if value != 1.5])
def test_factors_are_exactly_1_up_to_the_trained_length(value):
    for trained in (7, 64, 1000, 8192, 131072):
        positions = torch.arange(trained)
        got = Temperature.parse(value).factors(positions, trained, torch.float32)
        assert got.eq(1).all()
        beyond = torch.tensor([trained, 9 * trained])
        assert Temperature.parse(value).factors(beyond, trained, torch.float32).gt(1).all()


def test_llama4_is_the_factor_of_ministral_3():
    positions = torch.arange(5000)[None]
    scale = getattr(modeling_ministral3, "get_llama_4_attn_scale", None)
    scale = scale or modeling_ministral3._get_llama_4_attn_scale  # transformers 5.0
    expected = scale(positions, 0.1, 64).reshape(1, -1)
    got = Temperature.parse("llama4").factors(positions, 64, torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0.412, ValueError, r"at least 1.*temperature='drope:0\.412'"),
        (-1, ValueError, "at least 1"),
        (math.inf, ValueError, "must be finite"),
        (True, TypeError, "must be a number"),
        (["log-n"], TypeError, "must be a number"),
        ("logn", ValueError, r"one of log-n, llama4, drope.*did you mean 'log-n'"),
        ("log-n:2", ValueError, "has no coefficient"),
        ("drope", ValueError, r"needs a coefficient above 0, such as 'drope:0\.1'"),
        ("drope:", ValueError, "needs a coefficient"),
        ("llama4:nan", ValueError, "needs a coefficient"),
        ("llama4:-0.1", ValueError, "needs a coefficient"),
    ],
)
def test_wrong_values_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        build("yarn", factor=4, temperature=value)


@pytest.mark.parametrize("name", registered_methods())
def test_every_method_takes_a_temperature(name):
    required = {"long_factor": [1.0, 2.0]} if "longrope" in name else {}
    required |= {"groups": [2, 4]} if name == "dpe" else {}
    method = build(name, temperature="log-n", **required)
    assert method.query_temperature == Temperature("log-n", 1.0)
    assert method.options()["temperature"] == "log-n"
    assert not method.is_native
    without = build(name, **required)
    default = getattr(method, "default_temperature", "none")  # of position maps
    assert (without.query_temperature is None) == (default == "none")
    assert "temperature" not in without.options()
    grows_otherwise = name == "dynamic"  # in steps, and transformers' with every token
    expected = without.has_config_form and default == "none" and not grows_otherwise
    assert without.is_native == expected


def test_a_constant_of_1_changes_nothing():
    assert build("yarn", factor=4, temperature=1).query_temperature is None
