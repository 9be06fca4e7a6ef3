"""Test that short texts keep the bits of the plain model, in every dtype, with default kernels."""

import pytest
import torch
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT_FACTOR,
    TRAINED,
    forward,
    make_config,
    make_model,
    padded,
    tokens,
)

import rope_patch
from rope_patch.patching.kernels import position_passthrough

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "long_factor": LONG_FACTOR,
    "short_factor": SHORT_FACTOR,
    "original_max_position_embeddings": TRAINED,
}
# name: method, its options, scaling of the checkpoint
METHODS = {
    "dynamic-yarn": ("dynamic-yarn", {}, None),
    "mixed-yarn": ("mixed-yarn", {"factor": 4}, None),
    "self-extend": ("self-extend", {}, None),
    "the checkpoint's own LongRoPE": ("linear", {"factor": 2}, LONGROPE),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=["cpu", "as on a GPU"])
def device(request, monkeypatch):
    """Rotate as on a CPU, or from exact positions, as the kernels of a GPU do."""
    if request.param != "cpu":
        monkeypatch.setattr(
            position_passthrough, "use_triton", lambda x, kernels="auto": kernels == "auto"
        )


def make_in(dtype, family, scaling=None):
    """Return a model that is made in a dtype, as loaded in it: its frequencies are in float32."""
    changes = {} if scaling is None else {"rope_parameters": dict(scaling)}
    config = make_config(family, initializer_range=0.2, **changes)
    torch.manual_seed(0)
    model = type(make_model(family))._from_config(config, dtype=dtype).eval()
    model.generation_config.suppress_tokens = [0]
    return model


def generated(model):
    """Return logits of greedy texts that end at the trained length, from rows of two lengths."""
    ids, mask = padded([tokens(TRAINED - 4, seed=3), tokens(25, seed=4)], "left")
    new = {"max_new_tokens": 4, "do_sample": False}
    output = model.generate(
        ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **new
    )
    return output.sequences, torch.stack(output.logits)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in METHODS),
        *(("qwen3", method) for method in ("dynamic-yarn", "self-extend")),
        *(("gemma3", method) for method in ("mixed-yarn", "self-extend")),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_texts_keep_the_bits_of_the_plain_model(method, dtype, family, device):
    name, options, scaling = METHODS[method]
    model = make_in(dtype, family, scaling)
    ids = tokens(TRAINED, batch=2)
    plain, (plain_ids, plain_logits) = forward(model, ids), generated(model)
    rope_patch.patch(model, name, **options)
    assert forward(model, ids).equal(plain)
    got_ids, got_logits = generated(model)
    assert got_ids.equal(plain_ids)
    assert got_logits.equal(plain_logits)
    rope_patch.unpatch(model)
    assert forward(model, ids).equal(plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_rows_beside_long_ones_keep_their_bits(dtype, device):
    model = make_in(dtype, "qwen3")
    ids, mask = padded([tokens(LONG), tokens(30)], "right")
    plain = forward(model, ids, attention_mask=mask)[1, :30]
    rope_patch.patch(model, "dynamic-yarn")
    assert forward(model, ids, attention_mask=mask)[1, :30].equal(plain)


def test_long_texts_are_rotated_from_positions_on_a_gpu(monkeypatch):
    monkeypatch.setattr(position_passthrough, "use_triton", lambda x, kernels="auto": True)
    model = make_in(torch.float32, "llama")
    rope_patch.patch(model, "dynamic-yarn")
    first = []
    model.model.rotary_emb.register_forward_hook(lambda m, a, output: first.append(output[0].dtype))
    for length in (TRAINED, TRAINED + 1):
        forward(model, tokens(length))
    assert first == [torch.float32, torch.int64]
