"""Test the plugin's tables against the live model, over checkpoints with scalings of their own."""

import json

import pytest
import torch
from helpers.tiny_models import LONG_FACTOR, SHORT_FACTOR, TARGET, TRAINED, make_model

import rope_patch
from rope_patch.serving.vllm.profiles import ProfileLengths, make_profiles, stack_tables
from rope_patch.serving.vllm.rope_type import our_parameters, read_request

THETA, HEAD = 1e4, 16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED // 4}
CHECKPOINTS = {
    "default": {"rope_type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED // 4,
    },
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": YARN,
    "yarn without a factor in attention": {**YARN, "attention_factor": 1.0},
}
STRETCHES = {"factor": 4, "long_factor": LONG_FACTOR}
METHODS = {
    "dynamic": {"length": TARGET},
    "dynamic-linear": {"length": TARGET},
    "dynamic-yarn": {"length": TARGET},
    "mixed-linear": {"factor": 4},
    "mixed-ntk": {"factor": 4},
    "mixed-yarn": {"factor": 4},
    "longrope": STRETCHES,
    "longrope of two sets": {**STRETCHES, "short_factor": SHORT_FACTOR},
    "longrope with start tokens": {**STRETCHES, "start_tokens": 4},
    "longrope of two sets, with start tokens": {
        **STRETCHES,
        "short_factor": SHORT_FACTOR,
        "start_tokens": 4,
    },
}


def plain_table(rows):
    """Return vLLM's own table for theta alone, by its own arithmetic."""
    inv_freq = 1.0 / (THETA ** (torch.arange(0, HEAD, 2, dtype=torch.float) / HEAD))
    angles = torch.outer(torch.arange(rows, dtype=torch.float), inv_freq)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def live_table(model, length):
    """Return cos and sin of a text of `length` tokens in the live model, `[length, R]`."""
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 4), torch.arange(length)[None])
    return torch.cat([table[0, :, : HEAD // 2] for table in (cos, sin)], dim=-1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_tables_rotate_each_request_as_the_live_model(checkpoint, method):
    """Compare start tokens, too, which keep the rotation of the checkpoint, not of theta."""
    parameters = {"rope_theta": THETA, **CHECKPOINTS[checkpoint]}
    model = make_model(num_hidden_layers=1, rope_parameters=parameters)
    start = "running" if checkpoint != "default" else "auto"
    rope_patch.patch(model, method.split(" ")[0], start=start, **METHODS[method])
    if checkpoint == "yarn" or (checkpoint.startswith("yarn") and "yarn" in method):
        with pytest.raises(ValueError, match=r"start='unscaled'"):
            rope_patch.export(model, "vllm")
        return
    export = rope_patch.export(model, "vllm")
    (exported,) = our_parameters(json.loads(export.arguments[1])["rope_parameters"])
    request = read_request(exported)
    profiles = make_profiles(request, HEAD, HEAD, TARGET)
    geometry = request.geometry(HEAD, HEAD)
    tables = stack_tables(request.method, geometry, profiles, plain_table(TARGET), 1)
    lengths = ProfileLengths(tuple(profile.longest for profile in profiles))
    for length in (2, 40, TRAINED, TRAINED + 1, 100, 200, TARGET):
        first = lengths.start_rows()[lengths.index(length)]
        got = tables[first : first + length]
        torch.testing.assert_close(got, live_table(model, length), rtol=0, atol=5e-5)
