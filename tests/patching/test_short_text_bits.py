"""Test that short texts keep the bits of the plain model, in every dtype, with default kernels.

With real weights, SmolLM2-135M reads a novel and writes 40 tokens. Its trained length is set to
where these end: one token more would be rotated otherwise.
"""

import pytest
import torch
import transformers
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
from rope_patch.pretrained import demo_folder

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
USE_TRITON = "rope_patch.patching.kernels.attention_forward.use_triton"


@pytest.fixture(params=["cpu", "as on a GPU"])
def device(request, monkeypatch):
    """Rotate as on a CPU, or from exact positions, as the kernels of a GPU do."""
    if request.param != "cpu":
        monkeypatch.setattr(USE_TRITON, lambda x, kernels="auto": kernels == "auto")


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
    ("family", "method", "dtype"),
    [
        *(("llama", method, dtype) for method in METHODS for dtype in DTYPES),
        *(("qwen3", method, torch.bfloat16) for method in ("dynamic-yarn", "self-extend")),
        *(("gemma3", method, torch.bfloat16) for method in ("mixed-yarn", "self-extend")),
    ],
)
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
    monkeypatch.setattr(USE_TRITON, lambda x, kernels="auto": True)
    model = make_in(torch.float32, "llama")
    rope_patch.patch(model, "dynamic-yarn")
    first = []
    model.model.rotary_emb.register_forward_hook(lambda m, a, output: first.append(output[0].dtype))
    for length in (TRAINED, TRAINED + 1):
        forward(model, tokens(length))
    assert first == [torch.float32, torch.int64]


# -- real weights ----------------------------------------------------------------------------------

READ, WRITTEN = 88, 40
REAL_METHODS = {
    "dynamic-yarn": {},
    "mixed-yarn": {"factor": 4},
    "rerope": {},
    "self-extend": {},
}
REAL_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e5,
    "factor": 4.0,
    "short_factor": [1 + pair / 31 for pair in range(32)],
    "long_factor": [1 + 3 * pair / 31 for pair in range(32)],
    "original_max_position_embeddings": READ + WRITTEN,
}
EMMA = """Emma Woodhouse, handsome, clever, and rich, with a comfortable home and happy disposition,
seemed to unite some of the best blessings of existence; and had lived nearly twenty-one years in
the world with very little to distress or vex her. She was the youngest of the two daughters of a
most affectionate, indulgent father; and had, in consequence of her sister's marriage, been mistress
of his house from a very early period. Her mother had died too long ago for her to have more than an
indistinct remembrance of her caresses."""


def read_smollm2(dtype, **changes):
    """Return SmolLM2 with a changed config, and the tokens of the text."""
    folder = demo_folder()
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in {"max_position_embeddings": READ + WRITTEN, **changes}.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(EMMA, return_tensors="pt").input_ids
    assert ids.shape[1] >= READ
    return model.eval(), ids[:, :READ]


@torch.no_grad()
def answers(model, ids):
    """Return the logits of a text, and of the tokens that a model writes behind it."""
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=WRITTEN,
        min_new_tokens=WRITTEN,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return model(ids).logits, torch.stack(written.logits), written.sequences


def assert_equal_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert torch.isfinite(other).all()
        assert one.equal(other)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_texts_keep_the_bits_of_smollm2(dtype):
    model, ids = read_smollm2(dtype)
    plain = answers(model, ids)
    assert plain[2].shape[1] == READ + WRITTEN
    longer = torch.cat([ids, ids], 1)
    long_plain = forward(model, longer)
    for name, options in REAL_METHODS.items():
        with rope_patch.patch(model, name, **options):
            assert_equal_bits(answers(model, ids), plain)
            assert not forward(model, longer).equal(long_plain), name
    assert_equal_bits(answers(model, ids), plain)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES)
def test_longropes_short_set_keeps_its_bits(dtype):
    """Put two sets into SmolLM2's config: no published checkpoint of LongRoPE installs offline."""
    model, ids = read_smollm2(dtype, rope_parameters=dict(REAL_LONGROPE))
    plain = answers(model, ids)
    with rope_patch.patch(model, "linear", factor=2):
        assert_equal_bits(answers(model, ids), plain)
