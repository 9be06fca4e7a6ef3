"""Test rotation from cos and sin against transformers, float64, and other memory layouts."""

import importlib
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rope_patch.ops import plain_torch, rope_from_cos_sin
from rope_patch.ops.reference import rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Tokens: none, one, few, and one more than three blocks of the size that `blocks` sets.
LENGTHS = [0, 1, 5, 49]


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Lower the limits to 16 tokens of 4 heads of 128, so that small tensors take all paths."""
    monkeypatch.setattr(plain_torch, "_BLOCK_NUMEL", 16 * 4 * 128)
    monkeypatch.setattr(plain_torch, "_JOINED_NUMEL", 8 * 4 * 128)


def heads(count, tokens, dim=128, batch=2, dtype=torch.float32, seed=0):
    """Return `[B, H, S, D]` in the memory layout of projections, `[B, S, H, D]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, count, dim, generator=generator).to(dtype).transpose(1, 2)


def angles(tokens, rotary_dim=128, batch=1, start=3):
    """Return angles `[B, S, R / 2]`, with different positions for each row."""
    positions = torch.arange(tokens) * 7 + start + 100 * torch.arange(batch)[:, None]
    return positions[..., None] * 1e4 ** -torch.arange(0, 1, 2 / rotary_dim)


def pair_tables(*args, dtype=torch.float32, **options):
    angle = angles(*args, **options)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def repeat(x, interleaved):
    return x.repeat_interleave(2, -1) if interleaved else torch.cat((x, x), -1)


def full_tables(*args, interleaved=False, **options):
    """Return cos and sin in the form of transformers' rotary modules, `[B, S, R]`."""
    pairs = pair_tables(*args, **options)
    return [repeat(c, interleaved) for c in pairs]


def rotate_by_reference(x, pairs, interleaved=False, heads_dim=1):
    return rotate(x, *(c.unsqueeze(heads_dim) for c in pairs), interleaved=interleaved)


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("layout", ["llama", "cohere", "phi3", "glm"])
def test_heads_lie_in_memory_as_in_transformers(layout, tokens):
    """Float32 is bitwise the same, too, in halves, neighbours, a part of each head, and both.

    SDPA takes other kernels where the last stride is not 1, as that of Zaya's queries.
    """
    modeling = importlib.import_module(f"transformers.models.{layout}.modeling_{layout}")
    interleaved, rotary_dim = layout in ("cohere", "glm"), 96 if layout in ("phi3", "glm") else 128
    for batch, is_odd in ((1, False), (2, False), (1, True)):
        q, k = heads(4, tokens), heads(2, tokens, seed=1)
        if is_odd:
            q, k = (x.mT.contiguous().mT for x in (q, k))
        cos, sin = full_tables(tokens, rotary_dim, batch=batch, interleaved=interleaved)
        # GLM takes the first of two repetitions of cos and sin.
        given = [c[..., ::2].repeat(1, 1, 2) if layout == "glm" else c for c in (cos, sin)]
        expected = modeling.apply_rotary_pos_emb(q, k, *given)
        got = rope_from_cos_sin(q, k, cos, sin, interleaved=interleaved)
        for rotated, native in zip(got, expected, strict=True):
            assert rotated.equal(native)
            assert rotated.stride(-1) == native.stride(-1) or not tokens


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 49])
@pytest.mark.parametrize("tables_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_rounded_once(dtype, tables_dtype, tokens, interleaved):
    q, k = heads(4, tokens, dtype=dtype), heads(2, tokens, dtype=dtype, seed=1)
    pairs = pair_tables(tokens, dtype=tables_dtype)
    full = full_tables(tokens, dtype=tables_dtype, interleaved=interleaved)
    got = rope_from_cos_sin(q, k, *full, interleaved=interleaved)
    for x, rotated in zip((q, k), got, strict=True):
        exact = rotate_by_reference(x.double(), [c.double() for c in pairs], interleaved)
        assert rotated.dtype == dtype
        # Float32 may move ties.
        assert (rotated == exact.to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables_of_another_dtype(dtype):
    q, pairs = heads(4, 49).to(dtype), pair_tables(49, dtype=torch.bfloat16)
    got, _ = rope_from_cos_sin(q, None, *pairs, repeated=False)
    assert got.dtype == dtype
    torch.testing.assert_close(got, rotate_by_reference(q, pairs), rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 20), (80, 32), (128, 96), (128, 128)])
def test_results_match_the_reference(head_dim, rotary_dim, tokens, repeated, interleaved):
    """Use odd head counts, partial rotation, with and without keys."""
    q, k = heads(5, tokens, head_dim), heads(3, tokens, head_dim, seed=1)
    pairs = pair_tables(tokens, rotary_dim, batch=2)
    tables = (
        full_tables(tokens, rotary_dim, batch=2, interleaved=interleaved) if repeated else pairs
    )
    options = {"interleaved": interleaved, "repeated": repeated}
    got = rope_from_cos_sin(q, k, *tables, **options)
    rotated_q, none = rope_from_cos_sin(q, None, *tables, **options)
    assert none is None
    assert got[0].equal(rotate_by_reference(q, pairs, interleaved))
    assert got[1].equal(rotate_by_reference(k, pairs, interleaved))
    assert rotated_q.equal(got[0])


def test_empty_batch():
    q, k = heads(4, 49, batch=0), heads(2, 49, batch=0)
    got = rope_from_cos_sin(q, k, *full_tables(49))
    assert [x.shape for x in got] == [q.shape, k.shape]


# -- memory ----------------------------------------------------------------------------------------


def as_tokens_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def as_packed(x):
    """Return a copy that is a slice of one tensor for queries, keys and values."""
    wide = torch.zeros(x.shape[0], x.shape[2], x.shape[1], 3 * x.shape[3], dtype=x.dtype)
    part = wide[..., x.shape[3] : 2 * x.shape[3]].transpose(1, 2)
    return part.copy_(x)


def as_dimensions_first(x):
    return x.transpose(1, 3).contiguous().transpose(1, 3)


def strides(x):
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("tokens", [1, 5, 49])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change_layout", [torch.Tensor.contiguous, as_tokens_first, as_packed, as_dimensions_first]
)
def test_memory_layout_does_not_change_results(change_layout, dtype, tokens):
    q, k = heads(4, tokens, dtype=dtype), heads(2, tokens, dtype=dtype, seed=1)
    full = full_tables(tokens, batch=2, dtype=dtype)
    expected = rope_from_cos_sin(q, k, *full)
    inputs = [change_layout(q), change_layout(k)]
    got = rope_from_cos_sin(*inputs, *full)
    for x, before, rotated, truth in zip(inputs, (q, k), got, expected, strict=True):
        assert rotated.equal(truth)
        assert x.equal(before)  # inputs are unchanged
        assert strides(rotated) == strides(torch.empty_like(x))
        assert rotated.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize("tokens", [1, 5, 49])
@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_before_heads(batch, tokens):
    q, k, full = heads(4, tokens), heads(2, tokens, seed=1), full_tables(tokens, batch=batch)
    expected = rope_from_cos_sin(q, k, *full)
    got = rope_from_cos_sin(q.transpose(1, 2), k.transpose(1, 2), *full, heads_dim=2)
    for rotated, truth in zip(got, expected, strict=True):
        assert rotated.transpose(1, 2).equal(truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_size_does_not_change_results(dtype, monkeypatch):
    q, k = heads(4, 49, dtype=dtype), heads(1, 49, dtype=dtype, seed=1)
    full = full_tables(49, batch=2)
    results = []
    for size in (1, 1000, 16 * 4 * 128, 2**30):
        monkeypatch.setattr(plain_torch, "_BLOCK_NUMEL", size)
        results.append(rope_from_cos_sin(q, k, *full))
    monkeypatch.setattr(plain_torch, "_JOINED_NUMEL", 2**30)
    results.append(rope_from_cos_sin(q, k, *full))
    for got in results[1:]:
        assert all(a.equal(b) for a, b in zip(got, results[0], strict=True))


# -- over the input --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 12])
def test_overwriting_does_not_change_a_bit(rotary_dim, interleaved, dtype, monkeypatch):
    monkeypatch.setattr(plain_torch, "_BLOCK_NUMEL", 7 * 4 * 16)
    monkeypatch.setattr(plain_torch, "_JOINED_NUMEL", 0)
    q, k = (heads(n, 23, 16, dtype=dtype, seed=n) for n in (4, 2))
    options = {"interleaved": interleaved}
    tables = full_tables(23, rotary_dim, dtype=dtype, **options)
    expected = rope_from_cos_sin(q, k, *tables, **options)
    got = rope_from_cos_sin(q, k, *tables, may_overwrite=True, **options)
    assert got[0] is q
    assert got[1] is k
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


def peak_memory(call):
    """Return the most bytes that are allocated in a call, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes), default=0)


def test_overwriting_allocates_less_than_the_queries(monkeypatch):
    """Count by torch's profiler: temporaries of a block instead of new queries and keys."""
    monkeypatch.setattr(plain_torch, "_BLOCK_NUMEL", 2**12)
    monkeypatch.setattr(plain_torch, "_JOINED_NUMEL", 0)
    q, k = heads(8, 256, 64, 1), heads(2, 256, 64, 1, seed=1)
    tables = full_tables(256, 64)
    peaks = {
        may_overwrite: peak_memory(
            lambda m=may_overwrite: rope_from_cos_sin(q, k, *tables, may_overwrite=m)
        )
        for may_overwrite in (False, True)
    }
    assert peaks[False] >= q.nbytes + k.nbytes
    assert peaks[True] <= 3 * 4 * 2**12


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("required", ["q", "k", "qk", "q alone"])
def test_gradients(required, tokens, interleaved, monkeypatch):
    """Rotate both at once, one after the other, and in blocks of tokens."""
    monkeypatch.setattr(plain_torch, "_BLOCK_NUMEL", 3 * 2 * 6)
    monkeypatch.setattr(plain_torch, "_JOINED_NUMEL", 3 * 6)
    q, k = heads(2, tokens, 6, 1).double(), heads(1, tokens, 6, 1, seed=1).double()
    full = [c.double() for c in full_tables(tokens, 4, interleaved=interleaved)]
    inputs = [q, None] if required == "q alone" else [q, k]
    sources = [x.requires_grad_() for x, name in zip((q, k), "qk", strict=True) if name in required]

    def rotate_inputs(*_):
        got = rope_from_cos_sin(*inputs, *full, interleaved=interleaved)
        return tuple(x for x in got if x is not None and x.requires_grad)

    assert len(rotate_inputs()) == len(sources)  # other outputs require no gradient
    assert torch.autograd.gradcheck(rotate_inputs, sources)
    assert torch.autograd.gradgradcheck(rotate_inputs, sources)


@pytest.mark.parametrize("tokens", [1, 5, 49])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_rotate_back(dtype, tokens):
    """Take gradients of a sum, which are expanded, and of one output without the other."""
    q, k = heads(4, tokens, dtype=dtype), heads(2, tokens, dtype=dtype, seed=1)
    cos, sin = full_tables(tokens, batch=2)
    q, k = (x.detach().requires_grad_() for x in (q, k))
    rotated_q, rotated_k = rope_from_cos_sin(q, k, cos, sin)
    rotated_q.sum().backward(retain_graph=True)
    assert k.grad is None
    (rotated_k * 2).sum().backward()
    ones = (torch.ones_like(x) for x in (q, k))
    expected_q, expected_k = rope_from_cos_sin(*ones, cos, -sin)
    assert q.grad.equal(expected_q)
    assert k.grad.equal(2 * expected_k)


def test_results_may_be_changed_in_place():
    q = heads(4, 1).requires_grad_()
    k = heads(2, 1, seed=1).requires_grad_()
    rotated = rope_from_cos_sin(q, k, *full_tables(1))
    sum(x.mul_(2).sum() for x in rotated).backward()
    ones = (torch.ones_like(x) for x in (q, k))
    cos, sin = full_tables(1)
    expected = rope_from_cos_sin(*ones, cos, -sin)
    assert all(x.grad.equal(2 * e) for x, e in zip((q, k), expected, strict=True))


# -- fallback to the reference ---------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("repeated", [False, True])
def test_gradients_of_tables(repeated, interleaved):
    q, k = heads(2, 3, 6, 1).double(), heads(1, 3, 6, 1, seed=1).double()
    pairs = [c.double().requires_grad_() for c in pair_tables(3, 4)]

    def rotate_by_pairs(*pairs):
        options = {"interleaved": interleaved, "repeated": repeated}
        full = [repeat(c, interleaved) for c in pairs] if repeated else pairs
        return rope_from_cos_sin(q, k, *full, **options)

    assert torch.autograd.gradcheck(rotate_by_pairs, pairs)


def test_other_devices_use_the_reference():
    q, k = (heads(n, 5).to("meta") for n in (4, 2))
    got = rope_from_cos_sin(q, k, *(c.to("meta") for c in full_tables(5)))
    assert [x.shape for x in got] == [q.shape, k.shape]


def test_tensor_subclasses_use_the_reference():
    class Other(torch.Tensor):
        pass

    q, k, full = heads(4, 5), heads(2, 5, seed=1), full_tables(5)
    got, _ = rope_from_cos_sin(q.as_subclass(Other), k, *full)
    assert type(got) is Other
    assert got.as_subclass(torch.Tensor).equal(rope_from_cos_sin(q, k, *full)[0])


def test_compiled_function_matches():
    q, k, full = heads(4, 5), heads(2, 5, seed=1), full_tables(5)
    compiled = torch.compile(rope_from_cos_sin, backend="eager", fullgraph=True)
    for got, expected in zip(compiled(q, k, *full), rope_from_cos_sin(q, k, *full), strict=True):
        assert got.equal(expected)


def test_torch_func_transforms_use_the_reference():
    q, full = heads(4, 5), full_tables(5)
    expected = rope_from_cos_sin(q.detach().requires_grad_(), None, *full)[0]
    got = torch.func.vmap(
        torch.func.grad(lambda x: rope_from_cos_sin(x[None], None, *full)[0].sum())
    )
    assert got(q).shape == expected.shape
