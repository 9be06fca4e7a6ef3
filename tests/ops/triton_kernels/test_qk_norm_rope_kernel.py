"""Test norm and rotation in Triton against complex float64: sizes, forms, positions, memory."""

import pytest
import torch
from helpers.exact_rotation import DEVICE, assert_rounded, draw, frequencies, make_rotation
from qk_norm_rope_checks import EPS, SUM_SLACK, check, float64_results, make_inputs, make_weight

pytest.importorskip("triton")

from rope_patch.ops.kernels import launcher, qk_norm_rope

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
heads_dims = pytest.mark.parametrize("heads_dim", [1, 2])
forms = pytest.mark.parametrize(
    ("offset", "across"), [(0.0, False), (1.0, False), (0.0, True)], ids=["llama", "gemma", "olmo2"]
)


# -- sizes -----------------------------------------------------------------------------------------

SIZES = [
    *((dim, dim) for dim in (64, 80, 96, 112, 128, 256, 512)),
    *((128, 20), (128, 32), (128, 96), (80, 32), (256, 64), (72, 36), (3, 2)),
]


@layouts
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
def test_head_and_rotary_sizes(head_dim, rotary_dim, interleaved):
    rotation = make_rotation(rotary_dim, interleaved=interleaved)
    check(make_inputs(rotation, head_dim=head_dim), rotation)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 20)])
def test_sizes_with_norms_across_heads(head_dim, rotary_dim):
    rotation = make_rotation(rotary_dim)
    check(make_inputs(rotation, head_dim=head_dim, across=True), rotation)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (40, 8), (7, 12)], ids=str)
@pytest.mark.parametrize(
    ("across", "limit", "one_head_limit"),
    [(False, 0, 0), (False, 10**9, 0), (False, 10**9, 1), (True, 0, 0)],
    ids=["one program a token", "programs share", "one program a head", "together"],
)
def test_numbers_of_heads(monkeypatch, heads, across, limit, one_head_limit):
    monkeypatch.setattr(launcher, "_ONE_PROGRAM_TOKENS", limit)
    monkeypatch.setattr(launcher, "_ONE_HEAD_TOKENS", one_head_limit)
    rotation = make_rotation(128, tokens=1)
    check(make_inputs(rotation, *heads, head_dim=128, across=across), rotation)


@forms
@pytest.mark.parametrize("tokens", [1, 5])
def test_backward_programs_handle_several_tokens(monkeypatch, tokens, offset, across):
    """Use more tokens than programs, a partial last round, and fewer tokens than programs."""
    for name in ("_PROGRAMS", "_PROGRAMS_ALL_HEADS"):
        monkeypatch.setattr(qk_norm_rope, name, 4)
    rotation = make_rotation(48, tokens)
    check(make_inputs(rotation, across=across, offset=offset), rotation, offset=offset)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 0), (0, 3)])
def test_numbers_of_tokens_and_rows(batch, tokens, across):
    rotation = make_rotation(32, tokens)
    inputs = make_inputs(rotation, batch=batch, across=across)
    outputs, back = check(inputs, rotation)
    if not outputs[0].numel():
        assert all(x.eq(0).all() for x in back[2:])


# -- forms and dtypes ------------------------------------------------------------------------------


@forms
@layouts
@heads_dims
def test_forms_of_the_norm(offset, across, heads_dim, interleaved):
    rotation = make_rotation(48, heads_dim=heads_dim, interleaved=interleaved, factor=1.25)
    check(make_inputs(rotation, across=across, offset=offset), rotation, offset=offset)


@forms
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=["wide weights", "narrow"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_results_are_rounded_once(dtype, weight_dtype, offset, across):
    rotation = make_rotation(48)
    inputs = make_inputs(
        rotation, across=across, offset=offset, dtype=dtype, weight_dtype=weight_dtype or dtype
    )
    outputs, back = check(inputs, rotation, offset=offset)
    assert [x.dtype for x in (*outputs, *back)] == [x.dtype for x in inputs[:2]] + [
        x.dtype for x in inputs
    ]


def test_queries_and_keys_of_different_dtypes():
    rotation = make_rotation(64)
    q, k, *weights = make_inputs(rotation)
    q = q.detach().half().requires_grad_()
    check((q, k, *weights), rotation)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("size", [1e-3, 1e3, 0])
def test_eps_with_small_and_large_numbers(size, eps):
    rotation = make_rotation(48)
    q, k, *weights = make_inputs(rotation)
    inputs = [(x.detach() * size).requires_grad_() for x in (q, k)]
    check((*inputs, *weights), rotation, eps=eps, slack=4e-6)


@pytest.mark.parametrize("across", [False, True])
def test_one_head_of_zeros(across):
    rotation = make_rotation(64)
    inputs = make_inputs(rotation, across=across)
    with torch.no_grad():
        inputs[0][:, :, 1] = 0
    outputs, _ = check(inputs, rotation, slack=4e-6)
    assert outputs[0][:, :, 1].eq(0).all()


@forms
def test_weights_of_zero(offset, across):
    rotation = make_rotation(48)
    inputs = make_inputs(rotation, across=across, offset=offset)
    with torch.no_grad():
        for weight in inputs[2:]:
            weight[..., [0, 5, 50]] = -offset
    check(inputs, rotation, offset=offset)


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
def test_kinds_of_positions_and_frequencies(name):
    rotation = make_rotation(48, **ROTATIONS[name])
    check(make_inputs(rotation, 2, 1, batch=2), rotation)


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
def test_memory_layouts(name, across):
    interleaved, heads_dim = across, 2 if across else 1
    rotation = make_rotation(48, S, heads_dim=heads_dim, interleaved=interleaved)
    q, k = STRIDED[name](), draw(B, H, S, D, seed=1)
    q, k = (x if heads_dim == 1 else x.transpose(1, 2) for x in (q, k))
    q, k = (k, q) if across else (q, k)
    weights = (make_weight(H, D, across, seed=s) for s in (3, 4))
    inputs = (q.detach().requires_grad_(), k.detach().requires_grad_(), *weights)
    check(inputs, rotation, grads=(k, q))


@pytest.mark.parametrize("across", [False, True])
def test_expanded_gradients_of_a_sum(across):
    rotation = make_rotation(48)
    inputs = make_inputs(rotation, across=across)
    sum(x.sum() for x in rotation.norm_and_rope(*inputs, eps=EPS)).backward()
    ones = [torch.ones(()).expand(x.shape) for x in inputs[:2]]
    for x, truth in zip(inputs, float64_results(inputs, rotation, ones)[1], strict=True):
        assert_rounded(x.grad, truth, slack=SUM_SLACK)


@pytest.mark.parametrize("name", ["heads", "tokens"])
def test_offsets_beyond_32_bits(name):
    """Run both passes in 8 GB of memory, of which almost nothing is touched."""
    try:
        memory = torch.empty(2**32 + 2**20, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no room")
    heads, tokens = (5, 1) if name == "heads" else (1, 5)
    strides = (64, 64, 2**29, 1) if name == "heads" else (64, 2**29, 64, 1)
    q = memory.as_strided((1, tokens, heads, 64), strides, 2**31)
    q.copy_(draw(*q.shape, dtype=torch.float16))
    rotation = make_rotation(48, tokens)
    inputs = [x.detach().requires_grad_() for x in (q, *make_inputs(rotation, heads, 1)[1:])]
    check(inputs, rotation, grads=(q.detach(), inputs[1].detach()))
