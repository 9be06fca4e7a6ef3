"""Test that short texts keep the bits of real pretrained weights, in every dtype.

SmolLM2-135M reads a novel and writes 40 tokens. The trained length is set to where these end: one
token more would be rotated otherwise.
"""

import pytest
import torch

import rope_patch
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_model, read_tokenizer
from rope_patch.tasks import texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

READ, WRITTEN = 88, 40
TRAINED = READ + WRITTEN
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e5,
    "factor": 4.0,
    "short_factor": [1 + pair / 31 for pair in range(32)],
    "long_factor": [1 + 3 * pair / 31 for pair in range(32)],
    "original_max_position_embeddings": TRAINED,
}
METHODS = {
    "dynamic-yarn": {},
    "mixed-yarn": {"factor": 4},
    "rerope": {},
    "self-extend": {},
}


@pytest.fixture(scope="module")
def folder():
    return demo.demo_folder()


@pytest.fixture(scope="module")
def ids(folder):
    return torch.tensor([texts.documents(["emma"], read_tokenizer(folder), READ)[0].tokens])


def load(folder, dtype):
    model = read_model(folder, dtype=dtype)
    model.config.max_position_embeddings = TRAINED
    return model


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_short_texts_keep_the_bits_of_smollm2(folder, ids, dtype):
    model = load(folder, dtype)
    plain = answers(model, ids)
    assert plain[2].shape[1] == TRAINED
    longer = torch.cat([ids, ids], 1)
    with torch.no_grad():
        long_plain = model(longer).logits
    for name, options in METHODS.items():
        rope_patch.patch(model, name, **options)
        assert_equal_bits(answers(model, ids), plain)
        with torch.no_grad():
            assert not model(longer).logits.equal(long_plain), name
        rope_patch.unpatch(model)
    assert_equal_bits(answers(model, ids), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_longropes_short_set_keeps_its_bits(folder, ids, dtype):
    """Put two sets into SmolLM2's config: no published checkpoint of LongRoPE installs offline."""
    model = load(folder, dtype)
    config = model.config
    config.rope_parameters = dict(LONGROPE)
    weights = model.state_dict()
    model = type(model)._from_config(config, dtype=dtype).eval()
    model.load_state_dict(weights)
    plain = answers(model, ids)
    with rope_patch.patch(model, "linear", factor=2):
        assert_equal_bits(answers(model, ids), plain)
