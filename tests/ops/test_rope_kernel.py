"""Rotation in Triton, forwards and backwards, against complex numbers in float64."""

import pytest
import torch
from rotations import (
    DEVICE,
    Rotation,
    assert_laid_out_as,
    assert_rounded,
    draw,
    draw_heads,
    frequencies,
    make_rotation,
)
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import autograd
from rope_patch.ops.kernels import launcher as launching
from rope_patch.ops.kernels import rope as launcher

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
heads_dims = pytest.mark.parametrize("heads_dim", [1, 2])


def check(q, k, rotation, grads=None):
    """Both ways, for those of the two that want gradients; returns what came out."""
    given = [x for x in (q, k) if x is not None]
    turned = [x for x in rotation.rope(q, k) if x is not None]
    assert len(turned) == len(given)
    for got, x in zip(turned, given, strict=True):
        assert_laid_out_as(got, x)
        assert_rounded(got, rotation.true_rope(x))
    wanted = [i for i, x in enumerate(given) if x.requires_grad]
    if not wanted:
        return turned
    if grads is None:
        grads = [draw(*x.shape, dtype=x.dtype, seed=5 + i) for i, x in enumerate(turned)]
    # A view of a leaf has a gradient of its own, laid out as the view is.
    back = torch.autograd.grad(turned, [given[i] for i in wanted], grads)
    for got, i in zip(back, wanted, strict=True):
        assert got.dtype == given[i].dtype
        assert_rounded(got, transposed(rotation, given[i], grads[i]))
    return turned


def transposed(rotation, x, grad):
    """The gradient in float64, by PyTorch's own derivative of complex numbers."""
    leaf = x.detach().cpu().double().requires_grad_()
    return torch.autograd.grad(rotation.true_rope(leaf), leaf, grad.cpu().double())[0]


def pair(rotation, heads=3, key_heads=2, head_dim=64, grad=True, **settings):
    return (
        draw_heads(heads, head_dim, rotation, seed=1, grad=grad, **settings),
        draw_heads(key_heads, head_dim, rotation, seed=2, grad=grad, **settings),
    )


# -- sizes -----------------------------------------------------------------------------------------

SIZES = [
    *((dim, dim) for dim in (64, 80, 96, 112, 128, 256, 512)),
    *((128, 20), (128, 32), (128, 96), (80, 20), (80, 32), (96, 72), (112, 56), (64, 48)),
    *((256, 64), (256, 192), (512, 128), (72, 36), (2, 2), (3, 2), (65, 64)),
]


@layouts
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
def test_heads_of_any_size_of_which_any_part_rotates(head_dim, rotary_dim, interleaved):
    rotation = make_rotation(rotary_dim, tokens=2, interleaved=interleaved)
    q, k = pair(rotation, head_dim=head_dim, batch=1)
    turned = check(q, k, rotation)
    for got, x in zip(turned, (q, k), strict=True):
        assert got[..., rotary_dim:].equal(x[..., rotary_dim:])


@layouts
@heads_dims
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 20)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype, head_dim, rotary_dim, heads_dim, interleaved):
    rotation = make_rotation(rotary_dim, 2, heads_dim=heads_dim, interleaved=interleaved)
    check(*pair(rotation, head_dim=head_dim, dtype=dtype, batch=1), rotation)


@pytest.mark.parametrize("spread", [True, False], ids=["programs share", "one program a token"])
@pytest.mark.parametrize(
    ("heads", "key_heads"), [(1, 1), (5, 1), (9, 3), (40, 8), (48, 4), (56, 8), (2, 17)]
)
def test_any_number_of_heads(monkeypatch, heads, key_heads, spread):
    """One program takes all heads of a token where there are many tokens."""
    monkeypatch.setattr(launching, "_MANY", 10**9 if spread else 0)
    rotation = make_rotation(128, tokens=1)
    check(*pair(rotation, heads, key_heads, 128, batch=1), rotation)


@heads_dims
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (1, 7), (2, 0), (0, 3), (0, 0)])
def test_any_number_of_tokens_and_rows(batch, tokens, heads_dim):
    rotation = make_rotation(32, tokens, heads_dim=heads_dim)
    check(*pair(rotation, batch=batch), rotation)


def test_nothing_rotates_where_there_are_no_pairs():
    rotation = make_rotation(0)
    given = pair(rotation, grad=False)
    for got, x in zip(rotation.rope(*given), given, strict=True):
        assert got.equal(x)


# -- positions -------------------------------------------------------------------------------------

POSITIONS = {
    "left-padded": [[0, 0, 0, 1, 2], [1, 1, 0, 1, 2]],
    "packed": [[0, 1, 2, 0, 1], [0, 0, 1, 0, 1]],
    "negative": [[-3, -2, -1, 0, 1], [-(10**9), -77, 3, -1, 0]],
    "millions": [[10_000_000, 10_000_001, 999_999, 131_072, 0], [2**31 - 1, 5, 4, 3, 2]],
    "billions": [[2**31, 2**31 + 5, 2**32 + 1, 2**33, -(2**31) - 9], [1, 2**32, 3, 4, 2**35]],
}
DTYPES = [torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_of_any_kind(name, dtype):
    positions = torch.tensor(POSITIONS[name], dtype=torch.int64)
    if name != "billions":  # which do not fit
        positions = positions.to(dtype)
    heads_dim = 1 if dtype == torch.int32 else 2
    rotation = make_rotation(64, positions=positions, heads_dim=heads_dim)
    check(*pair(rotation, 2, 1), rotation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", ["[S]", "[1, S]", "[B, S]", "expanded", "every other", "transposed"]
)
def test_positions_of_any_shape(shape, dtype):
    numbers = torch.arange(20, dtype=dtype, device=DEVICE)
    positions = {
        "[S]": numbers[:3],
        "[1, S]": numbers[None, :3],
        "[B, S]": numbers.view(2, 10)[:, :3],
        "expanded": numbers[:3].expand(2, -1),
        "every other": numbers.view(2, 10)[:, 1:7:2],
        "transposed": numbers[:6].view(3, 2).t(),
    }[shape]
    rotation = make_rotation(64, positions=positions)
    check(*pair(rotation), rotation)


SECTIONS = {
    "blocks": torch.tensor([0] * 8 + [1] * 12 + [2] * 12),
    "in turn": torch.arange(32) % 3,
    "two axes": torch.arange(32) % 2,
}


@layouts
@heads_dims
@pytest.mark.parametrize("name", SECTIONS)
def test_sections_turn_by_their_own_axis(name, heads_dim, interleaved):
    rows = 1 if heads_dim == 1 else 2
    rotation = make_rotation(
        64,
        positions=torch.arange(3 * rows * 4).view(3, rows, 4) * 99,
        sections=SECTIONS[name].to(torch.int8 if interleaved else torch.int64),
        heads_dim=heads_dim,
        interleaved=interleaved,
    )
    check(*pair(rotation), rotation)


@pytest.mark.parametrize("dims", [(2, 1, 0), (0, 2, 1), (1, 2, 0)])
def test_positions_on_axes_of_any_strides(dims):
    shape = [(3, 2, 4)[i] for i in dims]
    positions = torch.arange(24, device=DEVICE).view(shape)
    positions = positions.permute([dims.index(i) for i in range(3)])
    assert positions.shape == (3, 2, 4)
    rotation = make_rotation(64, positions=positions, sections=SECTIONS["in turn"])
    check(*pair(rotation), rotation)


# -- frequencies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.3465736, 0.5, -1.0])
def test_attention_factors_scale_what_rotates(factor):
    rotation = make_rotation(32, factor=factor)
    check(*pair(rotation), rotation)


@heads_dims
def test_rows_have_frequencies_and_factors_of_their_own(heads_dim):
    inv_freq = torch.stack([frequencies(64, 1e4), frequencies(64, 5e5)])
    rotation = make_rotation(
        64, inv_freq=inv_freq, factor=torch.tensor([1.0, 1.5]), heads_dim=heads_dim
    )
    check(*pair(rotation), rotation)


@pytest.mark.parametrize("shape", ["one row", "expanded", "of a larger tensor"])
def test_frequencies_in_memory_of_their_own(shape):
    turns = ops.pack_frequencies(frequencies(64)).to(DEVICE)
    turns = {
        "one row": turns[None],
        "expanded": turns.expand(2, -1),
        "of a larger tensor": torch.stack([turns, -turns]).repeat(2, 1)[::2],
    }[shape]
    rotation = make_rotation(64)
    for x in pair(rotation, grad=False):
        turned, _ = ops.rope(x, None, rotation.positions.to(DEVICE), turns, kernels="triton")
        assert_rounded(turned, rotation.true_rope(x))


@layouts
def test_frequencies_of_zero_leave_the_bits(interleaved):
    """Gemma 4's proportional rotation: all dimensions are in pairs, and most do not turn."""
    inv_freq = torch.cat([frequencies(16), torch.zeros(24)])
    rotation = make_rotation(0, inv_freq=inv_freq, interleaved=interleaved)
    q, k = pair(rotation, head_dim=64, dtype=torch.float16)
    still = list(range(16, 64)) if interleaved else [*range(8, 32), *range(40, 64)]
    for got, x in zip(check(q, k, rotation), (q, k), strict=True):
        assert got[..., still].equal(x[..., still])
        assert not got.equal(x)


# -- memory ----------------------------------------------------------------------------------------

B, S, H, D = 2, 2, 3, 64


def strided(name, dtype=torch.float32, seed=0):
    """`[B, H, S, D]` in memory of many kinds."""
    if name == "a view of BSHD":
        return draw(B, S, H, D, dtype=dtype, seed=seed).transpose(1, 2)
    if name == "contiguous":
        return draw(B, H, S, D, dtype=dtype, seed=seed)
    if name == "of packed q, k and v":
        packed = draw(B, S, 3 * H * D, dtype=dtype, seed=seed)
        return packed[..., H * D : 2 * H * D].view(B, S, H, D).transpose(1, 2)
    if name == "beside a gate":
        return draw(B, S, H, 2 * D, dtype=dtype, seed=seed)[..., :D].transpose(1, 2)
    if name == "every other number":
        return draw(B, H, S, 2 * D, dtype=dtype, seed=seed)[..., ::2]
    if name == "dimensions first":
        return draw(B, D, S, H, dtype=dtype, seed=seed).permute(0, 3, 2, 1)
    if name == "not aligned":
        return draw(B * H * S * D + 1, dtype=dtype, seed=seed)[1:].view(B, H, S, D)
    if name == "not aligned rows":
        return draw(B, H, S, D + 1, dtype=dtype, seed=seed)[..., :D]
    if name == "repeated heads":
        return draw(B, 1, S, D, dtype=dtype, seed=seed).expand(-1, H, -1, -1)
    assert name == "tokens first"
    return draw(S, B, H, D, dtype=dtype, seed=seed).permute(1, 2, 0, 3)


STRIDED = [
    *("a view of BSHD", "contiguous", "of packed q, k and v", "beside a gate", "tokens first"),
    *("every other number", "dimensions first", "not aligned", "not aligned rows"),
    "repeated heads",
]


@layouts
@heads_dims
@pytest.mark.parametrize("name", STRIDED)
def test_memory_of_any_kind(name, heads_dim, interleaved):
    rotation = make_rotation(48, S, heads_dim=heads_dim, interleaved=interleaved)
    q, k = strided(name, seed=1), strided("contiguous", seed=2)
    q, k = (x if heads_dim == 1 else x.transpose(1, 2) for x in (q, k))
    q, k = (k, q) if interleaved else (q, k)
    # The gradient of the one is in such memory as the other.
    check(q.detach().requires_grad_(), k.detach().requires_grad_(), rotation, grads=(k, q))


def test_gradients_of_a_sum_have_no_memory_of_their_own():
    rotation = make_rotation(64)
    q, k = pair(rotation)
    turned_q, turned_k = rotation.rope(q, k)
    (turned_q.sum() + turned_k.sum(dim=(1, 3)).square().sum()).backward()
    ones = torch.ones(()).expand(q.shape)
    assert_rounded(q.grad, transposed(rotation, q, ones))
    along = 2 * rotation.true_rope(k.detach()).sum(dim=(1, 3), keepdim=True)
    assert_rounded(k.grad, transposed(rotation, k, along.expand(k.shape)))


@pytest.mark.parametrize("name", ["heads", "tokens", "rows"])
def test_heads_further_apart_than_32_bits_count(name):
    """Four numbers lie in 8 GB of which almost nothing is touched."""
    try:
        memory = torch.empty(2**32 + 2**20, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no room")
    # In the middle, so that an index that wraps around would still be inside.
    dim = ["rows", "tokens", "heads"].index(name)
    sizes, strides = [1, 1, 1, 64], [64, 64, 64, 1]
    sizes[dim], strides[dim] = 5, 2**29
    x = memory.as_strided(sizes, strides, 2**31)
    x.copy_(draw(*x.shape, dtype=torch.float16))
    check(x, None, make_rotation(48, x.shape[1]))


# -- what is wanted --------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_gradients_of_one_of_the_two(wanted):
    rotation = make_rotation(64)
    q, k = (x.detach().requires_grad_(w) for x, w in zip(pair(rotation), wanted, strict=True))
    turned = check(q, k, rotation)
    assert any(wanted) == any(x.requires_grad for x in turned)


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_what_is_wanted_is_rotated_back(monkeypatch, wanted):
    rotation, rotate, rotated = make_rotation(64), launcher.rope, []
    given = pair(rotation, grad=False)
    given[wanted].requires_grad_()
    turned = rotation.rope(*given)

    def noting(q, k, *how):
        rotated.append((q, k))
        return rotate(q, k, *how)

    monkeypatch.setattr(launcher, "rope", noting)
    sum(x.sum() for x in turned).backward()
    ((x, other),) = rotated
    assert x.shape == given[wanted].shape
    assert other is None


def test_queries_alone():
    rotation = make_rotation(64)
    q, _ = pair(rotation)
    assert rotation.rope(q)[1] is None
    check(q, None, rotation)


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_of_the_two_is_used(used):
    rotation = make_rotation(64)
    given = pair(rotation)
    rotation.rope(*given)[used].square().sum().backward()
    assert given[1 - used].grad is None
    expected = transposed(rotation, given[used], 2 * rotation.true_rope(given[used].detach()))
    assert_rounded(given[used].grad, expected, slack=1e-6)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_queries_and_keys_of_different_dtypes(dtypes):
    rotation = make_rotation(48)
    q, k = (draw_heads(2, 64, rotation, dtype=d, grad=True) for d in dtypes)
    check(q, k, rotation)


# -- autograd --------------------------------------------------------------------------------------


@layouts
def test_derivatives_of_the_second_order(interleaved):
    rotation = make_rotation(48, factor=1.5, interleaved=interleaved)
    given = pair(rotation)
    grads = [draw(*x.shape, seed=7, grad=True) for x in given]
    back = torch.autograd.grad(rotation.rope(*given), given, grads, create_graph=True)
    twice = torch.autograd.grad([b.square().sum() for b in back], grads)
    for got, grad, x in zip(twice, grads, given, strict=True):
        leaf = grad.detach().cpu().double().requires_grad_()
        (expected,) = torch.autograd.grad(rotation.true_rope(leaf, True).square().sum(), leaf)
        assert_rounded(got, expected, slack=1e-6)
        assert x.grad is None


@pytest.mark.filterwarnings("ignore:.*is not a double precision")
def test_numerical_derivatives():
    """In float32, where those of a linear function are exact but for rounding."""
    rotation = make_rotation(2, 1, factor=1.25)
    given = [draw_heads(1, 3, rotation, batch=1, seed=s, grad=True) for s in (1, 2)]
    close = {"eps": 0.125, "atol": 1e-4, "rtol": 1e-4}
    torch.autograd.gradcheck(rotation.rope, given, **close)
    torch.autograd.gradgradcheck(rotation.rope, given, **close)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    rotation = make_rotation(64)
    q, k = pair(rotation)

    def attended(q, k):
        turned_q, turned_k = rotation.rope(q * 2, k * 3)
        return turned_q.square().sum() + turned_k.square().sum()

    expected = torch.autograd.grad(attended(q, k), (q, k))
    got = torch.autograd.grad(checkpoint(attended, q, k, use_reentrant=False), (q, k))
    if reentrant:
        checkpoint(attended, q, k, use_reentrant=True).backward()
        got = q.grad, k.grad
    for one, other in zip(got, expected, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_training_after_inference(mode):
    rotation = make_rotation(64)
    q, k = pair(rotation)
    with mode():
        before = rotation.rope(q, k)
    assert not any(x.requires_grad for x in before)
    for one, other in zip(check(q, k, rotation), before, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("changed", ["positions", "turns", "sections"])
def test_what_changed_before_the_backward_pass_is_an_error(changed):
    given = {
        "positions": torch.arange(6, device=DEVICE).view(3, 1, 2),
        "turns": ops.pack_frequencies(frequencies(64)).to(DEVICE),
        "sections": (torch.arange(32) % 3).to(DEVICE),
    }
    q = draw(1, 2, 2, 64, grad=True)
    turned, _ = ops.rope(q, **given, kernels="triton")
    given[changed] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        turned.sum().backward()


def test_what_was_rotated_may_change_before_the_backward_pass():
    """Nothing of it is kept."""
    rotation = make_rotation(64)
    leaf = draw_heads(2, 64, rotation, grad=True)
    q = leaf * 1
    turned, _ = rotation.rope(q)
    q.mul_(3)
    (got,) = torch.autograd.grad(turned.sum(), leaf)
    assert_rounded(got, transposed(rotation, leaf, torch.ones(leaf.shape)))


def test_nothing_but_positions_and_turns_is_kept():
    rotation = make_rotation(64)
    q, k = pair(rotation)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        rotation.rope(q, k)
    assert {x.dtype for x in kept} == {torch.int64}


# -- in place --------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("rotary_dim", [64, 20])
def test_in_place(rotary_dim, interleaved):
    rotation = make_rotation(rotary_dim, interleaved=interleaved)
    leaves = pair(rotation)
    q, k = (x * 1 for x in leaves)
    was = [x._version for x in (q, k)]
    settings = (rotation.positions.to(DEVICE), rotation.turns, None, interleaved, 2, False, True)
    turned = autograd.Rope.apply(q, k, *settings)
    grads = [draw(*x.shape, seed=5) for x in turned]
    back = torch.autograd.grad(turned, leaves, grads)
    for x, got, leaf, grad, into, version in zip(
        (q, k), turned, leaves, grads, back, was, strict=True
    ):
        assert got.data_ptr() == x.data_ptr()
        assert x._version > version
        assert_rounded(x, rotation.true_rope(leaf.detach()))
        assert_rounded(into, transposed(rotation, leaf, grad))


def test_in_place_over_what_another_gradient_needs_is_an_error():
    rotation = make_rotation(64)
    leaf = draw_heads(2, 64, rotation, grad=True)
    needed = leaf.exp()
    settings = (rotation.positions.to(DEVICE), rotation.turns, None, False, 2, False, True)
    turned, _ = autograd.Rope.apply(needed, None, *settings)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        turned.sum().backward()


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "queries-alone"])
def test_in_place_is_the_same_and_keeps_what_does_not_rotate(kernels, keys):
    q, k = torch.randn(2, 3, 5, 80), torch.randn(2, 3, 1, 80) if keys else None
    positions, turns = torch.arange(3), ops.pack_frequencies(0.9 ** torch.arange(16))
    expected = ops.rope(q, k, positions, turns, kernels=kernels)
    got = ops.rope(q, k, positions, turns, kernels=kernels, inplace=True)
    assert got[0] is q
    assert got[1] is k
    for a, b in zip(got, expected, strict=True):
        assert a is b or a.equal(b)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_in_place_autograd_sees_what_happens(kernels):
    positions, turns = torch.arange(3), ops.pack_frequencies(0.9 ** torch.arange(4))
    x = torch.randn(2, 3, 2, 8, requires_grad=True)
    grad = torch.randn_like(x)
    out, _ = ops.rope(x * 1, None, positions, turns, kernels=kernels)
    again, _ = ops.rope(x * 1, None, positions, turns, kernels=kernels, inplace=True)
    assert torch.autograd.grad(out, x, grad)[0].equal(torch.autograd.grad(again, x, grad)[0])
    with pytest.raises(RuntimeError, match="leaf"):
        ops.rope(x, None, positions, turns, kernels=kernels, inplace=True)
    wanted = x.exp()  # its gradient needs what it was
    ops.rope(wanted, None, positions, turns, kernels=kernels, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wanted.sum().backward()
    with torch.no_grad():
        wanted = x.exp()
    y = x * wanted
    ops.rope(wanted, None, positions, turns, kernels=kernels, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@layouts
def test_backwards_undoes_it(interleaved):
    rotation = make_rotation(48, interleaved=interleaved)
    q, k = pair(rotation, grad=False)
    settings = (rotation.positions.to(DEVICE), rotation.turns, None, interleaved, 2)
    for got, x in zip(launcher.rope(*rotation.rope(q, k), *settings, True), (q, k), strict=True):
        torch.testing.assert_close(got, x, rtol=0, atol=2e-6)


def test_a_rotation_does_not_touch_what_goes_in():
    rotation = make_rotation(64)
    q, k = pair(rotation, grad=False)
    was = q.clone(), k.clone()
    rotation.rope(q, k)
    assert q.equal(was[0])
    assert k.equal(was[1])


def test_a_score_depends_on_distance_alone():
    """At ten million tokens as at none, which float32 angles lose by half a radian."""
    q, k = (draw(1, 1, 1, 128, seed=s) for s in (1, 2))
    inv_freq, scores = frequencies(128, 5e5), []
    for start in (0, 131_072, 10_000_000, 2**33):
        near, far = (Rotation(torch.tensor([start + d]), inv_freq) for d in (0, 1000))
        scores.append((far.rope(q)[0] * near.rope(k)[0]).sum().item())
    assert max(scores) - min(scores) < 1e-5 * 128
