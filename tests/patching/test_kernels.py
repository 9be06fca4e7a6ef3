"""Who rotates a patched model: the same logits and gradients, whoever it is."""

import copy
import importlib
import pickle
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from tiny_models import (
    MODELS,
    OLD_TRANSFORMERS,
    SHORT,
    SIZES,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    make_model,
    padded,
    step_by_step,
    tokens,
)
from torch import nn
from unrotated import Reference

import rope_patch
from rope_patch import ops
from rope_patch.patching.kernels.attention_forward import (
    DeferredNorm,
    PatchedAttentionForward,
    norm_spec_of,
)
from rope_patch.patching.kernels.position_passthrough import PositionPassthrough

pytest.importorskip("triton")

OURS = ["reference", "triton"]
FEW = 20  # tokens: the interpreter takes its time

# Beside the families of all tests: norms across heads, experts, neighbours, parts of heads, layers
# that do not rotate. Olmo 3's long layers have a rotary module of their own kind.
OTHERS = {
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    ),
    "cohere": ("CohereConfig", "CohereForCausalLM", {}),
    "glm": ("GlmConfig", "GlmForCausalLM", {}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    ),
}
NORMED = ["qwen3", "gemma3", "olmo2", "olmo3", "qwen3_moe"]


@pytest.fixture(autouse=True)
def others(monkeypatch):
    for name, model in OTHERS.items():
        monkeypatch.setitem(MODELS, name, model)


def logits(model):
    return forward(model, tokens(FEW))


def parts(model, kind):
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), kind)]


def patch(model, kernels, method="yarn", **options):
    options = options or ({} if method.startswith("dynamic") else {"factor": 4})
    return rope_patch.patch(model, method, kernels=kernels, **options)


def backward(model, length=12):
    """A loss's gradients of every parameter."""
    ids = tokens(length)
    loss = model(input_ids=ids, labels=ids).loss
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.fixture
def counted(monkeypatch):
    """How often each launcher was called."""
    counts = SimpleNamespace(rope=0, norm=0, backward=0)

    def count(module, function, name):
        module = importlib.import_module(f"rope_patch.ops.kernels.{module}")
        own = getattr(module, function)

        def counting(*args, **kwargs):
            setattr(counts, name, getattr(counts, name) + 1)
            return own(*args, **kwargs)

        monkeypatch.setattr(module, function, counting)

    count("rope", "rope", "rope")
    count("qk_norm_rope", "forward", "norm")
    count("qk_norm_rope", "backward", "backward")
    return counts


# -- the same model --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*MODELS, *OTHERS])
def test_all_kernels_rotate_alike(family):
    model = make_model(family)
    plain, expected = logits(model), {}
    for kernels in ("hf", "auto", *OURS):
        handle = patch(model, kernels)
        expected[kernels] = logits(model)
        rotating = 0 if kernels == "hf" else SIZES["num_hidden_layers"]
        assert len(parts(model, PatchedAttentionForward)) == rotating
        assert len(parts(model, DeferredNorm)) == (2 * rotating if family in NORMED else 0)
        handle.undo()
        assert logits(model).equal(plain)
        assert not any("forward" in vars(module) for module in model.modules())
    assert_differs(expected["hf"], plain)
    assert expected["auto"].equal(expected["hf"])  # to the bit on a CPU, in float32
    for kernels in OURS:
        assert_close(expected[kernels], expected["hf"])


@pytest.mark.parametrize("family", ["llama", "glm", *NORMED])
def test_gradients_are_alike(family):
    model = make_model(family)
    found = {}
    for kernels in ("hf", "auto", *OURS):
        with patch(model, kernels):
            found[kernels] = backward(model)
    for kernels in ("auto", *OURS):
        for got, expected in zip(found[kernels], found["hf"], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_launch_a_layer_each_way(family, counted):
    model = make_model(family)
    patch(model, "triton")
    backward(model)
    layers = SIZES["num_hidden_layers"]
    if family == "llama":
        assert (counted.rope, counted.norm, counted.backward) == (2 * layers, 0, 0)
    else:
        assert (counted.rope, counted.norm, counted.backward) == (0, layers, layers)


def test_queries_alone_where_a_model_rotates_one_tensor_at_a_time(counted):
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
            assert len(parts(model, PatchedAttentionForward)) == 4
            assert_close(logits(model), expected)
    # The last two layers share the keys of others; older transformers rotate them all the same.
    assert counted.rope == 4 + (4 if OLD_TRANSFORMERS else 2)


# -- with frequencies that follow the sequence -----------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "family"),
    [
        *(("reference", family) for family in ("llama", "qwen3", "gemma3", "phi3")),
        ("triton", "llama"),
        # Interpreted, they take half a minute each.
        *(pytest.param("triton", f, marks=pytest.mark.slow) for f in ("qwen3", "gemma3", "phi3")),
    ],
)
def test_decoding_is_as_if_all_keys_were_rotated_afresh(kernels, family):
    model = make_model(family)
    end = TRAINED + (30 if kernels == "triton" else 160)
    ids, start = tokens(end), TRAINED - 20 if kernels == "triton" else SHORT
    reference = Reference(model, "dynamic-yarn")
    patch(model, kernels, "dynamic-yarn")
    assert_close(step_by_step(model, ids, start), reference.decode(ids, start))


@pytest.mark.parametrize("kernels", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_rows_of_different_lengths_have_frequencies_of_their_own(kernels):
    model = make_model("qwen3")
    rows = [tokens(length, seed=length) for length in (10, TRAINED + 20)]
    ids, mask = padded(rows, "left")
    patch(model, kernels, "dynamic-yarn")
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask).logits
        for i, row in enumerate(rows):
            alone = model(input_ids=row).logits
            assert_close(together[i : i + 1, -row.shape[1] :], alone)


def test_turns_are_made_once_while_frequencies_stay(monkeypatch):
    from rope_patch.patching.kernels import position_passthrough

    made = []
    own = position_passthrough.pack_frequencies
    monkeypatch.setattr(
        position_passthrough, "pack_frequencies", lambda *a: made.append(1) or own(*a)
    )
    model = make_model()
    patch(model, "reference")
    step_by_step(model, tokens(SHORT + 6), SHORT)
    assert len(made) == 1


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
@pytest.mark.parametrize("kernels", ["auto", *OURS])
def test_inference_mode_leaves_nothing_that_training_trips_over(kernels, method):
    model = make_model("qwen3")
    patch(model, kernels, method)
    expected = backward(copy.deepcopy(model))
    with torch.inference_mode():
        model(input_ids=tokens(12))
    for got, e in zip(backward(model), expected, strict=True):
        torch.testing.assert_close(got, e)


def test_patching_while_another_device_is_the_default():
    with torch.device("meta"):
        model = make_model("qwen3")
        norm_spec_of.__globals__["_probe_norm"].cache_clear()
        patch(model, "reference")
    assert parts(model, DeferredNorm)


# -- what is kept for the backward pass ------------------------------------------------------------


@pytest.mark.parametrize(("family", "less"), [("qwen3", 2), ("gemma3", 3)])
def test_normed_models_keep_less(family, less):
    """In units of queries and keys: eager transformers keeps 3 and 4, ours 1 and their norms."""
    model = make_model(family).bfloat16()
    kept = {}
    for kernels in ("hf", "triton"):
        with patch(model, kernels):
            kept[kernels] = saved_by(lambda: model(input_ids=tokens(FEW)).logits)
    heads = SIZES["num_attention_heads"] + SIZES["num_key_value_heads"]
    unit = SIZES["num_hidden_layers"] * heads * SIZES["head_dim"] * FEW * 2
    assert (kept["hf"] - kept["triton"]) / unit > less - 0.25


def saved_by(call):
    """Bytes of all storages that are kept for the backward pass."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    assert out.requires_grad
    return sum(size for _, size in storages.values())


# -- with what people put around a model -----------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", *OURS])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_stand_on_their_own(duplicate, family, kernels):
    model = make_model(family)
    plain = logits(model)
    patch(model, kernels)
    expected = logits(model)
    other = duplicate(model)
    rope_patch.unpatch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert logits(other).equal(expected)
    assert all(vars(m)["forward"].module is m for m in parts(other, PatchedAttentionForward))
    rope_patch.unpatch(other)
    assert logits(other).equal(plain)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kernels", OURS)
def test_norms_that_peft_trains_are_the_ones_that_norm(kernels, when):
    def adapt(model):
        return peft.get_peft_model(
            model,
            peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["q_norm", "k_norm"]),
        )

    expected = make_model("qwen3")
    model = make_model("qwen3")
    if when == "before":
        adapted = adapt(model)
        patch(adapted, kernels)
    else:
        patch(model, kernels)
        adapted = adapt(model)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
        for module in expected.modules():
            for name in ("q_norm", "k_norm"):
                if hasattr(module, name):
                    getattr(module, name).weight.mul_(1.5)
    patch(expected, "hf")
    torch.testing.assert_close(logits(adapted), logits(expected), rtol=0, atol=5e-5)


@pytest.mark.parametrize("kernels", ["auto", *OURS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerates_hooks_stay_around_the_forward(when, kernels):
    model = make_model("qwen3")
    plain, calls = logits(model), []

    class Noting(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(type(module).__name__)
            return args, kwargs

    def hook():
        for layer in model.model.layers:
            add_hook_to_module(layer.self_attn, Noting())
            add_hook_to_module(layer.self_attn.q_norm, Noting())
        add_hook_to_module(model.model.rotary_emb, Noting())

    with patch(model, "hf"):
        expected = logits(model)
    if when == "before":
        hook()
    handle = patch(model, kernels)
    if when == "after":
        hook()
    assert_close(logits(model), expected)
    assert len(calls) == 2 * 2 + 1
    handle.undo()
    calls.clear()
    assert logits(model).equal(plain)
    assert len(calls) == 2 * 2 + 1
    for module in model.modules():
        remove_hook_from_module(module)
    assert logits(model).equal(plain)


@pytest.mark.parametrize("kernels", ["auto", *OURS])
def test_modules_whose_class_was_derived_in_place(kernels):
    """As FSDP2 does to what it shards."""
    model = make_model("qwen3")
    with patch(model, "hf"):
        expected = logits(model)
    for layer in model.model.layers:
        for module in (layer, layer.self_attn):
            module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    patch(model, kernels)
    assert len(parts(model, PatchedAttentionForward)) == SIZES["num_hidden_layers"]
    assert_close(logits(model), expected)


def test_hooks_on_a_norm_see_its_own_output():
    model = make_model("qwen3")
    norm = model.model.layers[0].self_attn.q_norm
    expected, seen = [], []
    with patch(model, "hf"):
        handle = norm.register_forward_hook(lambda m, a, out: expected.append(out))
        logits(model)
        handle.remove()
    with patch(model, "reference"):
        norm.register_forward_hook(lambda m, a, out: seen.append(out))
        logits(model)
    assert_close(seen[0], expected[0])


@pytest.mark.parametrize(
    ("kernels", "family"),
    [
        *(("reference", family) for family in ("llama", "qwen3")),
        ("triton", "llama"),
        pytest.param("triton", "qwen3", marks=pytest.mark.slow),
    ],
)
def test_gradients_when_activations_are_computed_again(kernels, family):
    model = make_model(family)
    patch(model, kernels)
    expected = backward(model.train())
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        for got, e in zip(backward_all(model), expected, strict=True):
            torch.testing.assert_close(got, e, rtol=1e-5, atol=1e-7)


def backward_all(model, length=12):
    """`backward` for reentrant checkpoints, which only know `.backward()`."""
    model.zero_grad()
    model(input_ids=tokens(length), labels=tokens(length)).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2"])
@pytest.mark.parametrize("kernels", ["auto", *OURS])
def test_compiled_models_are_one_graph(kernels, family):
    model = make_model(family)
    patch(model, kernels)
    expected = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(logits(compiled), expected)
    torch._dynamo.reset()


def test_compiled_graphs_keep_transformers_code_unless_kernels_are_demanded():
    for kernels, calls in (("auto", 0), ("triton", SIZES["num_hidden_layers"])):
        torch._dynamo.reset()
        model, graphs = make_model("qwen3"), []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        patch(model, kernels)
        logits(torch.compile(model, fullgraph=True, backend=backend))
        called = [str(n.target) for graph in graphs for n in graph.graph.nodes]
        assert sum("rope_patch.qk_norm_rope" in name for name in called) == calls
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_inductor_keeps_as_little_of_transformers_code_as_our_operator(family):
    """Why compiled graphs keep that code: what is kept beyond attention's own is x, once."""
    kept = {}
    for kernels in ("hf", "triton"):
        torch._dynamo.reset()
        model = make_model(family)
        patch(model, kernels)
        attention = model.model.layers[0].self_attn
        kind = "full_attention" if family == "gemma3" else None
        x = torch.randn(1, 32, SIZES["hidden_size"])
        positions = torch.arange(32)[None]
        given = (x, positions) if kind is None else (x, positions, kind)
        compiled = torch.compile(attention, fullgraph=True)
        with torch.no_grad():
            pair = model.model.rotary_emb(*given)
        kept[kernels] = saved_by(lambda c=compiled, x=x, p=pair: c(x, p, None)[0])
    torch._dynamo.reset()
    tables = 2 * 32 * SIZES["head_dim"] * 4  # cos and sin, which all layers share
    assert kept["hf"] <= kept["triton"] + tables


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", OURS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_is_nearer_to_the_truth_than_transformers(family, kernels):
    if kernels == "triton":
        pytest.skip("the interpreter truncates where a GPU rounds")
    model = make_model(family)
    patch(model, "hf")
    truth = copy.deepcopy(model).double()
    expected = logits(truth)
    model = model.bfloat16()
    away = {}
    for which in ("hf", kernels):
        patch(model, which)
        away[which] = (logits(model).double() - expected).norm()
    assert away[kernels] < 1.02 * away["hf"]


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
    """transformers' angles are off by half a radian at 10M tokens; only differences matter."""
    model = make_model()
    patch(model, kernels)
    ids, near = tokens(16), torch.arange(16)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=near).logits
        assert_close(model(input_ids=ids, position_ids=near + 10_000_000).logits, expected)
        rope_patch.patch(model, "yarn", factor=4, kernels="hf")
        theirs = model(input_ids=ids, position_ids=near + 10_000_000).logits
    assert_differs(theirs, expected)


# -- what is refused -------------------------------------------------------------------------------


def test_a_model_that_uses_cos_and_sin_itself_keeps_its_rotation():
    config = transformers.DeepseekV3Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        first_k_dense_replace=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"DeepseekV3Attention uses cos and sin in a way of its"):
        patch(model, "triton")
    assert rope_patch.current(model) is None
    patch(model, "auto")
    assert not parts(model, PatchedAttentionForward)
    summary = rope_patch.current(model).summary()
    assert "transformers' own rotation (DeepseekV3Attention uses" in summary


def test_several_positions_a_token_keep_cos_and_sin():
    config = transformers.Qwen2VLTextConfig(
        **SIZES,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )
    model = transformers.Qwen2VLTextModel(config).eval()
    with pytest.raises(ValueError, match='kernels="reference" cannot rotate this model'):
        patch(model, "reference")
    patch(model, "auto")
    assert not parts(model, PositionPassthrough)


def test_unknown_kernels_name_the_known_ones():
    with pytest.raises(ValueError, match="one of auto, reference, triton, hf, got 'cuda'"):
        patch(make_model(), "cuda")


def test_triton_on_a_cpu_says_what_to_do(monkeypatch):
    model = make_model()
    patch(model, "triton")
    monkeypatch.setattr("rope_patch.ops.dispatch.is_interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"needs tensors on a GPU, got cpu.*auto"):
        logits(model)


def test_without_triton_only_a_demand_is_an_error(monkeypatch):
    monkeypatch.setattr(
        "rope_patch.patching.kernels.eligibility.triton_unavailable_reason",
        lambda: "Triton is gone",
    )
    model = make_model()
    with pytest.raises(ValueError, match=r"triton is gone.*pip install 'rope-patch\[kernels\]'"):
        patch(model, "triton")
    patch(model, "auto")
    logits(model)


@pytest.mark.parametrize(
    ("kind", "offset"),
    [("qwen3.Qwen3RMSNorm", 0.0), ("llama.LlamaRMSNorm", 0.0), ("olmo2.Olmo2RMSNorm", 0.0),
     ("gemma3.Gemma3RMSNorm", 1.0), ("qwen3_next.Qwen3NextRMSNorm", 1.0)],
)  # fmt: skip
def test_norms_are_known_by_what_they_compute(kind, offset):
    model, name = kind.split(".")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    assert norm_spec_of(getattr(module, name)).offset == offset


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.Identity, nn.Linear])
def test_other_modules_are_no_norms_of_ours(kind):
    assert norm_spec_of(kind) is None


def test_nothing_is_left_of_a_failed_patch(monkeypatch):
    model = make_model("qwen3")
    before = logits(model)
    monkeypatch.setattr(
        "rope_patch.patching.kernels.eligibility.PositionPassthrough",
        lambda *a: (_ for _ in ()).throw(KeyError()),
    )
    with pytest.raises(KeyError):
        patch(model, "reference")
    assert logits(model).equal(before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert ops.KERNELS == ("auto", "reference", "triton", "hf")
