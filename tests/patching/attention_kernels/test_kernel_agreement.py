"""Test that all kernels give the same logits and gradients, compiled too, and what they refuse."""

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
    make_other,
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
    patch,
    patched_attentions,
    saved_bytes,
)

import rope_patch

pytest.importorskip("triton")

# One family for each way in which Triton's kernels rotate: alone, with norms of heads or across
# them, with an offset on the weight; halves, neighbours, and parts of heads.
INTERPRETED = ["llama", "qwen3", "gemma3", "olmo2", "cohere", "glm", "stablelm"]


def one_layer(family):
    kinds = {"layer_types": ["full_attention"]} if family == "gemma3" else {}
    return make_model(family, num_hidden_layers=1, **kinds)


@pytest.mark.parametrize("family", [*MODELS, *OTHERS])
def test_all_kernels_give_the_same_logits(family):
    model = make_model(family)
    plain, results = logits(model), {}
    for kernels in ("hf", "auto", *OURS[: 2 if family in INTERPRETED else 1]):
        handle = patch(model, kernels)
        results[kernels] = logits(model)
        rotating_layers = 0 if kernels == "hf" else SIZES["num_hidden_layers"]
        assert len(patched_attentions(model)) == rotating_layers
        assert len(deferred_norms(model)) == (2 * rotating_layers if family in NORMED else 0)
        handle.undo()
        assert logits(model).equal(plain)
        assert not any("forward" in vars(module) for module in model.modules())
        assert not deferred_norms(model)
    expected = results.pop("hf")
    assert_differs(expected, plain)
    assert results.pop("auto").equal(expected)  # to the bit on a CPU, in float32
    for got in results.values():
        assert_close(got, expected)


@pytest.mark.parametrize("family", ["llama", "glm", "qwen3", "gemma3", "olmo2"])
def test_all_kernels_give_the_same_gradients(family):
    model = one_layer(family)
    gradients = {}
    for kernels in ("hf", "auto", *OURS):
        with patch(model, kernels):
            gradients[kernels] = backward(model)
    expected = gradients.pop("hf")
    for each in gradients.values():
        for got, truth in zip(each, expected, strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("family", "per_layer"), [("llama", (2, 0, 0)), ("qwen3", (0, 1, 1))])
def test_one_launch_per_layer_and_direction(family, per_layer, launch_counts):
    model = make_model(family, num_hidden_layers=1)
    patch(model, "triton")
    backward(model, length=2)
    assert (launch_counts.rope, launch_counts.norm, launch_counts.backward) == per_layer


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
            assert len(patched_attentions(model)) == 4
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
    """Frequencies grow at 65 and 77 tokens, or at 9, 10 and 12."""
    trained, start, end = (8, 6, 12) if kernels == "triton" else (TRAINED, TRAINED - 2, 78)
    lengths = {"max_position_embeddings": trained}
    if family == "phi3":
        lengths["original_max_position_embeddings"] = trained
    model = make_model(family, **lengths)
    ids, reference = tokens(end), Reference(model, "dynamic-yarn")
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
    calls, original = [], rope_patch.ops.pack_frequencies
    monkeypatch.setattr(
        "rope_patch.patching.kernels.attention_forward.pack_frequencies",
        lambda *a: calls.append(1) or original(*a),
    )
    model = make_model()
    patch(model, "reference")
    step_by_step(model, tokens(SHORT + 6), SHORT)
    assert len(calls) == 1


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
@pytest.mark.parametrize("kernels", ["auto", *OURS])
def test_training_works_after_inference_mode(kernels, method):
    model = make_model("qwen3", num_hidden_layers=1)
    patch(model, kernels, method)
    expected = backward(copy.deepcopy(model))
    with torch.inference_mode():
        model(input_ids=tokens(6))
    for got, e in zip(backward(model), expected, strict=True):
        torch.testing.assert_close(got, e)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_is_as_exact_as_transformers(family):
    """Not by Triton here: its interpreter truncates where a GPU rounds."""
    model, ids = make_model(family), tokens(20)
    patch(model, "hf")
    truth = copy.deepcopy(model).double()
    with torch.no_grad():
        expected = truth(ids).logits
        model, errors = model.bfloat16(), {}
        for choice in ("hf", "reference"):
            patch(model, choice)
            errors[choice] = (model(ids).logits.double() - expected).norm()
    assert errors["reference"] < 1.02 * errors["hf"]


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
    ids, near = tokens(FEW), torch.arange(FEW)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=near).logits
        assert_close(model(input_ids=ids, position_ids=near + 10_000_000).logits, expected)
        rope_patch.patch(model, "yarn", factor=4, kernels="hf")
        native = model(input_ids=ids, position_ids=near + 10_000_000).logits
    assert_differs(native, expected)


# -- compiled graphs -------------------------------------------------------------------------------


@pytest.mark.usefixtures("reset_compiler")
@pytest.mark.parametrize(
    ("kernels", "family", "operator"),
    [
        ("auto", "qwen3", None),
        ("reference", "qwen3", None),
        ("triton", "llama", "rope"),
        ("triton", "gemma3", "qk_norm_rope"),
        pytest.param("auto", "gemma3", None, marks=pytest.mark.slow),
        pytest.param("reference", "gemma3", None, marks=pytest.mark.slow),
        pytest.param("triton", "olmo2", "qk_norm_rope", marks=pytest.mark.slow),
    ],
)
def test_compiled_models_are_one_graph(kernels, family, operator):
    """It has our operator only on request."""
    model, names = one_layer(family), []

    def backend(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        kind = "eager" if operator is None else "aot_eager"  # which traces operators, too
        return torch._dynamo.lookup_backend(kind)(graph, inputs)

    patch(model, kernels)
    expected = logits(model)
    assert_close(logits(torch.compile(model, fullgraph=True, backend=backend)), expected)
    ours = [name for name in names if "rope_patch" in name]
    assert len(ours) == (operator is not None)
    assert all(f"rope_patch.{operator}" in name for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_inductor_saves_as_little_for_transformers_code_as_for_our_operator(family):
    """Check why compiled graphs keep transformers' code: beside attention it saves only x."""
    saved = {}
    for kernels in ("hf", "triton"):
        torch._dynamo.reset()
        model = make_model(family)
        patch(model, kernels)
        attention = model.model.layers[0].self_attn
        kind = "full_attention" if family == "gemma3" else None
        x = torch.randn(1, 32, SIZES["hidden_size"])
        positions = torch.arange(32)[None]
        arguments = (x, positions) if kind is None else (x, positions, kind)
        compiled = torch.compile(attention, fullgraph=True)
        with torch.no_grad():
            pair = model.model.rotary_emb(*arguments)
        saved[kernels] = saved_bytes(lambda c=compiled, x=x, p=pair: c(x, p, None)[0])
    torch._dynamo.reset()
    tables = 2 * 32 * SIZES["head_dim"] * 4  # cos and sin, which all layers share
    assert saved["hf"] <= saved["triton"] + tables


# -- what kernels refuse ---------------------------------------------------------------------------


def deepseek():
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return make_other("DeepseekV3", first_k_dense_replace=2, **dict.fromkeys(names, 16))


def qwen2_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLTextConfig(**SIZES, rope_parameters=rope)
    return transformers.Qwen2VLTextModel(config).eval()


@pytest.mark.parametrize(
    ("make", "kernels", "fact"),
    [
        (deepseek, "triton", "DeepseekV3Attention uses cos and sin"),
        (qwen2_vl, "reference", 'kernels="reference"'),
    ],
)
def test_models_whose_rotation_is_their_own_are_refused_on_request(make, kernels, fact):
    model = make()
    with pytest.raises(ValueError, match=fact):
        patch(model, kernels)
    assert rope_patch.current(model) is None
    handle = patch(model, "auto")
    assert "forward" not in vars(model.base_model.rotary_emb)
    if make is deepseek:
        assert not patched_attentions(model)
        assert "transformers' own rotation (DeepseekV3Attention uses" in handle.summary()


def test_triton_on_a_cpu_error_names_the_next_step(monkeypatch):
    model = make_model()
    patch(model, "triton")
    monkeypatch.setattr("rope_patch.ops.dispatch.is_interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"GPU, got cpu.*auto"):
        logits(model)


def test_missing_triton_is_an_error_only_on_request(monkeypatch):
    monkeypatch.setattr(
        "rope_patch.patching.kernels.eligibility.triton_unavailable_reason",
        lambda: "Triton is gone",
    )
    model = make_model()
    with pytest.raises(ValueError, match=r"triton is gone.*'\.\[kernels\]'"):
        patch(model, "triton")
    patch(model, "auto")
    logits(model)
