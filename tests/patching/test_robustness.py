"""Test patched models in generation, compiled, offloaded, on meta, adapted, in modes of torch."""

import copy
import cProfile

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    logits,
    make_config,
    make_generator,
    make_model,
    tokens,
)
from torch.autograd import forward_ad

import rope_patch

LONGROPE = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}


def generate(model, ids, new, **kwargs):
    """Return greedy tokens `[B, new]` and their logits `[new, B, vocab]`."""
    kwargs |= {"max_new_tokens": new, "do_sample": False}
    output = model.generate(ids, output_logits=True, return_dict_in_generate=True, **kwargs)
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits)


@pytest.mark.parametrize(
    ("family", "method", "options", "length"),
    [
        ("llama", "yarn", {}, TRAINED - 3),
        # Its sets of frequencies change at the trained length, where old hidden states do not.
        *(
            (family, "longrope", LONGROPE, length)
            for family in ("llama", "gemma3")
            for length in (SHORT, TRAINED + 10)
        ),
    ],
)
def test_cache_does_not_change_generation(family, method, options, length):
    model, ids = make_generator(family), tokens(length)
    _, unpatched = generate(model, ids, 1)
    rope_patch.patch(model, method, factor=4, **options)
    assert_differs(generate(model, ids, 1)[1], unpatched)
    cached, cached_logits = generate(model, ids, 8, use_cache=True)
    uncached, uncached_logits = generate(model, ids, 8, use_cache=False)
    assert cached.shape == (1, 8)
    assert cached.equal(uncached)
    torch.testing.assert_close(cached_logits, uncached_logits, rtol=0, atol=1e-3)


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="eager", dynamic=False)


LAYERS = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes", "method", "options", "lengths"),
    [
        pytest.param("llama", LAYERS, "yarn", {}, (LONG,), marks=pytest.mark.slow),
        ("llama", LAYERS, "longrope", LONGROPE, (LONG,)),
        pytest.param("llama", LAYERS, "longrope", LONGROPE, (LONG, SHORT), marks=pytest.mark.slow),
        pytest.param("gemma3", {}, "dynamic-yarn", {}, (LONG, SHORT), marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("reset_compiler")
def test_compile_before_or_after_patch(family, changes, method, options, lengths):
    model, reference = make_model(family, **changes), make_model(family, **changes)
    plain = logits(reference)
    before = compiled(model)
    assert_close(logits(before), plain)

    rope_patch.patch(reference, method, factor=4, **options)
    handle = rope_patch.patch(model, method, factor=4, **options)
    for length in lengths:
        assert_close(logits(before, length), logits(reference, length))
    handle.undo()
    assert_close(logits(before), plain)

    rope_patch.patch(before, method, factor=4, **options)  # through the wrapper
    assert_close(logits(compiled(model)), logits(reference))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_offloaded_model_matches_the_loaded_one(family, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    plain = logits(model)
    rope_patch.patch(model, "yarn", factor=4)
    offloaded = rope_patch.load(
        tmp_path / "model",
        "yarn",
        factor=4,
        device_map="auto",
        max_memory={"cpu": "220KB"},  # of about 310
        offload_folder=tmp_path / "offload",
    )
    assert {"cpu", "disk"} <= {str(device) for device in offloaded.hf_device_map.values()}
    assert_close(logits(offloaded), logits(model))
    assert generate(offloaded, tokens(60), 8)[0].equal(generate(model, tokens(60), 8)[0])
    rope_patch.unpatch(offloaded)
    assert logits(offloaded).equal(plain)


@pytest.fixture(scope="module")
def llama_1b():
    """Return Llama 3.2 1B without weights."""
    config = transformers.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def test_patch_of_a_1b_model_makes_few_calls(llama_1b):
    """Count calls of functions, some 90,000 or 20 ms, because times depend on the machine."""
    rope_patch.patch(llama_1b, "yarn", factor=4).undo()  # what is asked once of a class
    profile = cProfile.Profile()
    profile.runcall(rope_patch.patch, llama_1b, "yarn", factor=4).undo()
    assert 0 < sum(entry.callcount for entry in profile.getstats()) < 200_000


def test_buffers_do_not_grow_with_the_length(llama_1b):
    def buffers():
        return {name: (b.shape, b.dtype) for name, b in llama_1b.named_buffers()}

    before = buffers()
    pairs = llama_1b.config.head_dim // 2
    for method, options in [("yarn", {}), ("longrope", {"long_factor": [4.0] * pairs})]:
        handle = rope_patch.patch(llama_1b, method, length=2**24, anyway=True, **options)
        assert buffers() == before
        assert handle.frequencies[None].inv_freq.shape == (pairs,)
        handle.undo()
        assert buffers() == before


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_meta_model_has_exact_frequencies_after_to_empty(family):
    real = make_model(family)
    plain = logits(real)
    with torch.device("meta"):
        empty = make_model(family)
    rope_patch.patch(empty, "yarn", factor=4)
    assert all(buffer.is_meta for buffer in empty.buffers())
    empty.to_empty(device="cpu").load_state_dict(real.state_dict())

    def live(model):
        named_buffers = model.model.rotary_emb.named_buffers()
        return {name: b for name, b in named_buffers if "original" not in name}

    def assert_same_frequencies():
        assert live(empty).keys() == live(real).keys()
        assert all(live(empty)[name].equal(buffer) for name, buffer in live(real).items())

    with rope_patch.patch(real, "yarn", factor=4):
        assert_same_frequencies()
        if family == "llama":  # Gemma's embeddings have a buffer of their own, which is lost
            assert logits(empty).equal(logits(real))
    rope_patch.unpatch(empty)
    assert_same_frequencies()
    if family == "llama":
        assert logits(empty).equal(plain)


def test_gradients_match_the_native_model():
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    native = transformers.LlamaForCausalLM(copy.deepcopy(model.config))
    native.load_state_dict(model.state_dict())
    ids = tokens(LONG)
    for each_model in (model, native):
        each_model.train()
        each_model(input_ids=ids, labels=ids).loss.backward()
    for weight, native_weight in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, native_weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("through_adapter", [True, False], ids=["adapter", "base"])
def test_patch_and_undo_with_a_lora_adapter(through_adapter):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    plain = make_model()
    torch.manual_seed(0)
    adapted = peft.get_peft_model(plain, lora).eval()
    before = logits(adapted)
    keys = list(adapted.state_dict())
    handle = rope_patch.patch(adapted if through_adapter else plain, "yarn", factor=4)
    assert rope_patch.current(adapted) is handle
    assert list(adapted.state_dict()) == keys
    assert adapted.config.max_position_embeddings == TARGET

    torch.manual_seed(0)
    config = make_config(
        rope_parameters=copy.deepcopy(adapted.config.rope_parameters),
        max_position_embeddings=TARGET,
    )
    native = peft.get_peft_model(make_model(config=config), lora).eval()
    native.load_state_dict(adapted.state_dict())
    assert_close(logits(adapted), logits(native))
    assert_differs(logits(adapted), before)
    handle.undo()
    assert logits(adapted).equal(before)


# -- modes of torch --------------------------------------------------------------------------------


class LogitsOf(torch.nn.Module):
    """A module from one tensor to one tensor, which torch.jit.trace requires."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("qwen3", "auto"),
        ("qwen3", "reference"),
        pytest.param("llama", "auto", marks=pytest.mark.slow),
        pytest.param("llama", "reference", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_trace_matches_the_model(family, kernels):
    model = make_model(family)
    rope_patch.patch(model, "yarn", factor=4, kernels=kernels)
    with torch.no_grad():
        traced = torch.jit.trace(LogitsOf(model), tokens(40))
    for ids in (tokens(40, seed=5), tokens(70, seed=5)):
        torch.testing.assert_close(traced(ids), forward(model, ids), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_trace_of_a_length_dependent_method_is_refused():
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn", kernels="hf")
    with pytest.raises(ValueError, match="trace"):
        torch.jit.trace(LogitsOf(model), tokens(40))
    plain = make_model()
    rope_patch.patch(plain, "dynamic-yarn", kernels="hf")
    assert forward(model, tokens(100)).equal(forward(plain, tokens(100)))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_forward_mode_derivatives_match_reverse_mode(method, kernels):
    """Check <u, J v> = <J^T u, v> for random u and v, with J v by forward mode."""
    factor = {"factor": 4} if method == "yarn" else {}
    model = make_model("qwen3", attn_implementation="eager")
    rope_patch.patch(model, method, kernels=kernels, **factor)
    embedded = model.get_input_embeddings()(tokens(80)).detach()
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(embedded.shape, generator=generator)
    u = torch.randn(1, 80, 128, generator=generator)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(embedded, v)
        out = model(inputs_embeds=dual, use_cache=False).logits
        tangent = forward_ad.unpack_dual(out).tangent
    embedded.requires_grad_()
    out = model(inputs_embeds=embedded, use_cache=False).logits
    (gradient,) = torch.autograd.grad(out, embedded, u)
    torch.testing.assert_close((u * tangent).sum(), (gradient * v).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
def test_torch_func_gradients_match_autograd(kernels):
    """Check a model whose norms are deferred; kernels cannot run under torch.func."""
    pytest.importorskip("triton")
    model = make_model("qwen3", num_hidden_layers=1, attn_implementation="eager")
    rope_patch.patch(model, "yarn", factor=4, kernels=kernels)
    embedded = model.get_input_embeddings()(tokens(4)).detach()

    def loss(x):
        return model(inputs_embeds=x, use_cache=False).logits.square().mean()

    leaf = embedded.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    difference = torch.func.grad(loss)(embedded) - expected
    assert difference.abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("inference", [False, True])
def test_in_place_changes_of_frequencies_are_seen(inference):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4, kernels="reference")
    changed = make_model()
    rope_patch.patch(changed, "yarn", factor=4, kernels="reference")
    with torch.inference_mode(inference):
        forward(model, tokens(40))
        for each in (model, changed):
            each.model.rotary_emb.inv_freq.mul_(0.5)
    assert forward(model, tokens(40)).equal(forward(changed, tokens(40)))
