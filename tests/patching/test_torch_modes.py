"""Test patched models under torch.jit.trace, forward-mode AD, and changed defaults of torch."""

import pytest
import torch
from helpers.tiny_models import LONG_FACTOR, forward, make_model, step_by_step, tokens
from torch.autograd import forward_ad

import rope_patch
from rope_patch.patching.kernels import deferred_norms


class LogitsOf(torch.nn.Module):
    """A module from one tensor to one tensor, which torch.jit.trace requires."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
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
    with pytest.raises(ValueError, match="trace would keep the frequencies"):
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


@pytest.fixture
def torch_defaults():
    """Restore torch's defaults."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


METHODS = [
    ("llama", "yarn", {"factor": 4}),
    ("qwen3", "dynamic-yarn", {}),
    ("llama", "longrope", {"factor": 4, "long_factor": LONG_FACTOR, "start_tokens": 4}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("family", "method", "options"), METHODS)
def test_default_dtype_does_not_change_the_patch(family, method, options, dtype, torch_defaults):
    expected, model = make_model(family), make_model(family)
    reference = rope_patch.patch(expected, method, **options)
    deferred_norms._probe_norm.cache_clear()  # else the cached probe would answer
    state = torch.get_rng_state()
    torch.set_default_dtype(dtype)
    handle = rope_patch.patch(model, method, **options)
    assert torch.get_default_dtype() == dtype
    torch.set_default_dtype(torch.float32)
    assert torch.get_rng_state().equal(state)
    assert handle.summary() == reference.summary()
    ids = tokens(70)
    assert step_by_step(model, ids, 60).equal(step_by_step(expected, ids, 60))


def test_default_device_and_modes_do_not_change_the_patch(torch_defaults):
    expected, model = make_model("qwen3"), make_model("qwen3")
    reference = rope_patch.patch(expected, "dynamic-yarn")
    deferred_norms._probe_norm.cache_clear()
    torch.set_default_device("meta")
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        handle = rope_patch.patch(model, "dynamic-yarn")
    torch.set_default_device(None)
    assert handle.summary() == reference.summary()
    assert not any(buffer.is_meta for buffer in model.buffers())
    ids = tokens(70)
    assert step_by_step(model, ids, 60).equal(step_by_step(expected, ids, 60))


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
def test_torch_func_gradients_match_autograd(kernels):
    """Check a model whose norms are deferred; kernels cannot run under torch.func."""
    pytest.importorskip("triton")
    model = make_model("qwen3", attn_implementation="eager")
    rope_patch.patch(model, "yarn", factor=4, kernels=kernels)
    embedded = model.get_input_embeddings()(tokens(8)).detach()

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
