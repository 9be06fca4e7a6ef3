"""Test kernels on a GPU against float64, at sizes that only fit there, and their launches."""

import pytest
import torch
from helpers.tiny_models import forward, make_model, step_by_step, tokens

import rope_patch
from rope_patch import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# head_dim, rotary_dim, heads, key heads, interleaved: Llama 3 and Qwen 3 8B, SmolLM2, Gemma 3 12B,
# Phi-2, GLM-4, Command R
GEOMETRIES = [
    (128, 128, 32, 8, False),
    (64, 64, 9, 3, False),
    (256, 256, 16, 8, False),
    (80, 32, 32, 32, False),
    (128, 64, 32, 2, True),
    (128, 128, 64, 8, True),
]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def make_packed_freqs(rotary_dim, theta=5e5, factor=1.1):
    inv_freq = theta ** -(torch.arange(rotary_dim // 2, dtype=torch.float64) / (rotary_dim // 2))
    return ops.pack_frequencies(inv_freq.cuda(), factor)


def inputs(geometry, dtype, batch=2, length=37):
    head_dim, rotary_dim, heads, key_heads, _ = geometry
    torch.manual_seed(0)
    q, k = (torch.randn(batch, length, n, head_dim, device="cuda") for n in (heads, key_heads))
    positions = torch.randint(0, 10_000_000, (batch, length), device="cuda")
    return (
        q.to(dtype).transpose(1, 2),
        k.to(dtype).transpose(1, 2),
        positions,
        make_packed_freqs(rotary_dim),
    )


def assert_rounded(got, expected, dtype):
    """Assert equality up to rounding each number once; `expected` is in float64."""
    error = (got.double() - expected).abs()
    assert (error <= ROUNDING[dtype] * (expected.abs() + 1)).all(), error.max()


class Subclass(torch.Tensor):
    pass


def test_auto_chooses_triton_for_plain_tensors():
    x = torch.ones(1, 1, 1, 8, device="cuda")
    assert ops.use_triton(x) is (ops.triton_unavailable_reason() is None)
    assert not ops.use_triton(x.double())
    assert not ops.use_triton(x.as_subclass(Subclass))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rotation_and_gradient_match_float64(geometry, dtype):
    q, k, positions, packed_freqs = inputs(geometry, dtype)
    layout = {"interleaved": geometry[-1], "heads_dim": 1}
    expected = ops.rope(
        q.double(), k.double(), positions, packed_freqs, kernels="reference", **layout
    )
    got = ops.rope(
        q.requires_grad_(), k.requires_grad_(), positions, packed_freqs, kernels="triton", **layout
    )
    for a, b in zip(got, expected, strict=True):
        assert_rounded(a, b, dtype)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    out = ops.rope(*wide, positions, packed_freqs, kernels="reference", **layout)
    grads = [torch.randn_like(x) for x in got]
    expected = torch.autograd.grad(out, wide, [g.double() for g in grads])
    for a, b in zip(torch.autograd.grad(got, (q, k), grads), expected, strict=True):
        assert_rounded(a, b, dtype)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("length", [1, 37, 2100])
def test_write_into_a_cache_matches_float64(length, geometry, dtype, norm):
    q, k, positions, packed_freqs = inputs(geometry, dtype, length=length)
    v = torch.randn_like(k)
    caches = [torch.randn(2, k.shape[1], 2200, k.shape[3], device="cuda").to(dtype) for _ in "kv"]
    expected_caches = [x.double() for x in caches]
    settings = {"interleaved": geometry[-1], "heads_dim": 1}
    if norm:
        weights = [1 + 0.1 * torch.randn(k.shape[3], device="cuda") for _ in "qk"]
        settings |= {"q_weight": weights[0], "k_weight": weights[1], "eps": 1e-6}
    where = (torch.tensor(50, device="cuda"), positions, packed_freqs)
    got = ops.rope_into_cache(q, k, v, *caches, *where, kernels="triton", **settings)
    wide = [x.double() for x in (q, k, v)]
    expected = ops.rope_into_cache(*wide, *expected_caches, *where, kernels="reference", **settings)
    for a, b in zip((got, *caches), (expected, *expected_caches), strict=True):
        assert_rounded(a, b, dtype)


@pytest.mark.parametrize("across", [False, True], ids=["heads", "across"])
@pytest.mark.parametrize("save", ["input", "output"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_norm_rotation_and_gradients_match_float64(geometry, dtype, save, across):
    q, k, positions, packed_freqs = inputs(geometry, dtype)
    shapes = [(x.shape[1], x.shape[3]) if across else (x.shape[3],) for x in (q, k)]
    weights = [1 + 0.1 * torch.randn(shape, device="cuda") for shape in shapes]
    settings = {"eps": 1e-6, "interleaved": geometry[-1], "heads_dim": 1}
    leaves = [x.detach().requires_grad_() for x in (q, k, *weights)]
    got = ops.qk_norm_rope(
        *leaves, positions, packed_freqs, save=save, kernels="triton", **settings
    )
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = ops.qk_norm_rope(*wide, positions, packed_freqs, kernels="reference", **settings)
    for a, b in zip(got, out, strict=True):
        assert_rounded(a, b, dtype)
    grads = [torch.randn_like(x) for x in got]
    expected = torch.autograd.grad(out, wide, [g.double() for g in grads])
    for a, b in zip(torch.autograd.grad(got, leaves, grads), expected, strict=True):
        tolerance = 4 * ROUNDING[dtype]
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_weight_gradients_are_bitwise_deterministic():
    q, k, positions, packed_freqs = inputs(GEOMETRIES[0], torch.bfloat16, length=5000)
    weights = [torch.ones(128, device="cuda", requires_grad=True) for _ in range(2)]

    def gradients():
        out = ops.qk_norm_rope(q, k, *weights, positions, packed_freqs, eps=1e-6, heads_dim=1)
        return torch.autograd.grad([x.float().square().sum() for x in out], weights)

    for a, b in zip(gradients(), gradients(), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize(
    ("length", "heads"), [(70_000, 2), (600_000, 1), (270_000, 64)], ids=["2^16", "2^19", "2^31"]
)
def test_token_and_element_counts_beyond_small_integers(length, heads):
    """Check token counts above the limit of a grid's other dimensions, and offsets above 2^31."""
    q = torch.zeros(1, length, heads, 128, device="cuda", dtype=torch.bfloat16)
    q[:, -3:] = torch.randn(1, 3, heads, 128, device="cuda")
    positions, packed_freqs = torch.arange(length, device="cuda"), make_packed_freqs(128)
    got, _ = ops.rope(q, None, positions, packed_freqs, kernels="triton")
    expected, _ = ops.rope(
        q[:, -3:].double(), None, positions[-3:], packed_freqs, kernels="reference"
    )
    assert_rounded(got[:, -3:], expected, torch.bfloat16)
    assert not got[:, :-3].any()


def test_strides_beyond_2_to_the_31():
    whole = torch.empty(3, 2**30, device="cuda", dtype=torch.bfloat16)
    q = whole.as_strided((3, 1, 2, 128), (2**30, 2**30, 128, 1)).normal_()
    positions, packed_freqs = torch.tensor([[5], [7], [9]], device="cuda"), make_packed_freqs(128)
    got, _ = ops.rope(q, None, positions, packed_freqs, kernels="triton")
    expected, _ = ops.rope(q.double(), None, positions, packed_freqs, kernels="reference")
    assert_rounded(got, expected, torch.bfloat16)


def test_rerotated_keys_are_rounded_once_and_without_bias():
    """Compare with float64: a last bit of float32 decides how the stochastic rounding falls."""
    torch.manual_seed(0)
    keys = torch.randn(2, 8, 300, 128, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(300, device="cuda").expand(2, -1)
    old, new = make_packed_freqs(128, factor=1.0), make_packed_freqs(128, theta=8e6)
    exact = keys.double()
    ops.rerotate_([exact], positions, old, new, kernels="reference")
    ops.rerotate_([keys], positions, old, new, kernels="triton")
    # The spacing of bfloat16's numbers there, or near 1/64, where float32's error counts.
    spacing = 2.0 ** (exact.abs().clamp(min=2**-6).log2().floor() - 7)
    errors = (keys.double() - exact) / spacing
    assert errors.abs().max() < 1.01
    # Each error has a standard deviation of about 0.4, so their mean one of 0.4 / sqrt(numel).
    assert errors.mean().abs() < 5 * 0.4 / errors.numel() ** 0.5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_patched_model_matches_the_cpu(family, method):
    model, ids = make_model(family), tokens(150)
    options = {} if method.startswith("dynamic") else {"factor": 4}
    rope_patch.patch(model, method, kernels="auto", **options)
    expected, steps = forward(model, ids), step_by_step(model, ids, 40)
    model.cuda()
    torch.testing.assert_close(forward(model, ids.cuda()).cpu(), expected, rtol=0, atol=1e-3)
    got = step_by_step(model, ids.cuda(), 40).cpu()
    torch.testing.assert_close(got, steps, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "rope_kernel"), ("qwen3", "forward_kernel")]
)
def test_one_kernel_launch_per_layer(family, name):
    model = make_model(family).cuda()
    rope_patch.patch(model, "yarn", factor=4)
    ids = tokens(1).cuda()
    forward(model, ids)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        forward(model, ids)
    kernel_names = [event.name for event in profiler.events()]
    assert sum(name in event for event in kernel_names) == model.config.num_hidden_layers
    assert not any("cos" in event or "sin" in event for event in kernel_names)


def test_launches_replay_from_a_cuda_graph():
    q, k, positions, packed_freqs = inputs(GEOMETRIES[0], torch.bfloat16, length=1)
    out = ops.rope(q, k, positions, packed_freqs, heads_dim=1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.rope(q, k, positions, packed_freqs, heads_dim=1)
    q.normal_()
    positions += 1
    graph.replay()
    expected = ops.rope(q, k, positions, packed_freqs, heads_dim=1)
    for a, b in zip(out, expected, strict=True):
        assert a.equal(b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_tensors_on_a_gpu_other_than_the_current_one():
    q, k, positions, packed_freqs = inputs(GEOMETRIES[0], torch.float32)
    expected = ops.rope(q, k, positions, packed_freqs, heads_dim=1)
    tensors = [x.to("cuda:1") for x in (q, k, positions, packed_freqs)]
    for _ in range(2):  # the first compiles, the second looks up
        got = ops.rope(*tensors, heads_dim=1)
        assert got[0].device == torch.device("cuda:1")
        torch.testing.assert_close(got[0].cpu(), expected[0].cpu())
