"""Test that all kernels give the same logits and gradients."""

import copy

import pytest
import torch
import transformers
from helpers.reference_rerotation import Reference
from helpers.tiny_models import (
    MODELS,
    OLD_TRANSFORMERS,
    SHORT,
    SIZES,
    TRAINED,
    assert_close,
    assert_differs,
    make_model,
    padded,
    step_by_step,
    tokens,
)
from kernel_models import (
    FEW,
    NORMED,
    OTHERS,
    OURS,
    backward,
    deferred_norms,
    logits,
    modules_with_forward,
    patch,
)

import rope_patch
from rope_patch.patching.kernels.attention_forward import PatchedAttentionForward
from rope_patch.patching.kernels.deferred_norms import norm_spec_of

pytest.importorskip("triton")


@pytest.mark.parametrize("family", [*MODELS, *OTHERS])
def test_all_kernels_give_the_same_logits(family):
    model = make_model(family)
    plain, expected = logits(model), {}
    for kernels in ("hf", "auto", *OURS):
        handle = patch(model, kernels)
        expected[kernels] = logits(model)
        rotating_layers = 0 if kernels == "hf" else SIZES["num_hidden_layers"]
        assert len(modules_with_forward(model, PatchedAttentionForward)) == rotating_layers
        assert len(deferred_norms(model)) == (2 * rotating_layers if family in NORMED else 0)
        handle.undo()
        assert logits(model).equal(plain)
        assert not any("forward" in vars(module) for module in model.modules())
        assert not deferred_norms(model)
    assert_differs(expected["hf"], plain)
    assert expected["auto"].equal(expected["hf"])  # to the bit on a CPU, in float32
    for kernels in OURS:
        assert_close(expected[kernels], expected["hf"])


@pytest.mark.parametrize("family", ["llama", "glm", *NORMED])
def test_all_kernels_give_the_same_gradients(family):
    model = make_model(family)
    gradients = {}
    for kernels in ("hf", "auto", *OURS):
        with patch(model, kernels):
            gradients[kernels] = backward(model)
    for kernels in ("auto", *OURS):
        for got, expected in zip(gradients[kernels], gradients["hf"], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_launch_per_layer_and_direction(family, launch_counts):
    model = make_model(family)
    patch(model, "triton")
    backward(model)
    layers = SIZES["num_hidden_layers"]
    if family == "llama":
        assert (launch_counts.rope, launch_counts.norm, launch_counts.backward) == (
            2 * layers,
            0,
            0,
        )
    else:
        assert (launch_counts.rope, launch_counts.norm, launch_counts.backward) == (
            0,
            layers,
            layers,
        )


def test_models_that_rotate_queries_and_keys_separately(launch_counts):
    config = transformers.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 32},
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    config.intermediate_size = [96] * 4
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).eval()
    with patch(model, "hf"):
        expected = logits(model)
    for kernels in ("auto", *OURS):
        with patch(model, kernels):
            assert len(modules_with_forward(model, PatchedAttentionForward)) == 4
            assert_close(logits(model), expected)
    # The last two layers share other layers' keys; older transformers rotate these again.
    assert launch_counts.rope == 4 + (4 if OLD_TRANSFORMERS else 2)


@pytest.mark.parametrize(
    ("kernels", "family"),
    [
        *(("reference", family) for family in ("llama", "qwen3", "gemma3", "phi3")),
        ("triton", "llama"),
        # Interpreted, they take half a minute each.
        *(pytest.param("triton", f, marks=pytest.mark.slow) for f in ("qwen3", "gemma3", "phi3")),
    ],
)
def test_decoding_matches_rotating_all_keys_afresh(kernels, family):
    model = make_model(family)
    end = TRAINED + (30 if kernels == "triton" else 160)
    ids, start = tokens(end), TRAINED - 20 if kernels == "triton" else SHORT
    reference = Reference(model, "dynamic-yarn")
    patch(model, kernels, "dynamic-yarn")
    assert_close(step_by_step(model, ids, start), reference.decode(ids, start))


@pytest.mark.parametrize("kernels", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_rows_of_different_lengths_have_separate_frequencies(kernels):
    model = make_model("qwen3")
    rows = [tokens(length, seed=length) for length in (10, TRAINED + 20)]
    ids, mask = padded(rows, "left")
    patch(model, kernels, "dynamic-yarn")
    with torch.no_grad():
        batch = model(input_ids=ids, attention_mask=mask).logits
        for i, row in enumerate(rows):
            single = model(input_ids=row).logits
            assert_close(batch[i : i + 1, -row.shape[1] :], single)


def test_frequencies_are_packed_once_while_they_stay(monkeypatch):
    from rope_patch.patching.kernels import position_passthrough

    calls = []
    original = position_passthrough.pack_frequencies
    monkeypatch.setattr(
        position_passthrough, "pack_frequencies", lambda *a: calls.append(1) or original(*a)
    )
    model = make_model()
    patch(model, "reference")
    step_by_step(model, tokens(SHORT + 6), SHORT)
    assert len(calls) == 1


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
@pytest.mark.parametrize("kernels", ["auto", *OURS])
def test_training_works_after_inference_mode(kernels, method):
    model = make_model("qwen3")
    patch(model, kernels, method)
    expected = backward(copy.deepcopy(model))
    with torch.inference_mode():
        model(input_ids=tokens(12))
    for got, e in zip(backward(model), expected, strict=True):
        torch.testing.assert_close(got, e)


def test_patch_works_under_another_default_device():
    with torch.device("meta"):
        model = make_model("qwen3")
        norm_spec_of.__globals__["_probe_norm"].cache_clear()
        patch(model, "reference")
    assert deferred_norms(model)


@pytest.mark.parametrize("kernels", OURS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_is_as_exact_as_transformers(family, kernels):
    if kernels == "triton":
        pytest.skip("the interpreter truncates where a GPU rounds")
    model = make_model(family)
    patch(model, "hf")
    truth = copy.deepcopy(model).double()
    expected = logits(truth)
    model = model.bfloat16()
    errors = {}
    for choice in ("hf", kernels):
        patch(model, choice)
        errors[choice] = (logits(model).double() - expected).norm()
    assert errors[kernels] < 1.02 * errors["hf"]


@pytest.mark.parametrize("kernels", OURS)
def test_mixed_precision_and_casting_leave_positions_exact(kernels):
    model = make_model()
    patch(model, kernels)
    expected = logits(model)
    with torch.autocast("cpu", torch.bfloat16):
        got = logits(model)
    assert 0 < (got.float() - expected).abs().max() < 0.5
    x, positions = torch.zeros(1, FEW, 1), torch.arange(FEW)[None]
    before = model.model.rotary_emb(x, positions)
    after = model.bfloat16().model.rotary_emb(x.bfloat16(), positions)
    assert before[0].equal(after[0])
    assert before[1].equal(after[1])


@pytest.mark.parametrize("kernels", OURS)
def test_far_positions_are_exact(kernels):
    """Shift all positions by 10M: logits stay, while transformers' angles err by half a radian."""
    model = make_model()
    patch(model, kernels)
    ids, near = tokens(16), torch.arange(16)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=near).logits
        assert_close(model(input_ids=ids, position_ids=near + 10_000_000).logits, expected)
        rope_patch.patch(model, "yarn", factor=4, kernels="hf")
        native = model(input_ids=ids, position_ids=near + 10_000_000).logits
    assert_differs(native, expected)
