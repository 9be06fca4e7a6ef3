"""Norm and rotation in Triton, forwards and backwards, against complex numbers in float64."""

import pytest
import torch
from rotations import (
    DEVICE,
    assert_laid_out_as,
    assert_rounded,
    draw,
    draw_heads,
    frequencies,
    make_rotation,
    relative_error,
)
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.dispatch import can_recompute_from_output
from rope_patch.ops.kernels import autograd
from rope_patch.ops.kernels import launcher as launching
from rope_patch.ops.kernels import qk_norm_rope as launcher

EPS = 1e-6
layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
heads_dims = pytest.mark.parametrize("heads_dim", [1, 2])
forms = pytest.mark.parametrize(
    ("offset", "across"), [(0.0, False), (1.0, False), (0.0, True)], ids=["llama", "gemma", "olmo2"]
)

# Sums over tokens and heads in float32.
OF_A_SUM = 2e-6


def weights_of(heads, head_dim, across=False, offset=0.0, dtype=torch.float32, seed=3, spread=0.3):
    """Around 1, with the offset."""
    shape = (heads, head_dim) if across else (head_dim,)
    return (1 - offset + spread * draw(*shape, seed=seed)).to(dtype).requires_grad_()


def inputs(rotation, heads=3, key_heads=2, head_dim=64, across=False, offset=0.0, **settings):
    """Queries, keys and their weights."""
    settings.setdefault("batch", 1)
    weight_dtype = settings.pop("weight_dtype", torch.float32)
    q, k = (
        draw_heads(n, head_dim, rotation, seed=s, **settings).mul_(2).requires_grad_()
        for n, s in ((heads, 1), (key_heads, 2))
    )
    ws = (
        weights_of(n, head_dim, across, offset, weight_dtype, seed)
        for n, seed in ((heads, 3), (key_heads, 4))
    )
    return q, k, *ws


def truth_of(given, rotation, grads, eps=EPS, offset=0.0):
    """Both outputs and all four gradients, in float64 by PyTorch's own derivatives."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in given]
    out = [
        rotation.true_norm_and_rope(x, w, eps, offset)
        for x, w in zip(leaves[:2], leaves[2:], strict=True)
    ]
    return out, torch.autograd.grad(out, leaves, [g.cpu().double() for g in grads])


def check(given, rotation, grads=None, eps=EPS, offset=0.0, save="input", slack=OF_A_SUM):
    """Both ways, for those that want gradients; returns outputs and gradients."""
    turned = rotation.norm_and_rope(*given, eps=eps, offset=offset, save=save)
    if grads is None:
        grads = [draw(*x.shape, dtype=x.dtype, seed=5 + i) for i, x in enumerate(turned)]
    expected, into = truth_of(given, rotation, grads, eps, offset)
    for got, x, truth in zip(turned, given, expected, strict=False):
        assert_laid_out_as(got, x)
        assert_rounded(got, truth, slack=1e-6)
    wanted = [i for i, x in enumerate(given) if x.requires_grad]
    back = torch.autograd.grad(turned, [given[i] for i in wanted], grads) if wanted else ()
    for got, i in zip(back, wanted, strict=True):
        assert got.dtype == given[i].dtype
        assert_rounded(got, into[i], slack=slack)
    return turned, back


# -- sizes -----------------------------------------------------------------------------------------

SIZES = [
    *((dim, dim) for dim in (64, 80, 96, 112, 128, 256, 512)),
    *((128, 20), (128, 32), (128, 96), (80, 32), (256, 64), (72, 36), (3, 2)),
]


@layouts
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
def test_heads_of_any_size_of_which_any_part_rotates(head_dim, rotary_dim, interleaved):
    rotation = make_rotation(rotary_dim, interleaved=interleaved)
    check(inputs(rotation, head_dim=head_dim), rotation)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 20)])
def test_heads_of_any_size_are_normed_together(head_dim, rotary_dim):
    rotation = make_rotation(rotary_dim)
    check(inputs(rotation, head_dim=head_dim, across=True), rotation)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (40, 8), (7, 12)], ids=str)
@pytest.mark.parametrize(
    ("across", "many"),
    [(False, 0), (False, 10**9), (True, 0)],
    ids=["one program a token", "programs share", "together"],
)
def test_any_number_of_heads(monkeypatch, heads, across, many):
    monkeypatch.setattr(launching, "_MANY", many)
    rotation = make_rotation(128, tokens=1)
    check(inputs(rotation, *heads, head_dim=128, across=across), rotation)


@forms
@pytest.mark.parametrize("tokens", [1, 5])
def test_programs_of_the_backward_pass_take_many_tokens(monkeypatch, tokens, offset, across):
    """More than there are programs, a last round that is not full, and fewer tokens than them."""
    for name in ("_PROGRAMS", "_PROGRAMS_ACROSS"):
        monkeypatch.setattr(launcher, name, 4)
    rotation = make_rotation(48, tokens)
    check(inputs(rotation, across=across, offset=offset), rotation, offset=offset)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 0), (0, 3)])
def test_any_number_of_tokens_and_rows(batch, tokens, across):
    rotation = make_rotation(32, tokens)
    given = inputs(rotation, batch=batch, across=across)
    turned, back = check(given, rotation)
    if not turned[0].numel():
        assert all(x.eq(0).all() for x in back[2:])


# -- forms and dtypes ------------------------------------------------------------------------------


@forms
@layouts
@heads_dims
def test_forms_of_the_norm(offset, across, heads_dim, interleaved):
    rotation = make_rotation(48, heads_dim=heads_dim, interleaved=interleaved, factor=1.25)
    check(inputs(rotation, across=across, offset=offset), rotation, offset=offset)


@forms
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=["wide weights", "narrow"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype, weight_dtype, offset, across):
    rotation = make_rotation(48)
    given = inputs(
        rotation, across=across, offset=offset, dtype=dtype, weight_dtype=weight_dtype or dtype
    )
    turned, back = check(given, rotation, offset=offset)
    assert [x.dtype for x in (*turned, *back)] == [x.dtype for x in given[:2]] + [
        x.dtype for x in given
    ]


def test_queries_and_keys_of_different_dtypes():
    rotation = make_rotation(64)
    q, k, *weights = inputs(rotation)
    q = q.detach().half().requires_grad_()
    check((q, k, *weights), rotation)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("size", [1e-3, 1e3, 0])
def test_eps_matters_where_numbers_are_small(size, eps):
    rotation = make_rotation(48)
    q, k, *weights = inputs(rotation)
    given = [(x.detach() * size).requires_grad_() for x in (q, k)]
    check((*given, *weights), rotation, eps=eps, slack=4e-6)


@pytest.mark.parametrize("across", [False, True])
def test_one_head_of_zeros(across):
    rotation = make_rotation(64)
    given = inputs(rotation, across=across)
    with torch.no_grad():
        given[0][:, :, 1] = 0
    turned, _ = check(given, rotation, slack=4e-6)
    assert turned[0][:, :, 1].eq(0).all()


@forms
def test_weights_of_zero(offset, across):
    rotation = make_rotation(48)
    given = inputs(rotation, across=across, offset=offset)
    with torch.no_grad():
        for weight in given[2:]:
            weight[..., [0, 5, 50]] = -offset
    check(given, rotation, offset=offset)


# -- positions and frequencies ---------------------------------------------------------------------

ROTATIONS = {
    "far": {"positions": torch.tensor([[10_000_000, 2**33, -5], [0, 0, 1]])},
    "narrow": {"positions": torch.tensor([[7, 8, 9]], dtype=torch.int32)},
    "rows": {
        "inv_freq": torch.stack([frequencies(48), frequencies(48, 5e5)]),
        "factor": torch.tensor([1.5, 0.75]),
    },
    "axes": {
        "positions": torch.arange(18).view(3, 2, 3) * 50,
        "sections": (torch.arange(24) % 3).to(torch.int32),
    },
    "no frequency": {"inv_freq": torch.zeros(24)},
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_positions_and_frequencies_of_any_kind(name):
    rotation = make_rotation(48, **ROTATIONS[name])
    check(inputs(rotation, 2, 1, batch=2), rotation)


# -- memory ----------------------------------------------------------------------------------------

B, S, H, D = 2, 2, 3, 64
STRIDED = {
    "a view of BSHD": lambda: draw(B, S, H, D).transpose(1, 2),
    "of packed q, k and v": lambda: draw(B, S, 3 * H, D)[:, :, H : 2 * H].transpose(1, 2),
    "beside a gate": lambda: draw(B, S, H, 2 * D)[..., :D].transpose(1, 2),
    "every other number": lambda: draw(B, H, S, 2 * D)[..., ::2],
    "not aligned": lambda: draw(B * H * S * D + 1)[1:].view(B, H, S, D),
    "repeated heads": lambda: draw(B, 1, S, D).expand(-1, H, -1, -1),
}


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_memory_of_any_kind(name, across):
    interleaved, heads_dim = across, 2 if across else 1
    rotation = make_rotation(48, S, heads_dim=heads_dim, interleaved=interleaved)
    q, k = STRIDED[name](), draw(B, H, S, D, seed=1)
    q, k = (x if heads_dim == 1 else x.transpose(1, 2) for x in (q, k))
    q, k = (k, q) if across else (q, k)
    weights = (weights_of(H, D, across, seed=s) for s in (3, 4))
    given = (q.detach().requires_grad_(), k.detach().requires_grad_(), *weights)
    check(given, rotation, grads=(k, q))


@pytest.mark.parametrize("across", [False, True])
def test_gradients_of_a_sum_have_no_memory_of_their_own(across):
    rotation = make_rotation(48)
    given = inputs(rotation, across=across)
    sum(x.sum() for x in rotation.norm_and_rope(*given, eps=EPS)).backward()
    ones = [torch.ones(()).expand(x.shape) for x in given[:2]]
    for x, truth in zip(given, truth_of(given, rotation, ones)[1], strict=True):
        assert_rounded(x.grad, truth, slack=OF_A_SUM)


@pytest.mark.parametrize("name", ["heads", "tokens"])
def test_heads_further_apart_than_32_bits_count(name):
    """Both ways; in 8 GB of which almost nothing is touched."""
    try:
        memory = torch.empty(2**32 + 2**20, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no room")
    heads, tokens = (5, 1) if name == "heads" else (1, 5)
    strides = (64, 64, 2**29, 1) if name == "heads" else (64, 2**29, 64, 1)
    q = memory.as_strided((1, tokens, heads, 64), strides, 2**31)
    q.copy_(draw(*q.shape, dtype=torch.float16))
    rotation = make_rotation(48, tokens)
    given = [x.detach().requires_grad_() for x in (q, *inputs(rotation, heads, 1)[1:])]
    check(given, rotation, grads=(q.detach(), given[1].detach()))


# -- what is wanted --------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["0111", "1011", "1100", "0011", "1000", "0001", "0000"])
def test_gradients_of_some_of_them(wanted):
    """Among these: frozen weights, and weights that are trained alone."""
    rotation = make_rotation(48)
    given = [x.requires_grad_(w == "1") for x, w in zip(inputs(rotation), wanted, strict=True)]
    turned, _ = check(given, rotation)
    assert any(x.requires_grad for x in turned) == ("1" in wanted)


@pytest.mark.parametrize("save", ["input", "output"])
def test_only_one_of_the_two_is_used(save):
    rotation = make_rotation(48)
    given = inputs(rotation)
    turned = rotation.norm_and_rope(*given, eps=EPS, save=save)
    grad = draw(*turned[1].shape, seed=6)
    torch.autograd.backward(turned[1], grad)
    expected = truth_of(given, rotation, (torch.zeros(turned[0].shape), grad))[1]
    for x, truth in zip(given, expected, strict=True):
        assert_rounded(x.grad, truth, slack=4e-6)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_training_after_inference(mode):
    rotation = make_rotation(48)
    given = inputs(rotation)
    with mode():
        before = rotation.norm_and_rope(*given, eps=EPS)
    assert not any(x.requires_grad for x in before)
    for one, other in zip(check(given, rotation)[0], before, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("save", ["input", "output"])
def test_checkpoints(save, reentrant):
    rotation = make_rotation(48)

    def run(through):
        given = inputs(rotation)
        through(lambda *x: rotation.norm_and_rope(*x, eps=EPS, save=save), given).backward()
        return [x.grad for x in given]

    def attended(f, given):
        return sum(x.square().sum() for x in f(*given))

    got = run(lambda f, given: checkpoint(attended, f, given, use_reentrant=False))
    if reentrant:
        got = run(
            lambda f, given: sum(
                x.square().sum() for x in checkpoint(f, *given, use_reentrant=True)
            )
        )
    for one, other in zip(got, run(attended), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("across", [False, True])
def test_gradients_are_the_same_bits_each_time(monkeypatch, across):
    monkeypatch.setattr(launcher, "_PROGRAMS", 4)
    monkeypatch.setattr(launcher, "_PROGRAMS_ACROSS", 4)
    rotation = make_rotation(48)
    given = inputs(rotation, across=across)
    once, again = (check(given, rotation)[1] for _ in range(2))
    for one, other in zip(once, again, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("save", ["input", "output"])
@pytest.mark.parametrize("changed", ["x", "weight", "positions", "packed_freqs", "sections"])
def test_what_changed_before_the_backward_pass_is_an_error(changed, save):
    rotation = make_rotation(48, 1)
    q, k, *weights = inputs(rotation)
    given = {
        "positions": torch.zeros(3, 1, 1, dtype=torch.int64, device=DEVICE),
        "packed_freqs": rotation.turns,
        "sections": (torch.arange(24) % 3).to(DEVICE),
    }
    x, weight = q * 1, weights[0] * 1
    turned = ops.qk_norm_rope(
        x, k, weight, weights[1], **given, eps=EPS, save=save, kernels="triton"
    )
    # Where the output is kept, what goes in may change, and what comes out may not.
    if changed == "x" and save == "output":
        x.add_(1)
        torch.autograd.grad(turned[0].sum(), q, retain_graph=True)
        x = turned[0]
    given = {**given, "x": x, "weight": weight}
    with torch.no_grad():
        given[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        turned[1].sum().backward()


@pytest.mark.parametrize("save", ["input", "output"])
def test_derivatives_of_the_second_order_are_an_error(save):
    rotation = make_rotation(48, tokens=1)
    given = inputs(rotation)
    turned = rotation.norm_and_rope(*given, eps=EPS, save=save)
    (back,) = torch.autograd.grad(turned[0].square().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        back.sum().backward()


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("save", ["input", "output"])
def test_next_to_nothing_is_kept_beside_the_output(save, across):
    rotation = make_rotation(64)
    given = inputs(rotation, 4, 2, across=across, dtype=torch.float16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        turned = rotation.norm_and_rope(*given, eps=EPS, save=save)
    known = {x.data_ptr() for x in (*given[2:], *turned)}
    added = [x for x in kept if x.data_ptr() not in known and x.dtype != torch.int64]
    rstd = (2 * 4) * (2 if across else 4 + 2)  # tokens, bytes of float32, heads
    through = sum(x.nbytes for x in given[:2]) if save == "input" else 0
    assert sum(x.nbytes for x in added) == rstd + through
    assert {x.data_ptr() for x in given[:2]} <= {x.data_ptr() for x in kept} or save == "output"


@forms
@layouts
def test_gradients_by_the_output_are_close_where_weights_are_alike(interleaved, offset, across):
    """Within 1 +- 0.1, as they are after training; by as much as x itself is rounded."""
    dtype = torch.bfloat16 if interleaved else torch.float16
    rotation = make_rotation(48, interleaved=interleaved, factor=1.2)
    given = inputs(rotation, across=across, offset=offset, dtype=dtype)
    with torch.no_grad():
        for weight in given[2:]:
            weight.copy_(1 - offset + 0.1 * draw(*weight.shape).clamp(-2, 2))
    turned = rotation.norm_and_rope(*given, eps=EPS, offset=offset, save="output")
    assert all(x.grad_fn.settings[-1] for x in turned)  # by the output indeed
    grads = [draw(*x.shape, dtype=dtype, seed=6) for x in turned]
    _, truth = truth_of(given, rotation, grads, offset=offset)
    for got, expected in zip(torch.autograd.grad(turned, given, grads), truth, strict=True):
        assert relative_error(got, expected) < 2 * torch.finfo(dtype).eps


@forms
def test_gradients_by_the_output_are_right_in_float32(offset, across):
    """Where rounding is none, so that all else is seen: parts, padding, signs."""
    rotation = make_rotation(40, interleaved=across, factor=0.7)
    given = inputs(rotation, 5, 1, 80, across=across, offset=offset)
    turned, _ = check(given, rotation, offset=offset, save="output", slack=2e-5)
    assert turned[0].grad_fn.settings[-1] is True


def spread_far(given):
    """The same with weights that are lognormal."""
    with torch.no_grad():
        for seed, weight in enumerate(given[2:]):
            weight.copy_((2 * draw(*weight.shape, seed=seed)).exp())
    return given


def by_output(rotation, given, rederive):
    """Gradients without the question whether weights allow it."""
    turns, positions = rotation.turns, rotation.positions.to(DEVICE)
    rest = (positions, turns, None, EPS, 0.0, rotation.interleaved, 2, rederive)
    turned = autograd.QKNormRope.apply(*given, *rest)
    grads = [draw(*x.shape, dtype=x.dtype, seed=6) for x in turned]
    _, truth = truth_of(given, rotation, grads)
    got = torch.autograd.grad(turned, given, grads)
    return [relative_error(x, expected) for x, expected in zip(got, truth, strict=True)]


def test_gradients_by_the_output_would_be_wrong_where_weights_are_spread():
    """So they are not taken: those of weights would lose a digit even to the rounding of x."""
    rotation = make_rotation(64)
    given = spread_far(inputs(rotation, dtype=torch.bfloat16))
    assert max(by_output(rotation, given, False)[2:]) < 1e-5
    assert max(by_output(rotation, given, True)[2:]) > 5e-3
    turned = rotation.norm_and_rope(*given, eps=EPS, save="output")
    assert turned[0].grad_fn.settings[-1] is False
    check(given, rotation, save="output")


@forms
@pytest.mark.parametrize("place", [0, 50], ids=["in a pair", "in none"])
def test_weights_of_zero_need_the_input(place, offset, across):
    rotation = make_rotation(48)
    given = inputs(rotation, across=across, offset=offset)
    with torch.no_grad():
        given[3][..., place] = -offset
    turned, _ = check(given, rotation, offset=offset, save="output")
    assert turned[0].grad_fn.settings[-1] is False


def test_weights_next_to_zero_need_the_input():
    """Alike as they may be: float16 has no bits for such outputs."""
    rotation = make_rotation(48)
    given = inputs(rotation, dtype=torch.float16)
    with torch.no_grad():
        given[2].mul_(1e-6)
        given[3].mul_(1e-6)
    assert max(by_output(rotation, given, True)[2:]) > 5e-3
    check(given, rotation, save="output")


class TestWhetherWeightsAllowTheOutput:
    """`can_recompute_from_output`."""

    TURNS = ops.pack_frequencies(frequencies(4))

    @pytest.mark.parametrize(
        ("weight", "halves", "neighbours"),
        [
            ([1.0, 1.1, 0.9, 1.0, 1.2], True, True),
            ([-1.0, 1.1, 0.9, -1.0, 1.2], True, True),
            ([1.0, 100.0, 1.0, 100.0, 1.0], True, False),
            ([1.0, 1.0, 100.0, 100.0, 1.0], False, True),
            ([1.0, 1.0, 1.0, 1.0, 1e6], True, True),  # what does not rotate is in no pair
            ([1.0, 1.0, 1.0, 1.0, 0.0], False, False),
            ([1.0, 0.0, 1.0, 0.0, 1.0], False, False),
            ([1.0, 63.0, 63.0, 1.0, 1.0], True, True),
            ([1.0, 65.0, 65.0, 1.0, 1.0], False, False),
            ([1.0, 1.0, float("nan"), 1.0, 1.0], False, False),
            ([1.0, float("inf"), 1.0, float("inf"), 1.0], False, False),
        ],
    )
    def test_by_the_ratios_of_pairs(self, weight, halves, neighbours):
        good, weight = torch.ones(5), torch.tensor(weight)
        for interleaved, expected in ((False, halves), (True, neighbours)):
            settings = {"interleaved": interleaved}
            assert can_recompute_from_output(weight, good, self.TURNS, **settings) is expected
            assert can_recompute_from_output(good, weight, self.TURNS, **settings) is expected
            both = torch.stack([good, weight])
            assert can_recompute_from_output(good[None], both, self.TURNS, **settings) is expected

    def test_with_the_offset(self):
        weight = torch.zeros(5)
        assert can_recompute_from_output(weight, weight, self.TURNS, offset=1.0)
        assert not can_recompute_from_output(weight - 1, weight, self.TURNS, offset=1.0)

    def test_where_nothing_rotates(self):
        assert can_recompute_from_output(torch.ones(5), torch.ones(5), self.TURNS[-1:])
