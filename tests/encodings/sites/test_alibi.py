"""ALiBi: against transformers' own code with other slopes, and built from distances in float64."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers.encoding_models import encoding_model, token_logits
from helpers.no_copies import NoCopies
from helpers.releases import plain_transformers
from transformers import StaticCache
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

import rope_patch

TRAINED, FACTOR, HEADS = 40, 4, 4
IDS = torch.randint(6, 90, (2, 160), generator=torch.Generator().manual_seed(1))
HEAD_FIELDS = {
    "BloomForCausalLM": "n_head",
    "MptForCausalLM": "n_heads",
    "FalconForCausalLM": "num_attention_heads",
}


def alibi_model(family, **fields):
    """Return a model whose heads look at far tokens, so that biases show in the logits."""
    if family == "MptForCausalLM":
        fields["max_seq_len"] = TRAINED
    model = encoding_model(family, **{HEAD_FIELDS[family]: HEADS}, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    return model


def masks(length):
    """Return a mask for each way that a batch can be padded, by name."""
    whole = torch.ones(2, length, dtype=torch.long)
    left, right, holes = whole.clone(), whole.clone(), whole.clone()
    left[0, :13] = 0
    right[1, -13:] = 0
    holes[0, 20:30] = 0
    return {"whole": whole, "left": left, "right": right, "holes": holes}


def scale_of(method, heads):
    """Return what each head's slope is multiplied by, from the slopes' own logarithms."""
    biases = modeling_bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    slopes = biases.view(heads, 2)[:, 1].double()
    if method == "linear":
        return torch.full((heads,), 1 / FACTOR, dtype=torch.float64)
    logs = slopes.log()
    return FACTOR ** -((logs.max() - logs) / (logs.max() - logs.min()))


@pytest.mark.parametrize(
    ("heads", "method", "masked"),
    [(4, "linear", True), (4, "ntk", False), (6, "ntk", True), (6, "linear", False)],
)
def test_bloom_equals_its_own_code_with_other_slopes(heads, method, masked, monkeypatch):
    model = encoding_model("BloomForCausalLM", n_head=heads)
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[0, :9] = 0
    arguments = {"attention_mask": mask} if masked else {}
    with rope_patch.patch(model, method, factor=FACTOR, trained_length=TRAINED):
        got = token_logits(model, 100, **arguments)
    # Newer releases have the slopes in a function of their own.
    names = ("_get_alibi_slopes", "build_alibi_tensor")
    name = next(each for each in names if hasattr(modeling_bloom, each))
    own, scale = getattr(modeling_bloom, name), scale_of(method, heads).float()

    def scaled(*args):
        result = own(*args)
        return result * scale.repeat(len(result) // heads).view(-1, *[1] * (result.ndim - 1))

    monkeypatch.setattr(modeling_bloom, name, scaled)
    torch.testing.assert_close(got, token_logits(model, 100, **arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("method", ["linear", "ntk"])
def test_mpt_equals_its_own_code_with_other_slopes(heads, method):
    model = encoding_model("MptForCausalLM", n_heads=heads, max_seq_len=TRAINED)
    with pytest.raises(RuntimeError):
        token_logits(model, 100)
    with rope_patch.patch(model, method, factor=FACTOR):
        assert model.config.max_seq_len == FACTOR * TRAINED
        got = token_logits(model, 100)
        beyond = token_logits(model, FACTOR * TRAINED + 30)
    assert beyond.isfinite().all()
    model.config.max_seq_len = FACTOR * TRAINED
    own, scale = model.transformer.build_mpt_alibi_tensor, scale_of(method, heads).float()
    model.transformer.build_mpt_alibi_tensor = lambda *args, **kwargs: (
        own(*args, **kwargs) * scale[:, None, None]
    )
    torch.testing.assert_close(got, token_logits(model, 100), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["linear", "ntk"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_falcon_equals_its_own_code_with_other_slopes(method, implementation, monkeypatch):
    model = encoding_model("FalconForCausalLM", num_attention_heads=4)
    model.set_attn_implementation(implementation)
    with rope_patch.patch(model, method, factor=FACTOR, trained_length=TRAINED):
        got = token_logits(model, 100)
    own, scale = modeling_falcon.build_alibi_tensor, scale_of(method, 4).float()

    def scaled(mask, heads, dtype):
        alibi = own(mask, heads, dtype=dtype).view(len(mask), heads, 1, -1)
        return (alibi * scale[:, None, None]).view(-1, 1, mask.shape[1])

    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", scaled)
    torch.testing.assert_close(got, token_logits(model, 100), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", HEAD_FIELDS)
def test_alibi_in_a_cache_equals_one_forward(family):
    model = alibi_model(family)
    rope_patch.patch(model, "ntk", factor=FACTOR, trained_length=TRAINED)
    ids = torch.arange(10, 80)[None]
    cache = model(ids[:, :50], use_cache=True).past_key_values
    steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(50, 70)]
    expected = model(ids).logits[:, 50:]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", HEAD_FIELDS)
@pytest.mark.parametrize("formula", ["linear", "ntk"])
def test_dynamic_alibi_follows_the_text(family, formula):
    model = alibi_model(family)
    short = token_logits(model, TRAINED)
    with rope_patch.patch(model, f"dynamic-{formula}", trained_length=TRAINED) as handle:
        assert "any length" in handle.summary()
        assert torch.equal(token_logits(model, TRAINED), short)
        got = token_logits(model, 3 * TRAINED)
    with rope_patch.patch(model, formula, factor=3, trained_length=TRAINED):
        torch.testing.assert_close(got, token_logits(model, 3 * TRAINED), rtol=1e-5, atol=1e-6)
    assert torch.equal(token_logits(model, TRAINED), short)


# -- biases built from distances -------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, "whole", "left", "right", "holes"])
@pytest.mark.parametrize("method", ["ntk", "dynamic-linear"])
def test_both_forms_are_the_same_in_single_precision(padding, method):
    model = alibi_model("BloomForCausalLM")
    length = {} if method == "dynamic-linear" else {"factor": FACTOR}
    mask = None if padding is None else masks(160)[padding]
    logits = []
    for exact in (True, False, None):
        with rope_patch.patch(model, method, trained_length=TRAINED, exact=exact, **length):
            logits.append(model(IDS, attention_mask=mask).logits)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(logits[0][real], logits[1][real], rtol=1e-4, atol=1e-4)
    assert torch.equal(logits[1], logits[2])
    assert (logits[1] - model(IDS, attention_mask=mask).logits)[real].abs().max() > 0.1


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_exact_form_in_a_cache_equals_one_forward(kind):
    model = alibi_model("BloomForCausalLM")
    rope_patch.patch(model, "ntk", factor=FACTOR, trained_length=TRAINED, exact=True)
    mask = masks(160)["left"]
    cache = StaticCache(model.config, max_cache_len=180) if kind == "static" else None
    output, parts = None, []
    for start, stop in [(0, 60), (60, 150), *((i, i + 1) for i in range(150, 160))]:
        seen = mask[:, :stop]
        if kind == "static":  # its keys are as many as the cache has
            seen = torch.nn.functional.pad(seen, (0, 180 - stop), value=1)
        output = model(
            IDS[:, start:stop], attention_mask=seen, past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        parts.append(output.logits)
    expected = model(IDS, attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real], rtol=1e-4, atol=1e-4)


def handed_bias(model, mask, **arguments):
    """Return the bias that the first layer adds, `[B, heads, Q, K]`, under a patch."""
    seen = {}
    with rope_patch.patch(model, "ntk", trained_length=TRAINED, factor=FACTOR, **arguments):
        layer = model.transformer.h[0]
        hook = layer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
        )
        model(IDS.expand(2, -1)[:, : mask.shape[1]], attention_mask=mask)
        hook.remove()
    bias = seen["alibi"]
    return bias.view(2, HEADS, *bias.shape[1:])


def scaled_slopes():
    """Return the slopes that `ntk` gives, `[heads]`, in float64."""
    biases = modeling_bloom.build_alibi_tensor(torch.ones(1, 2), HEADS, torch.float32)
    return biases[:, 0, 1].double() * scale_of("ntk", HEADS)


@pytest.mark.parametrize(
    ("padding", "dtype"),
    [
        *((padding, torch.bfloat16) for padding in ("whole", "left", "right", "holes")),
        ("left", torch.float16),
    ],
)
def test_half_precision_gets_distances_rounded_once(padding, dtype):
    model, mask = alibi_model("BloomForCausalLM").to(dtype), masks(160)[padding]
    got = handed_bias(model, mask).double()
    position = (mask.cumsum(-1) - 1).double()
    distance = position[:, :, None] - position[:, None]
    visible = torch.ones(160, 160).tril().bool() & mask.bool()[:, None]
    expected = -scaled_slopes()[:, None, None] * distance[:, None]
    real = (visible & mask.bool()[:, :, None])[:, None].expand_as(expected)
    error = (got - expected)[real].abs() / expected[real].abs().clamp(min=1e-9)
    assert error.max() <= torch.finfo(dtype).eps / 2 * 1.01
    assert torch.equal(got[~visible[:, None].expand_as(got)].unique(), torch.zeros(1).double())


def test_bfloat16_tells_neighbours_apart_in_the_exact_form_alone():
    model = alibi_model("BloomForCausalLM").bfloat16()
    ids = IDS.repeat(1, 4)[:1]
    shares = []
    for exact in (False, True):
        layer, seen = model.transformer.h[0], {}
        with (
            rope_patch.patch(model, "linear", trained_length=320, factor=2, exact=exact),
            torch.no_grad(),
        ):
            hook = layer.register_forward_pre_hook(
                lambda module, args, kwargs, seen=seen: seen.update(kwargs), with_kwargs=True
            )
            model.transformer(ids)
            hook.remove()
        near = seen["alibi"][:, -1, -200:].float()
        shares.append((near.diff() == 0).double().mean().item())
    assert shares[0] > 0.5
    assert shares[1] == 0


def test_bfloat16_comes_closer_to_float64():
    exact, blurred = alibi_model("BloomForCausalLM"), alibi_model("BloomForCausalLM")
    for model in (exact, blurred):
        for name, parameter in model.named_parameters():
            if "query_key_value" in name:
                is_value = torch.arange(len(parameter)) % 36 >= 24  # heads of 12: q, k, v
                parameter.data[~is_value] *= 0.1  # positions decide where heads look
    truth = copy.deepcopy(exact).double()
    ids = IDS.repeat(1, 4)[:1]
    logits = []
    for model, choice in ((exact, True), (blurred, False)):
        rope_patch.patch(model.bfloat16(), "linear", trained_length=320, factor=2, exact=choice)
        logits.append(model(ids).logits.double())
    with rope_patch.patch(truth, "linear", trained_length=320, factor=2):
        expected = truth(ids).logits
    errors = [(got - expected)[:, -160:].square().mean().sqrt() for got in logits]
    assert errors[0] < errors[1] / 3


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["whole", "left"])
def test_falcon_equals_its_own_code_without_rounding(implementation, padding, monkeypatch):
    model, mask = alibi_model("FalconForCausalLM").double(), masks(160)[padding]
    model.set_attn_implementation(implementation)
    with rope_patch.patch(model, "ntk", factor=FACTOR, trained_length=TRAINED):
        got = model(IDS, attention_mask=mask).logits

    def unrounded(mask, heads, dtype):
        positions = ((mask.cumsum(-1) - 1) * mask)[:, None]
        return (scaled_slopes()[:, None] * positions).reshape(-1, 1, mask.shape[1]).to(dtype)

    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", unrounded)
    expected = model(IDS, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["BloomForCausalLM", "MptForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_slopes_follow_the_tokens_in_a_static_cache(family, dtype):
    model = alibi_model(family).to(dtype)
    with plain_transformers():
        model(IDS[:, :20], past_key_values=StaticCache(model.config, max_cache_len=120))
    rope_patch.patch(model, "dynamic-ntk", trained_length=TRAINED)
    for length in (20, 100):
        ids = IDS[:, :length]
        cache = StaticCache(model.config, max_cache_len=120)
        got = model(ids, past_key_values=cache, use_cache=True).logits
        expected = model(ids, use_cache=False).logits
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_dynamic_slopes_keep_the_bits_of_short_texts_in_half_precision():
    model = alibi_model("BloomForCausalLM").bfloat16()
    before = model(IDS[:, :TRAINED]).logits
    with rope_patch.patch(model, "dynamic-ntk", trained_length=TRAINED):
        assert torch.equal(model(IDS[:, :TRAINED]).logits, before)


def test_layers_share_a_bias_that_no_one_keeps():
    model = alibi_model("BloomForCausalLM").bfloat16()
    rope_patch.patch(model, "ntk", factor=FACTOR, trained_length=TRAINED)
    seen = []
    for layer in model.transformer.h:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["alibi"]), with_kwargs=True
        )
    model(IDS)
    assert len(seen) == 2
    assert seen[0] is seen[1]
    hook = next(iter(model.transformer.h[0]._forward_pre_hooks.values()))
    assert len(hook._memo.entries) == 0


def test_a_patched_model_is_copied_and_pickled():
    model = alibi_model("BloomForCausalLM")
    rope_patch.patch(model, "ntk", factor=FACTOR, trained_length=TRAINED, exact=True)
    expected = model(IDS).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(IDS).logits, expected)


@pytest.mark.usefixtures("reset_compiler")
@pytest.mark.parametrize(
    ("family", "method"), [("BloomForCausalLM", "ntk"), ("MptForCausalLM", "dynamic-linear")]
)
def test_compiled_graphs_stay_whole(family, method):
    model = alibi_model(family).bfloat16()
    length = {} if method == "dynamic-linear" else {"factor": FACTOR}
    rope_patch.patch(model, method, trained_length=TRAINED, **length)
    expected = model(IDS, use_cache=False).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(IDS, use_cache=False).logits, expected)


def assert_no_copies(model):
    model.to("meta")
    ids, mask = IDS.to("meta"), torch.ones_like(IDS, device="meta")
    model(ids, attention_mask=mask)  # what a device keeps from the first forward on
    with NoCopies():
        model(ids, attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["ntk", "dynamic-ntk"])
@pytest.mark.parametrize("family", HEAD_FIELDS)
def test_no_forward_waits_for_the_device(family, method, dtype):
    model = alibi_model(family).to(dtype)
    with plain_transformers():
        assert_no_copies(copy.deepcopy(model))
    length = {} if method == "dynamic-ntk" else {"factor": FACTOR}
    rope_patch.patch(model, method, trained_length=TRAINED, **length)
    assert_no_copies(model)
