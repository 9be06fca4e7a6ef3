"""Rotation from cos and sin against transformers' own, float64, and other memory layouts."""

import importlib

import pytest
import torch

from rope_patch.ops import cpu
from rope_patch.ops.cpu import rope_from_cos_sin
from rope_patch.ops.reference import rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# tokens: nothing, one, few, and one past three whole blocks of the size that `blocks` sets
LENGTHS = [0, 1, 5, 49]


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Lower the limits to 16 tokens of 4 heads of 128, so that small tensors take every path."""
    monkeypatch.setattr(cpu, "_BLOCK_NUMEL", 16 * 4 * 128)
    monkeypatch.setattr(cpu, "_JOINED_NUMEL", 8 * 4 * 128)


def heads(count, tokens, dim=128, batch=2, dtype=torch.float32, seed=0):
    """Return `[B, H, S, D]` in the memory of `[B, S, H, D]`, as projections do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, count, dim, generator=generator).to(dtype).transpose(1, 2)


def angles(tokens, rotary_dim=128, batch=1, start=3):
    """Return cos and sin `[B, S, R / 2]`, with different positions for each row."""
    positions = torch.arange(tokens) * 7 + start + 100 * torch.arange(batch)[:, None]
    return positions[..., None] * 1e4 ** -torch.arange(0, 1, 2 / rotary_dim)


def pair_tables(*args, dtype=torch.float32, **options):
    angle = angles(*args, **options)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def repeat(x, interleaved):
    return x.repeat_interleave(2, -1) if interleaved else torch.cat((x, x), -1)


def full_tables(*args, interleaved=False, **options):
    """Return cos and sin as transformers' rotary modules do, `[B, S, R]`."""
    pairs = pair_tables(*args, **options)
    return [repeat(c, interleaved) for c in pairs]


def by_reference(x, pairs, interleaved=False, heads_dim=1):
    return rotate(x, *(c.unsqueeze(heads_dim) for c in pairs), interleaved=interleaved)


# -- what comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("layout", ["llama", "cohere", "phi3", "glm"])
def test_float32_has_the_bits_of_transformers(layout, tokens, batch):
    """Check halves (Llama), neighbours (Cohere), a part of each head (Phi-3), and both (GLM)."""
    modeling = importlib.import_module(f"transformers.models.{layout}.modeling_{layout}")
    q, k = heads(4, tokens), heads(2, tokens, seed=1)
    rotary_dim = 96 if layout in ("phi3", "glm") else 128
    cos, sin = full_tables(tokens, rotary_dim, batch=batch, interleaved=layout == "cohere")
    expected = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    if layout == "glm":  # cos and sin twice behind one another, of which it takes the first
        cos, sin = (c[..., :48] for c in (cos, sin))
    interleaved = layout in ("cohere", "glm")
    got = rope_from_cos_sin(q, k, cos, sin, interleaved=interleaved, repeated=layout != "glm")
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 49])
@pytest.mark.parametrize("tables_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype, tables_dtype, tokens, interleaved):
    q, k = heads(4, tokens, dtype=dtype), heads(2, tokens, dtype=dtype, seed=1)
    pairs = pair_tables(tokens, dtype=tables_dtype)
    full = full_tables(tokens, dtype=tables_dtype, interleaved=interleaved)
    got = rope_from_cos_sin(q, k, *full, interleaved=interleaved)
    for x, rotated in zip((q, k), got, strict=True):
        exact = by_reference(x.double(), [c.double() for c in pairs], interleaved)
        assert rotated.dtype == dtype
        # But for ties that float32 moved.
        assert (rotated == exact.to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables_of_another_dtype(dtype):
    q, pairs = heads(4, 49).to(dtype), pair_tables(49, dtype=torch.bfloat16)
    got, _ = rope_from_cos_sin(q, None, *pairs, repeated=False)
    assert got.dtype == dtype
    torch.testing.assert_close(got, by_reference(q, pairs), rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 20), (80, 32), (128, 96), (128, 128)])
def test_it_is_the_reference(head_dim, rotary_dim, tokens, repeated, interleaved):
    """Check odd head counts, every dtype, with and without keys."""
    q, k = heads(5, tokens, head_dim), heads(3, tokens, head_dim, seed=1)
    pairs = pair_tables(tokens, rotary_dim, batch=2)
    given = full_tables(tokens, rotary_dim, batch=2, interleaved=interleaved) if repeated else pairs
    options = {"interleaved": interleaved, "repeated": repeated}
    got = rope_from_cos_sin(q, k, *given, **options)
    alone, none = rope_from_cos_sin(q, None, *given, **options)
    assert none is None
    assert got[0].equal(by_reference(q, pairs, interleaved))
    assert got[1].equal(by_reference(k, pairs, interleaved))
    assert alone.equal(got[0])


def test_no_rows():
    q, k = heads(4, 49, batch=0), heads(2, 49, batch=0)
    got = rope_from_cos_sin(q, k, *full_tables(49))
    assert [x.shape for x in got] == [q.shape, k.shape]


# -- how it lies in memory -------------------------------------------------------------------------


def as_tokens_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def as_packed(x):
    """Check a slice of queries, keys and values in one tensor."""
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
    "lay", [torch.Tensor.contiguous, as_tokens_first, as_packed, as_dimensions_first]
)
def test_strides_change_nothing(lay, dtype, tokens):
    q, k = heads(4, tokens, dtype=dtype), heads(2, tokens, dtype=dtype, seed=1)
    full = full_tables(tokens, batch=2, dtype=dtype)
    expected = rope_from_cos_sin(q, k, *full)
    laid = [lay(q), lay(k)]
    got = rope_from_cos_sin(*laid, *full)
    for given, was, ours, theirs in zip(laid, (q, k), got, expected, strict=True):
        assert ours.equal(theirs)
        assert given.equal(was)  # inputs stay as they were
        assert strides(ours) == strides(torch.empty_like(given))
        assert ours.untyped_storage().nbytes() == given.numel() * given.element_size()


@pytest.mark.parametrize("tokens", [1, 5, 49])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_behind_tokens(batch, tokens):
    q, k, full = heads(4, tokens), heads(2, tokens, seed=1), full_tables(tokens, batch=batch)
    expected = rope_from_cos_sin(q, k, *full)
    got = rope_from_cos_sin(q.transpose(1, 2), k.transpose(1, 2), *full, heads_dim=2)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.transpose(1, 2).equal(theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_leave_no_trace(dtype, monkeypatch):
    q, k = heads(4, 49, dtype=dtype), heads(1, 49, dtype=dtype, seed=1)
    full = full_tables(49, batch=2)
    results = []
    for size in (1, 1000, 16 * 4 * 128, 2**30):
        monkeypatch.setattr(cpu, "_BLOCK_NUMEL", size)
        results.append(rope_from_cos_sin(q, k, *full))
    monkeypatch.setattr(cpu, "_JOINED_NUMEL", 2**30)
    results.append(rope_from_cos_sin(q, k, *full))
    for got in results[1:]:
        assert all(a.equal(b) for a, b in zip(got, results[0], strict=True))


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("wanted", ["q", "k", "qk", "q alone"])
def test_gradients(wanted, tokens, interleaved, monkeypatch):
    monkeypatch.setattr(cpu, "_BLOCK_NUMEL", 7 * 2 * 6)
    monkeypatch.setattr(cpu, "_JOINED_NUMEL", 4 * 2 * 6)
    q, k = heads(2, tokens, 6, 1).double(), heads(1, tokens, 6, 1, seed=1).double()
    full = [c.double() for c in full_tables(tokens, 4, interleaved=interleaved)]
    given = [q, None] if wanted == "q alone" else [q, k]
    sources = [x.requires_grad_() for x, name in zip((q, k), "qk", strict=True) if name in wanted]

    def rotated(*_):
        got = rope_from_cos_sin(*given, *full, interleaved=interleaved)
        return tuple(x for x in got if x is not None and x.requires_grad)

    assert len(rotated()) == len(sources)  # what needs no gradient asks for none
    assert torch.autograd.gradcheck(rotated, sources)
    assert torch.autograd.gradgradcheck(rotated, sources)


@pytest.mark.parametrize("tokens", [1, 5, 49])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_rotated_backwards(dtype, tokens):
    """Check gradients of a sum, which share one memory cell, and of a single used output."""
    q, k = heads(4, tokens, dtype=dtype), heads(2, tokens, dtype=dtype, seed=1)
    cos, sin = full_tables(tokens, batch=2)
    q, k = (x.detach().requires_grad_() for x in (q, k))
    turned_q, turned_k = rope_from_cos_sin(q, k, cos, sin)
    turned_q.sum().backward(retain_graph=True)
    assert k.grad is None
    (turned_k * 2).sum().backward()
    ones = (torch.ones_like(x) for x in (q, k))
    expected_q, expected_k = rope_from_cos_sin(*ones, cos, -sin)
    assert q.grad.equal(expected_q)
    assert k.grad.equal(2 * expected_k)


def test_results_can_be_written_to():
    q = heads(4, 1).requires_grad_()
    k = heads(2, 1, seed=1).requires_grad_()
    rotated = rope_from_cos_sin(q, k, *full_tables(1))
    sum(x.mul_(2).sum() for x in rotated).backward()
    ones = (torch.ones_like(x) for x in (q, k))
    cos, sin = full_tables(1)
    expected = rope_from_cos_sin(*ones, cos, -sin)
    assert all(x.grad.equal(2 * e) for x, e in zip((q, k), expected, strict=True))


# -- where the reference steps in ------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("repeated", [False, True])
def test_tables_that_need_gradients_get_them(repeated, interleaved):
    q, k = heads(2, 3, 6, 1).double(), heads(1, 3, 6, 1, seed=1).double()
    pairs = [c.double().requires_grad_() for c in pair_tables(3, 4)]

    def rotated(*pairs):
        options = {"interleaved": interleaved, "repeated": repeated}
        full = [repeat(c, interleaved) for c in pairs] if repeated else pairs
        return rope_from_cos_sin(q, k, *full, **options)

    assert torch.autograd.gradcheck(rotated, pairs)


def test_other_devices_get_the_reference():
    q, k = (heads(n, 5).to("meta") for n in (4, 2))
    got = rope_from_cos_sin(q, k, *(c.to("meta") for c in full_tables(5)))
    assert [x.shape for x in got] == [q.shape, k.shape]


def test_subclasses_get_the_reference():
    class Other(torch.Tensor):
        pass

    q, k, full = heads(4, 5), heads(2, 5, seed=1), full_tables(5)
    got, _ = rope_from_cos_sin(q.as_subclass(Other), k, *full)
    assert type(got) is Other
    assert got.as_subclass(torch.Tensor).equal(rope_from_cos_sin(q, k, *full)[0])


def test_compiled():
    q, k, full = heads(4, 5), heads(2, 5, seed=1), full_tables(5)
    compiled = torch.compile(rope_from_cos_sin, backend="eager", fullgraph=True)
    for ours, theirs in zip(compiled(q, k, *full), rope_from_cos_sin(q, k, *full), strict=True):
        assert ours.equal(theirs)


def test_transforms_get_the_reference():
    q, full = heads(4, 5), full_tables(5)
    expected = rope_from_cos_sin(q.detach().requires_grad_(), None, *full)[0]
    got = torch.func.vmap(
        torch.func.grad(lambda x: rope_from_cos_sin(x[None], None, *full)[0].sum())
    )
    assert got(q).shape == expected.shape
