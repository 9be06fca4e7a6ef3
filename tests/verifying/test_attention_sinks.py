"""Test the noise floor of models with attention sinks: there, one key's weight is below 1.

So the attention factor reaches the second token of a text, which no other model's rotation does.
"""

import pytest
import torch
from helpers.published_yarn import make_model

import rope_patch

YARN = {"method": "yarn", "factor": 32.0, "start": "unscaled"}  # over 4,096 tokens


@pytest.fixture(scope="module")
def sinks():
    """Return a tiny gpt-oss with weights that make its attention sharp."""
    model = make_model("gpt-oss")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                size = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
                size *= 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("attention_factor", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
def test_the_noise_floor_is_that_of_the_right_attention_factor(sinks, attention_factor):
    engine = make_model("gpt-oss")
    engine.load_state_dict(sinks.state_dict())
    rope_patch.patch(engine, kernels="hf", attention_factor=attention_factor, **YARN)
    found = rope_patch.verify(
        engine,
        against=sinks,
        attention_factor=attention_factor,
        tokens=512,  # of 128, factors 32 and 64 are too much alike
        progress=False,
        **YARN,
    )
    assert found.status == "as-asked"
    assert found.verdict.noise < 1e-5
