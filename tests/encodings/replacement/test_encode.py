"""`rope_patch.encode`: what it adds to a model, against a decoder written out in numpy.

The formulas are those of the papers. Then copies, undo, and what is refused.
"""

import copy
import io
import pickle

import pytest
import torch
import transformers
from helpers.encoded_models import (
    IDS,
    NAMES,
    ONE_EACH,
    VARIANTS,
    encoded,
    llama,
    logits,
    require_release,
    tokens,
)
from helpers.tiny_models import make_model
from helpers.written_out_decoder import written_out_logits

import rope_patch

TRAINED = {
    "integer": 1,
    "normalised": 1,
    "binary": 1,
    "sinusoidal": 1,
    "learned": 16 * 32,
    "t5": 32 * 4,
    "kerple": 2 * 4,
    "fire": (1 + 1) * 32 + (32 + 1) * 4 + 2,
}


def test_the_table_has_every_encoding():
    assert {name for name, _ in VARIANTS} == set(rope_patch.list_encodings())


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_equals_a_written_out_decoder(name, options):
    model = encoded(name, options).double()
    ids = tokens()
    expected = torch.stack(
        [torch.from_numpy(written_out_logits(model, name, options, row)) for row in ids]
    )
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        # Frequencies and slopes of 32 bits are within the tolerance.
        torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_undo_restores_the_model(name, options):
    require_release(options)
    model = llama()
    before, state, config = logits(model, tokens()), model.state_dict(), model.config.to_dict()
    handle = rope_patch.encode(model, name, **options)
    assert handle.active
    trained = {key: each for key, each in model.named_parameters() if "position_encoding" in key}
    assert set(model.state_dict()) - set(state) == set(trained)
    if not options:
        assert sum(each.numel() for each in trained.values()) == TRAINED.get(name, 0)
    if (name, options) != ("rope", {}):
        assert (logits(model, tokens()) - before).abs().max() > 1e-3
    handle.undo()
    assert not handle.active
    assert torch.equal(logits(model, tokens()), before)
    assert set(model.state_dict()) == set(state)
    assert model.config.to_dict() == config
    handle.undo()  # again: nothing


def test_a_second_encoding_replaces_the_first():
    model, expected = llama(), llama()
    rope_patch.encode(model, "learned")
    rope_patch.encode(model, "rope", base=50.0)
    first = rope_patch.encode(model, "alibi")
    rope_patch.encode(expected, "alibi")
    assert torch.equal(logits(model, tokens()), logits(expected, tokens()))
    first.undo()
    assert torch.equal(logits(model, tokens()), logits(llama(), tokens()))


def test_a_refused_encoding_leaves_the_first():
    model = encoded("alibi", {})
    before = logits(model, tokens())
    with pytest.raises(rope_patch.Refused):
        rope_patch.encode(model, "sinusoidal", layout="thirds")
    assert torch.equal(logits(model, tokens()), before)


def test_an_encoding_that_does_not_fit_leaves_the_first():
    """Gemma 3 has several rotations, which shows when the first encoding is undone already."""
    model = encoded("alibi", {}, make_model("gemma3"))
    before = logits(model, tokens())
    with pytest.raises(rope_patch.Refused, match="several rotations"):
        rope_patch.encode(model, "rope", base=50.0)
    assert torch.equal(logits(model, tokens()), before)


@pytest.mark.parametrize(("name", "options"), ONE_EACH, ids=NAMES)
def test_copies_and_pickles_compute_the_same(name, options):
    model = encoded(name, options)
    expected = logits(model, tokens())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    rope_patch.encode(model, "none")  # copies have hooks of their own
    for other in copies:
        assert torch.equal(logits(other, tokens()), expected)
        with torch.no_grad():
            for parameter in other.model.position_encoding.parameters():
                parameter.mul_(2)
        if list(other.model.position_encoding.parameters()):
            assert not torch.equal(logits(other, tokens()), expected)
        rope_patch.encode(other, "none")
        assert torch.equal(logits(other, tokens()), logits(model, tokens()))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "alibi") for kind in ("Qwen2", "Qwen3", "Mistral", "Gemma", "Olmo2", "Phi3")),
        *((kind, name) for kind in ("Qwen3", "Phi3") for name in ("learned", "rnope", "xpos")),
    ],
)
def test_other_families_of_the_same_kind(kind, name):
    """Positions enter at all: without any, two equal tokens with equal pasts would be alike."""
    model = llama(kind)
    none = encoded("none", {}, llama(kind))
    ids = torch.full((1, 9), 7)
    same = logits(none, ids)
    torch.testing.assert_close(same, same[:, :1].expand_as(same), rtol=0, atol=1e-4)
    got = logits(encoded(name, {}, model), tokens())
    assert (got - logits(none, tokens())).abs().max() > 1e-3


def test_learned_rows_end():
    model = encoded("learned", {})
    with pytest.raises(rope_patch.Refused, match=r"beyond the 16 rows.*length=17"):
        logits(model, tokens(count=17))
    assert logits(encoded("learned", {"length": 17}), tokens(count=17)).isfinite().all()


def test_the_scale_is_trained_or_fixed():
    trained = rope_patch.encode(llama(), "sinusoidal", scale=0.5)
    assert "scale 0.5, trained" in trained.summary()
    model = llama()
    fixed = rope_patch.encode(model, "sinusoidal", scale=0.5, train_scale=False)
    assert "scale 0.5, fixed" in fixed.summary()
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        "model.position_encoding.scale"
    ]


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("alibbi", {}, r"did you mean 'alibi'.*kerple"),
        ("binary", {"bases": 4}, "did you mean 'base'"),
        ("alibi", {"base": 4}, "'base'; it has none"),
        ("binary", {"base": 1}, r"base .*from 2 on"),
        ("binary", {"digits": 33}, "33 digits"),
        ("learned", {"length": 0}, r"length .*from 1 on"),
        ("sinusoidal", {"layout": "thirds"}, r"layout .*interleaved, halves"),
        ("sinusoidal", {"scale": 0}, r"scale .*above 0"),
        ("t5", {"max_distance": 9}, r"max_distance .*from 17 on"),
        ("kerple", {"kind": "root"}, r"kind .*log, power"),
        ("rope", {"p": 0.5, "partial": 0.5}, "partial and p"),
        ("rope", {"p": 1.5}, "p must"),
        ("rnope", {"every": 1}, r"every .*from 2 on"),
        ("fire", {"rate": "much"}, r"rate .*above 0"),
    ],
)
def test_bad_requests_are_refused(name, options, match):
    model = llama()
    with pytest.raises(rope_patch.Refused, match=match):
        rope_patch.encode(model, name, **options)
    assert not hasattr(model.model, "position_encoding")


def test_other_models_are_refused():
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=60)
    )
    with pytest.raises(rope_patch.Refused, match="no rotary embedding"):
        rope_patch.encode(gpt2, "alibi")
    with pytest.raises(TypeError, match="expected a transformers model"):
        rope_patch.encode(3, "alibi")
    model = llama()
    rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(rope_patch.Refused, match="undo the patch first"):
        rope_patch.encode(model, "alibi")
    llama4 = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=32,
            intermediate_size_mlp=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=2,
            pad_token_id=0,
        )
    )
    with pytest.raises(rope_patch.Refused, match="complex numbers"):
        rope_patch.encode(llama4, "none")


@pytest.mark.parametrize(
    ("name", "method", "arguments"),
    [
        ("alibi", "ntk", {"factor": 4}),
        ("learned", "linear", {"factor": 4}),
        ("rope", "yarn", {"factor": 4}),
        ("none", "nope", {"temperature": 1.2}),
    ],
)
def test_a_patched_encoding_is_not_undone_before_its_patch(name, method, arguments):
    """Both change the model and its config, so another order would leave parts of the patch."""
    model = llama()
    before, config = logits(model, tokens()), model.config.to_dict()
    handle = rope_patch.encode(model, name, **({"base": 50.0} if name == "rope" else {}))
    patch = rope_patch.patch(model, method, **arguments)
    patched = logits(model, tokens())
    with pytest.raises(rope_patch.Refused, match="undo the patch first"):
        handle.undo()
    assert torch.equal(logits(model, tokens()), patched)
    patch.undo()
    handle.undo()
    assert torch.equal(logits(model, tokens()), before)
    assert model.config.to_dict() == config
