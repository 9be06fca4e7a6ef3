"""Test `rope_into_cache` against complex float64, in Triton and in plain torch."""

from dataclasses import replace

import pytest
import torch
from checked_ops import slow
from helpers.exact_rotation import DEVICE, assert_laid_out_as, assert_rounded, draw, draw_heads
from helpers.exact_rotation import make_rotation as make

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import cache_write, launcher

EPS, START, SLOTS = 1e-6, 3, 9


def make_heads(rotation, heads=3, key_heads=2, head_dim=16, value_dim=None, batch=2, **settings):
    """Return queries, keys and values."""
    dims = (head_dim, head_dim, value_dim or head_dim)
    return [
        draw_heads(n, dim, rotation, seed=seed, batch=batch, **settings)
        for seed, n, dim in zip((1, 2, 3), (heads, key_heads, key_heads), dims, strict=True)
    ]


def make_caches(rotation, k, v, slots=SLOTS):
    """Return caches full of numbers."""
    heads = k.shape[rotation.heads_dim]
    return [
        draw(x.shape[0], heads, slots, x.shape[-1], seed=seed, dtype=x.dtype)
        for x, seed in ((k, 7), (v, 8))
    ]


def write(rotation, qkv, caches, start=START, norms=None, kernels="triton", **settings):
    if norms is not None:
        settings |= {"q_weight": norms[0], "k_weight": norms[1], "eps": EPS}
    start = torch.tensor(start, device=DEVICE)
    where = (start, rotation.positions.to(DEVICE), rotation.packed_freqs)
    return ops.rope_into_cache(
        *qkv, *caches, *where, kernels=kernels, **rotation.settings, **settings
    )


def check(rotation, qkv, norms=None, kernels="triton", offset=0.0, slots=SLOTS):
    """Check queries and both caches, and that all other slots keep their bits."""
    caches = make_caches(rotation, *qkv[1:], slots=slots)
    before = [x.clone() for x in caches]
    q = write(rotation, qkv, caches, norms=norms, kernels=kernels, offset=offset)
    if norms is None:
        true_q, true_k = (rotation.true_rope(x) for x in qkv[:2])
    else:
        true_q, true_k = (
            rotation.true_norm_and_rope(x, w, EPS, offset)
            for x, w in zip(qkv[:2], norms, strict=True)
        )
    slack = 4e-7 if norms is None else 1e-6
    assert_laid_out_as(q, qkv[0])
    assert_rounded(q, true_q, slack=slack)
    tokens = qkv[0].shape[3 - rotation.heads_dim]
    heads_first = 2 if rotation.heads_dim == 1 else 1
    expected_keys, expected_values = (
        x if heads_first == 2 else x.transpose(1, 2) for x in (true_k, qkv[2])
    )
    written = slice(START, START + tokens)
    assert_rounded(caches[0][:, :, written], expected_keys, slack=slack)
    assert caches[1][:, :, written].equal(expected_values)
    for cache, old in zip(caches, before, strict=True):
        assert cache[:, :, :START].equal(old[:, :, :START])
        assert cache[:, :, START + tokens :].equal(old[:, :, START + tokens :])


def make_norms(qkv, rotation, across=False, offset=0.0):
    return [
        1 - offset + 0.3 * draw(*((x.shape[rotation.heads_dim],) if across else ()), x.shape[-1])
        for x in qkv[:2]
    ]


@pytest.mark.parametrize(
    ("heads_dim", "dtype", "norm"),
    [
        (1, torch.float32, "each"),
        (1, torch.bfloat16, None),
        (2, torch.float16, "across"),
        (2, torch.bfloat16, "each"),
        *slow((2, torch.float32, None), (1, torch.float16, "each"), (1, torch.bfloat16, "across")),
    ],
)
def test_layouts_norms_and_dtypes(heads_dim, dtype, norm):
    rotation = make(16, heads_dim=heads_dim)
    qkv = make_heads(rotation, dtype=dtype)
    norms = make_norms(qkv, rotation, norm == "across", offset=1.0) if norm else None
    check(rotation, qkv, norms, offset=1.0 if norm else 0.0)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("rotary_dim", "head_dim", "value_dim", "interleaved"),
    [
        (20, 80, 24, True),
        *slow((64, 64, 64, False), (32, 80, 80, False), (128, 128, 128, True)),
        *slow((256, 256, 256, False)),
    ],
)
def test_head_sizes(rotary_dim, head_dim, value_dim, interleaved, norm):
    rotation = make(rotary_dim, heads_dim=1, interleaved=interleaved)
    qkv = make_heads(rotation, 5, 1, head_dim, value_dim, batch=1, dtype=torch.bfloat16)
    check(rotation, qkv, make_norms(qkv, rotation) if norm else None)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_plain_torch(heads_dim, norm, kernels):
    rotation = make(12, heads_dim=heads_dim, interleaved=True)
    qkv = make_heads(rotation, value_dim=8)
    check(rotation, qkv, make_norms(qkv, rotation) if norm else None, kernels=kernels)


@pytest.mark.parametrize("norm", [None, "each", "across"])
def test_many_tokens(monkeypatch, norm):
    """From so many tokens on, one program takes all heads of a token."""
    monkeypatch.setattr(launcher, "_ONE_PROGRAM_TOKENS", 2)
    rotation = make(128, tokens=2, heads_dim=1)
    qkv = make_heads(rotation, 9, 5, 128, batch=1)
    check(rotation, qkv, make_norms(qkv, rotation, norm == "across") if norm else None)


def test_positions_and_frequencies_of_rows_and_axes():
    rotation = make(16, heads_dim=1)
    rows = replace(
        rotation,
        positions=torch.tensor([[5, 6], [900, 901]]),
        inv_freq=torch.stack([rotation.inv_freq, rotation.inv_freq / 4]),
        factor=torch.tensor([1.0, 1.2]),
    )
    check(rows, make_heads(rows))
    axes = replace(
        rotation,
        positions=torch.tensor([[[5, 6]], [[70, 80]], [[900, 2]]]).expand(3, 2, 2),
        sections=torch.arange(8) % 3,
    )
    check(axes, make_heads(axes))


def test_views_of_a_fused_projection():
    """Queries, keys and values are views of one tensor, and so are the caches."""
    rotation = make(16, heads_dim=1)
    packed = draw(2, 2, (3 + 2 + 2) * 16, seed=4)
    qkv = [x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in packed.split((48, 32, 32), dim=-1)]
    both = draw(2, SLOTS, 2, 2, 16, seed=5)
    caches = [both[:, :, i].transpose(1, 2) for i in (0, 1)]
    kept = packed.clone()
    q = write(rotation, qkv, caches)
    assert_rounded(q, rotation.true_rope(qkv[0]))
    assert_rounded(caches[0][:, :, START : START + 2], rotation.true_rope(qkv[1]))
    assert caches[1][:, :, START : START + 2].equal(qkv[2])
    assert packed.equal(kept)


@pytest.mark.parametrize("norm", [False, True])
def test_queries_are_written_in_place(norm):
    rotation = make(12, heads_dim=1)
    qkv = make_heads(rotation)
    norms = make_norms(qkv, rotation) if norm else None
    expected = write(rotation, qkv, make_caches(rotation, *qkv[1:]), norms=norms)
    version = qkv[0]._version
    got = write(rotation, qkv, make_caches(rotation, *qkv[1:]), norms=norms, out=qkv[0])
    assert got is qkv[0]
    assert got.equal(expected)
    assert got._version > version


@pytest.mark.parametrize("norm", [None, "across"])
@pytest.mark.parametrize("start", [SLOTS - 1, -1, 2**40])
def test_tokens_past_the_end_touch_no_memory(start, norm):
    rotation = make(12, heads_dim=1)
    qkv = make_heads(rotation)
    # The caches lie between guards, and rows lie behind one another.
    memory = draw(2, 3, 2, 2, SLOTS, 16, seed=6)
    before, caches = memory.clone(), (memory[0, 1], memory[1, 1])
    norms = make_norms(qkv, rotation, norm == "across") if norm else None
    q = write(rotation, qkv, caches, start=start, norms=norms)
    fitting = [i for i in range(2) if 0 <= start + i < SLOTS]
    for token in range(2):
        assert q[:, :, token, :12].isnan().all() == (token not in fitting)
    for token in fitting:
        for cache, old in ((memory[0, 1], before[0, 1]), (memory[1, 1], before[1, 1])):
            assert not cache[:, :, start + token].equal(old[:, :, start + token])
            cache[:, :, start + token] = old[:, :, start + token]
    assert memory.equal(before)


def test_plain_torch_raises_past_the_end():
    rotation = make(12, heads_dim=1)
    qkv = make_heads(rotation)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        write(rotation, qkv, make_caches(rotation, *qkv[1:]), start=SLOTS - 1, kernels="auto")


def test_one_launch_writes_everything(monkeypatch):
    launches = []
    call = launcher.Launcher.__call__
    monkeypatch.setattr(
        launcher.Launcher, "__call__", lambda self, *a: (launches.append(self), call(self, *a))
    )
    rotation = make(16, heads_dim=1)
    qkv = make_heads(rotation)
    check(rotation, qkv, make_norms(qkv, rotation))
    assert launches == [cache_write._launcher]


def test_other_dtypes_of_caches_are_written_after_the_rotation():
    rotation = make(16, heads_dim=1)
    qkv = make_heads(rotation)
    caches = [x.bfloat16() for x in make_caches(rotation, *qkv[1:])]
    write(rotation, qkv, caches)
    assert caches[0][:, :, START : START + 2].equal(rotation.rope(*qkv[:2])[1].to(torch.bfloat16))


@pytest.mark.skipif(not ops.is_interpreted(), reason="a CPU needs the interpreter")
def test_inference_tensors_are_written():
    with torch.inference_mode():
        rotation = make(16, heads_dim=1)
        check(rotation, make_heads(rotation))


REFUSED = {
    "values": (lambda q, k, v, *caches: ((q, k, v[:, :1]), caches, {}), "v must be"),
    "value cache": (lambda q, k, v, a, b: ((q, k, v), (a, b[:, :, 1:]), {}), "value_cache"),
    "key cache": (lambda q, k, v, a, b: ((q, k, v), (a[:1], b), {}), "key_cache"),
    "start": (lambda *x: (x[:3], x[3:], {"start": 1.0}), "int32 or int64"),
    "starts": (lambda *x: (x[:3], x[3:], {"start": [1, 2]}), "one int32"),
    "out": (lambda *x: (x[:3], x[3:], {"out": x[0][:1]}), "out must be like q"),
    "a norm": (lambda *x: (x[:3], x[3:], {"q_weight": torch.ones(16)}), "given together"),
    "gradients": (lambda q, k, v, *c: ((q, k, v.clone().requires_grad_()), c, {}), "no gradients"),
}


@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused(name, kernels):
    rotation = make(16, heads_dim=1)
    qkv = make_heads(rotation)
    change, fact = REFUSED[name]
    given, caches, settings = change(*qkv, *make_caches(rotation, *qkv[1:]))
    with pytest.raises(ValueError, match=fact):
        write(rotation, given, caches, kernels=kernels, **settings)


# -- memory that overlaps --------------------------------------------------------------------------


def one_buffer(rotation, heads=4):
    """Return queries, and keys that are values, too, as slices of one tensor."""
    buffer = draw(2, 3, heads + 2, 16, seed=5)
    return buffer, buffer[:, :, :heads], buffer[:, :, heads:]


@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("target", ["values", "queries", "shifted queries"])
def test_out_may_overlap_inputs(kernels, with_norms, target):
    rotation = make(16, tokens=3)
    norms = (draw(16, seed=8), draw(16, seed=9)) if with_norms else None
    buffer, q, k = one_buffer(rotation)
    fresh = [x.clone() for x in (q, k, k)]
    caches = make_caches(rotation, k, k)
    expected_caches = [x.clone() for x in caches]
    expected = write(rotation, fresh, expected_caches, norms=norms, kernels="reference")
    out = {"values": buffer[:, :, 2:], "queries": q, "shifted queries": buffer[:, :, 1:5]}[target]
    got = write(rotation, (q, k, k), caches, norms=norms, kernels=kernels, out=out)
    assert got is out
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for cache, other in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_expanded_memory_is_refused(kernels, which):
    """Also after a call with the same shapes and memory of its own."""
    rotation = make(16, tokens=3)
    qkv = make_heads(rotation)
    caches = make_caches(rotation, *qkv[1:])
    written = [*caches, torch.empty_like(qkv[0])]
    write(rotation, qkv, caches, kernels=kernels, out=written[2])
    written[which] = written[which][:1].expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match="memory of its own"):
        write(rotation, qkv, written[:2], kernels=kernels, out=written[2])


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_weights_that_require_gradients_are_refused(kernels):
    rotation = make(16, tokens=3)
    qkv = make_heads(rotation)
    norms = [draw(16, seed=s).requires_grad_() for s in (8, 9)]
    caches = make_caches(rotation, *qkv[1:])
    with pytest.raises(ValueError, match="no gradients"):
        write(rotation, qkv, caches, norms=norms, kernels=kernels)
    with torch.no_grad():
        write(rotation, qkv, caches, norms=norms, kernels=kernels)


@pytest.mark.parametrize("kernels", ["triton", "reference", "auto"])
@pytest.mark.parametrize("op", ["rope", "qk_norm_rope"])
def test_inplace_refuses_memory_that_overlaps(kernels, op):
    rotation = make(16, tokens=3)
    buffer, q, k = one_buffer(rotation)
    rest = {"positions": rotation.positions.to(DEVICE), "packed_freqs": rotation.packed_freqs}
    if op == "qk_norm_rope":
        rest |= {"q_weight": draw(16, seed=8), "k_weight": draw(16, seed=9), "eps": EPS}
    call = getattr(ops, op)
    call(q, k, **rest, inplace=True, kernels=kernels)  # slices of one tensor, apart
    for pair in ((buffer[:, :, 1:5], buffer[:, :, 4:]), (q[:1].expand(2, -1, -1, -1), k.clone())):
        with pytest.raises(ValueError, match="overlap"):
            call(*pair, **rest, inplace=True, kernels=kernels)


def test_memory_is_shared_only_where_elements_are():
    """Compare with the addresses of all elements."""
    base = torch.arange(2 * 6 * 8 * 4)
    views = [base.view(2, 6, 8, 4)[:, :, a:b] for a, b in ((0, 4), (4, 6), (6, 8), (3, 5))] + [
        base.view(2, 6, 8, 4)[:1],
        base.view(2, 6, 8, 4)[1:],
        base.view(2, 8, 6, 4).mT[:, 1:3],
    ]
    for x in views:
        assert not ops.overlaps_itself(x)
        assert ops.overlaps_itself(x[..., :1].expand(*x.shape[:3], 5))
        for y in views:
            if set(x.flatten().tolist()) & set(y.flatten().tolist()):
                assert ops.may_share_memory(x, y)
    assert not ops.may_share_memory(views[0], views[1])
    assert not ops.may_share_memory(views[2], views[1])
    assert not ops.may_share_memory(views[4], views[5])
