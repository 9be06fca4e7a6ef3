"""Test rotation, with and without norms, in Triton: results and gradients against float64."""

import pytest
import torch
from checked_ops import ACROSS, GEMMA, NORM, OPS, ROPE, Op, each, slow
from helpers.exact_rotation import DEVICE, assert_rounded, draw, frequencies, make_rotation

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import launcher, qk_norm_rope, qk_norm_rope_kernels

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
FORMS = (NORM, GEMMA, ACROSS)


# -- sizes -----------------------------------------------------------------------------------------

# Of a head, and how much of it rotates: powers of two, others, a part, and the least.
SIZES = [
    *((64, 64), (80, 32), (128, 20), (3, 2)),
    *slow(*((dim, dim) for dim in (2, 80, 96, 112, 128, 256, 512))),
    *slow((128, 32), (128, 96), (80, 20), (96, 72), (112, 56), (64, 48), (256, 64), (256, 192)),
    *slow((512, 128), (72, 36), (65, 64)),
]


@layouts
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
@each(ROPE, NORM)
def test_head_and_rotary_sizes(op, head_dim, rotary_dim, interleaved):
    rotation = make_rotation(rotary_dim, interleaved=interleaved)
    inputs = op.draw(rotation, head_dim=head_dim)
    outputs, _ = op.check(inputs, rotation)
    if op is ROPE:
        for got, x in zip(outputs, inputs, strict=True):
            assert got[..., rotary_dim:].equal(x[..., rotary_dim:])


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 20)])
def test_sizes_with_norms_across_heads(head_dim, rotary_dim):
    rotation = make_rotation(rotary_dim)
    ACROSS.check(ACROSS.draw(rotation, head_dim=head_dim), rotation)


@pytest.mark.parametrize(
    ("heads", "key_heads"),
    [(9, 3), *slow((1, 1), (5, 1), (40, 8), (48, 4), (56, 8), (2, 17))],
)
@pytest.mark.parametrize(
    ("limit", "one_head_limit"),
    [(0, 0), (10**9, 0), (10**9, 1)],
    ids=["one program a token", "programs share", "one program a head"],
)
@each(ROPE, NORM, ACROSS)
def test_numbers_of_heads(monkeypatch, op, heads, key_heads, limit, one_head_limit):
    """Use one program for all heads of a token, as with many tokens, and several programs."""
    monkeypatch.setattr(launcher, "_ONE_PROGRAM_TOKENS", limit)
    monkeypatch.setattr(launcher, "_ONE_HEAD_TOKENS", one_head_limit)
    rotation = make_rotation(128, tokens=1)
    op.check(op.draw(rotation, (heads, key_heads), head_dim=128), rotation)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (2, 3), (2, 0), (0, 3)])
@each(ROPE, NORM, ACROSS)
def test_numbers_of_tokens_and_rows(op, batch, tokens):
    rotation = make_rotation(32, tokens, heads_dim=1)
    outputs, grads = op.check(op.draw(rotation, batch=batch), rotation)
    if not outputs[0].numel():
        assert not any(x.any() for x in grads)


@pytest.mark.parametrize("tokens", [1, 5])
@each(NORM, ACROSS)
def test_backward_programs_handle_several_tokens(monkeypatch, op, tokens):
    """Use more tokens than programs, a partial last round, and fewer tokens than programs."""
    for name in ("_PROGRAMS", "_PROGRAMS_ALL_HEADS"):
        monkeypatch.setattr(qk_norm_rope, name, 4)
    monkeypatch.setattr(qk_norm_rope_kernels, "_ELEMENTS", 128)  # 2 of the programs' rows at once
    rotation = make_rotation(48, tokens)
    first, second = (op.check(op.draw(rotation), rotation)[1] for _ in range(2))
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))


def test_queries_without_keys():
    rotation = make_rotation(64)
    assert rotation.rope(ROPE.draw(rotation)[0])[1] is None
    ROPE.check(ROPE.draw(rotation, heads=(3,)), rotation)


def test_no_pairs_change_nothing():
    rotation = make_rotation(0)
    inputs = ROPE.draw(rotation)
    assert all(got.equal(x) for got, x in zip(rotation.rope(*inputs), inputs, strict=True))


# -- dtypes and numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=["float16", "bfloat16", "bfloat16 with wide weights"],
)
@each(ROPE, NORM, ACROSS)
def test_16_bit_results_are_rounded_once(op, dtype, weight_dtype):
    heads_dim, interleaved = (2, False) if op.normed else (1, dtype == torch.bfloat16)
    rotation = make_rotation(48, heads_dim=heads_dim, interleaved=interleaved)
    op.check(op.draw(rotation, dtype=dtype, weight_dtype=weight_dtype), rotation)


@pytest.mark.parametrize("narrow", [0, 1], ids=["queries", "keys"])
@each(ROPE, NORM)
def test_queries_and_keys_of_different_dtypes(op, narrow):
    rotation = make_rotation(48)
    inputs = op.draw(rotation)
    inputs[narrow] = inputs[narrow].detach().half().requires_grad_()
    op.check(inputs, rotation)


@pytest.mark.parametrize(
    ("heads_dim", "interleaved"),
    [(1, False), (2, True), *slow((1, True), (2, False))],
    ids=["1, halves", "2, neighbours", "1, neighbours", "2, halves"],
)
@each(*OPS.values())
def test_forms_and_layouts(op, heads_dim, interleaved):
    rotation = make_rotation(48, heads_dim=heads_dim, interleaved=interleaved, factor=1.25)
    op.check(op.draw(rotation), rotation)


@pytest.mark.parametrize(("size", "eps"), [(1e-3, 1e-6), (1e3, 1e-2), (0, 1e-6)])
def test_eps_with_small_and_large_numbers(size, eps):
    rotation = make_rotation(48)
    q, k, *weights = NORM.draw(rotation)
    inputs = [(x.detach() * size).requires_grad_() for x in (q, k)]
    NORM.check([*inputs, *weights], rotation, eps=eps, slack=4e-6)


@each(*FORMS)
def test_a_head_and_weights_of_zero(op):
    rotation = make_rotation(48)
    inputs = op.draw(rotation)
    with torch.no_grad():
        inputs[0][:, :, 1] = 0
        for weight in inputs[2:]:
            weight[..., [0, 5, 50]] = -op.offset
    outputs, _ = op.check(inputs, rotation, slack=4e-6)
    assert outputs[0][:, :, 1].eq(0).all()


# -- positions and frequencies ---------------------------------------------------------------------

NUMBERS = torch.arange(24, device=DEVICE)
IN_TURN = torch.arange(24) % 3
ROTATIONS = {
    "negative": {"positions": torch.tensor([[-3, -2, -1], [-(10**9), 3, -1]])},
    "far": {"positions": torch.tensor([[10_000_000, 2**35, -(2**31) - 9], [0, 0, 2**32 + 1]])},
    "narrow": {"positions": torch.tensor([2**31 - 1, -77, 131_072], dtype=torch.int32)},
    "a row": {"positions": NUMBERS[None, :3]},
    "expanded": {"positions": NUMBERS[:3].expand(2, -1)},
    "every other": {"positions": NUMBERS.view(2, 12)[:, 1:7:2]},
    "transposed": {"positions": NUMBERS[:6].view(3, 2).t().int()},
    "axes": {"positions": NUMBERS[:18].view(3, 2, 3) * 50, "sections": IN_TURN.int()},
    "axes in blocks": {
        "positions": NUMBERS[:9].view(3, 1, 3) * 99,
        "sections": IN_TURN.sort().values.to(torch.int8),
        "interleaved": True,
        "heads_dim": 1,
    },
    "strided axes": {"positions": NUMBERS.view(4, 2, 3).permute(2, 1, 0), "sections": IN_TURN},
    "axes last": {"positions": NUMBERS.view(2, 4, 3).permute(2, 0, 1), "sections": IN_TURN},
    "rows": {
        "inv_freq": torch.stack([frequencies(48), frequencies(48, 5e5)]),
        "factor": torch.tensor([1.5, 0.75]),
    },
    "negative factor": {"factor": -1.0},
    "no frequency": {"inv_freq": torch.zeros(24)},
}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *((ROPE, name) for name in ROTATIONS),
        *((NORM, name) for name in ("far", "axes", "rows")),
        *slow((NORM, "narrow"), (NORM, "no frequency")),
    ],
    ids=lambda x: ("rope" if x is ROPE else "norm") if isinstance(x, Op) else x,
)
def test_kinds_of_positions_and_frequencies(op, name):
    rotation = make_rotation(48, **ROTATIONS[name])
    op.check(op.draw(rotation, (2, 1), batch=2), rotation)


@pytest.mark.parametrize("shape", ["one row", "expanded", "of a larger tensor"])
def test_memory_layouts_of_frequencies(shape):
    packed_freqs = ops.pack_frequencies(frequencies(64)).to(DEVICE)
    packed_freqs = {
        "one row": packed_freqs[None],
        "expanded": packed_freqs.expand(2, -1),
        "of a larger tensor": torch.stack([packed_freqs, -packed_freqs]).repeat(2, 1)[::2],
    }[shape]
    rotation = make_rotation(64)
    x, _ = ROPE.draw(rotation, batch=2)
    got, _ = ops.rope(x, None, rotation.positions.to(DEVICE), packed_freqs, kernels="triton")
    assert_rounded(got, rotation.true_rope(x))


@layouts
def test_zero_frequencies_keep_the_bits(interleaved):
    """As in Gemma 4, all dimensions are in pairs, but most do not rotate."""
    inv_freq = torch.cat([frequencies(16), torch.zeros(24)])
    rotation = make_rotation(0, inv_freq=inv_freq, interleaved=interleaved)
    inputs = ROPE.draw(rotation, dtype=torch.float16)
    unrotated = list(range(16, 64)) if interleaved else [*range(8, 32), *range(40, 64)]
    for got, x in zip(ROPE.check(inputs, rotation)[0], inputs, strict=True):
        assert got[..., unrotated].equal(x[..., unrotated])
        assert not got.equal(x)


# -- memory ----------------------------------------------------------------------------------------

B, S, H, D = 2, 2, 3, 64
MEMORY = {  # of [B, H, S, D]
    "a view of BSHD": lambda: draw(B, S, H, D).transpose(1, 2),
    "of packed q, k and v": lambda: draw(B, S, 3 * H, D)[:, :, H : 2 * H].transpose(1, 2),
    "beside a gate": lambda: draw(B, S, H, 2 * D)[..., :D].transpose(1, 2),
    "every other number": lambda: draw(B, H, S, 2 * D)[..., ::2],
    "dimensions first": lambda: draw(B, D, S, H).permute(0, 3, 2, 1),
    "tokens first": lambda: draw(S, B, H, D).permute(1, 2, 0, 3),
    "not aligned": lambda: draw(B * H * S * D + 1)[1:].view(B, H, S, D),
    "not aligned rows": lambda: draw(B, H, S, D + 1)[..., :D],
    "repeated heads": lambda: draw(B, 1, S, D).expand(-1, H, -1, -1),
}


@pytest.mark.parametrize(
    ("op", "heads_dim", "name"),
    [
        *((ROPE, 1, name) for name in MEMORY),
        *((ROPE, 2, name) for name in ("beside a gate", "dimensions first", "repeated heads")),
        *((NORM, 1, name) for name in ("of packed q, k and v", "not aligned", "repeated heads")),
        *((ACROSS, 2, name) for name in ("every other number", "not aligned", "repeated heads")),
        *slow(*((op, n, m) for op, n in ((ROPE, 2), (NORM, 1), (ACROSS, 2)) for m in MEMORY)),
    ],
    ids=lambda x: ("rope" if x is ROPE else "norm") if isinstance(x, Op) else str(x),
)
def test_memory_layouts(op, heads_dim, name):
    interleaved = heads_dim == 2
    rotation = make_rotation(48, S, heads_dim=heads_dim, interleaved=interleaved)
    q, k = MEMORY[name](), draw(B, H, S, D, seed=1)
    q, k = (x if heads_dim == 1 else x.transpose(1, 2) for x in (q, k))
    q, k = (k, q) if interleaved else (q, k)
    weights = [op.draw_weight(H, D, seed) for seed in (3, 4)] if op.normed else []
    inputs = [q.detach().requires_grad_(), k.detach().requires_grad_(), *weights]
    op.check(inputs, rotation, grads=(k, q))  # each has the memory layout of the other input


@each(ROPE, NORM, ACROSS)
def test_expanded_gradients_of_a_sum(op):
    rotation = make_rotation(48)
    inputs = op.draw(rotation)
    sum(x.sum() for x in op.apply(inputs, rotation)).backward()
    ones = [torch.ones(()).expand(x.shape) for x in inputs[:2]]
    for x, truth in zip(inputs, op.truth(inputs, rotation, ones)[1], strict=True):
        assert_rounded(x.grad, truth, slack=2e-6)


@pytest.fixture
def memory():
    """Return 8 GB of memory, of which almost nothing is touched."""
    try:
        return torch.empty(2**32 + 2**20, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no room")


@pytest.mark.parametrize("far", ["heads", "tokens", "rows"])
@pytest.mark.parametrize("op", [ROPE, NORM, "rerotate_"], ids=["rope", "norm", "rerotate_"])
def test_offsets_beyond_32_bits(memory, op, far):
    dim = {"rows": 0, "tokens": 1, "heads": 2}[far]
    sizes, strides = [1, 1, 1, 64], [64, 64, 64, 1]
    sizes[dim], strides[dim] = 5, 2**29
    # Start in the middle, so that an offset that wraps around stays inside the memory.
    x = memory.as_strided(sizes, strides, 2**31)
    x.copy_(draw(*sizes, dtype=torch.float16))
    rotation = make_rotation(48, sizes[1])
    if op == "rerotate_":
        packed = [ops.pack_frequencies(frequencies(48) / n).to(DEVICE) for n in (1, 3)]
        expected, positions = x.clone(), rotation.positions.to(DEVICE)
        for keys in (x, expected):
            ops.rerotate_([keys.transpose(1, 2)], positions, *packed, kernels="triton")
        assert x.equal(expected)
        return
    others = op.draw(rotation, (sizes[2], 1), batch=sizes[0])[1:]
    inputs = [x.detach().requires_grad_(), *others]
    op.check(inputs, rotation, grads=(x, others[0].detach()))
