"""Test launch arguments and the reuse of launches; Triton is mocked.

Tensors are on the meta device, so that they can have any size.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from mock_kernel import mock_launcher

from rope_patch.ops.kernels import launcher, qk_norm_rope, qk_norm_rope_kernels, rope

DTYPE = torch.bfloat16


@pytest.fixture
def launches(monkeypatch):
    """Mock all kernels, as on a GPU; `launches.rope` and so on record launches."""
    monkeypatch.setattr(launcher, "_ONE_HEAD_TOKENS", 16)
    monkeypatch.setattr(qk_norm_rope_kernels, "_FEW_COLUMNS", 4)
    recorder = SimpleNamespace()
    for name, module, attribute in (
        ("rope", rope, "_launcher"),
        ("forward", qk_norm_rope, "_forward_launcher"),
        ("backward", qk_norm_rope, "_backward_launcher"),
        ("sum", qk_norm_rope_kernels, "_sum_launcher"),
    ):
        setattr(recorder, name, mock_launcher(monkeypatch, module, attribute))
    return recorder


def empty(*shape, dtype=DTYPE):
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape, dtype=torch.int64):
    return empty(*shape, dtype=dtype)


def rope_inputs(batch=2, tokens=4, heads=4, key_heads=2, dim=64):
    return {
        "q": empty(batch, tokens, heads, dim),
        "k": empty(batch, tokens, key_heads, dim),
        "positions": integers(tokens),
        "packed_freqs": integers(33),
        "sections": None,
        "interleaved": False,
        "heads_dim": 2,
        "conjugate": False,
    }


def forward_inputs(**sizes):
    arguments = rope_inputs(**sizes)
    del arguments["conjugate"]
    weights = {f"{x}_weight": empty(arguments[x].shape[-1]) for x in ("q", "k")}
    return {**arguments, **weights, "eps": 1e-6, "offset": 0.0, "save": True}


def backward_inputs(**sizes):
    arguments = forward_inputs(**sizes)
    del arguments["eps"], arguments["save"]
    for x in ("q", "k"):
        arguments[f"{x}_grad"] = torch.empty_like(arguments[x])
        arguments[f"{x}_rstd"] = empty(*arguments[x].shape[:3], dtype=torch.float32)
    return {**arguments, "recompute_input": False}


KERNELS = {
    "rope": (rope.launch, rope_inputs),
    "forward": (qk_norm_rope.launch_forward, forward_inputs),
    "backward": (qk_norm_rope.launch_backward, backward_inputs),
}
kernels = pytest.mark.parametrize("name", KERNELS)


@kernels
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_arguments_match_the_kernel_signature(launches, name, heads_dim):
    function, inputs = KERNELS[name]
    arguments = inputs() | {"heads_dim": heads_dim}
    for x in ("q", "k", "q_grad", "k_grad"):
        if x in arguments and heads_dim == 1:
            arguments[x] = arguments[x].transpose(1, 2)
    function(**arguments)
    (call,) = getattr(launches, name).slow
    names = list(inspect.signature(getattr(launches, name).fn).parameters)
    args = dict(zip(names, call.args, strict=False))
    assert names[len(call.args) :] == list(call.constants)
    assert [n for n, x in args.items() if isinstance(x, torch.Tensor)] == names[
        : names.index("tokens" if name == "backward" else "S" if name == "rope" else "eps")
    ]
    assert (args["S"], args["H"], args["K"]) == (4, 4, 2)
    assert [args[f"q_{x}"] for x in "bshd"] == [4 * 4 * 64, 4 * 64, 64, 1]
    assert [args[f"ko_{x}"] for x in "bshd"] == [4 * 2 * 64, 2 * 64, 64, 1]
    assert [args[f"positions_{x}"] for x in "abs"] == [0, 0, 1]
    assert args["freqs_b"] == 0
    if name == "backward":
        assert args["tokens"] == 8
        assert [args[f"kg_{x}"] for x in "bshd"] == [4 * 2 * 64, 2 * 64, 64, 1]


@kernels
def test_equal_launch_is_reused(launches, name):
    function, inputs = KERNELS[name]
    function(**inputs())
    other = inputs()
    function(**other)
    recorder = getattr(launches, name)
    (slow,), (fast,) = recorder.slow, recorder.fast
    assert fast.grid == slow.grid
    assert any(x is other["q"] for x in fast.args)
    count = len([x for x in slow.args if isinstance(x, torch.Tensor)])
    assert fast.args[count:] == (*slow.args[count:], *slow.constants.values())


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_triton_get_launches(launches, name):
    """With a hook, as profilers install one, Triton itself launches and describes the launch."""
    hooks = getattr(launcher.triton.knobs.runtime, name)

    def hook(_):
        raise AssertionError("a mock calls no hooks")

    rope.launch(**rope_inputs())
    hooks.add(hook)
    try:
        rope.launch(**rope_inputs())
    finally:
        hooks.remove(hook)
    rope.launch(**rope_inputs())
    (slow,), (fast,), (hooked,) = launches.rope.slow, launches.rope.fast, launches.rope.hooked
    assert hooked.grid == fast.grid == slow.grid
    assert hooked.args[7:] == fast.args[7:]
    assert len(hooked.args) == len(fast.args)


CHANGES = {
    "another dtype": lambda x: {"q": x["q"].float(), "k": x["k"].float()},
    "other strides": lambda x: {"q": empty(2, 4, 4, 128)[..., :64]},
    "keys of other strides": lambda x: {"k": empty(2, 4, 2, 128)[..., :64]},
    "more heads": lambda x: {"q": empty(2, 4, 5, 64)},
    "other rows of positions": lambda x: {"positions": integers(2, 4)},
    "positions of other strides": lambda x: {"positions": integers(8)[::2]},
    "narrow positions": lambda x: {"positions": integers(4, dtype=torch.int32)},
    "rows of frequencies": lambda x: {"packed_freqs": integers(2, 33)},
    "rows of the same": lambda x: {"packed_freqs": integers(33).expand(2, -1)},
    "fewer pairs": lambda x: {"packed_freqs": integers(17)},
    "sections": lambda x: {"positions": integers(3, 2, 4), "sections": integers(32)},
    "neighbours": lambda x: {"interleaved": True},
    # [B, S, H, D] and [B, H, S, D] of the same sizes, with all else the same
    "another layout": lambda x: {"heads_dim": 1, "k": empty(2, 2, 4, 64)},
}
ROPE_CHANGES = {
    "backwards": lambda x: {"conjugate": True},
    "in place": lambda x: {"inplace": True},
    "queries alone": lambda x: {"k": None},
    "results of other strides": lambda x: {
        "layouts": (empty(2, 4, 4, 128)[..., :64].stride(), None)
    },
    "keys' results of other strides": lambda x: {
        "layouts": (None, empty(2, 4, 2, 128)[..., :64].stride())
    },
}
NORM_CHANGES = {
    "queries of another dtype": lambda x: {"q": x["q"].float()},
    "keys of another dtype": lambda x: {"k": x["k"].float()},
    "wide weights": lambda x: {"q_weight": x["q_weight"].float()},
    "wide weights of keys": lambda x: {"k_weight": x["k_weight"].float()},
    "together": lambda x: {"q_weight": empty(4, 64), "k_weight": empty(2, 64)},
    "an offset": lambda x: {"offset": 1.0},
}
FORWARD_CHANGES = {
    "another eps": lambda x: {"eps": 1e-5},
    "not for training": lambda x: {"save": False},
    "in place": lambda x: {"inplace": True},
}
BACKWARD_CHANGES = {
    "by the output": lambda x: {"recompute_input": True},
    "gradients of other strides": lambda x: {"q_grad": empty().expand(2, 4, 4, 64)},
    "keys' gradients of other strides": lambda x: {"k_grad": empty().expand(2, 4, 2, 64)},
    "wide gradients": lambda x: {"q_grad": x["q_grad"].float()},
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("rope", c) for c in (CHANGES | ROPE_CHANGES).items()),
        *(("forward", c) for c in (CHANGES | NORM_CHANGES | FORWARD_CHANGES).items()),
        *(("backward", c) for c in (CHANGES | NORM_CHANGES | BACKWARD_CHANGES).items()),
    ],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_different_launch_goes_through_triton(launches, name, change):
    function, inputs = KERNELS[name]
    arguments = inputs()
    function(**arguments)
    changed = {**arguments, **change[1](arguments)}
    if "q_grad" in changed and change[0] in ("another layout", "more heads"):
        changed["q_grad"], changed["k_grad"] = (torch.empty_like(changed[x]) for x in "qk")
    function(**changed)
    recorder = getattr(launches, name)
    assert len(recorder.slow) == 2
    assert not recorder.fast
    function(**changed)
    function(**arguments)
    assert len(recorder.fast) == 2


@pytest.mark.parametrize("inplace", [False, True])
def test_keys_of_another_dtype_take_a_launch_of_their_own(launches, inplace):
    """A tile can hold both queries and keys, so they must have one dtype."""
    arguments = rope_inputs() | {"k": empty(2, 4, 2, 64, dtype=torch.float32), "inplace": inplace}
    q, k = rope.launch(**arguments)
    assert (q.dtype, k.dtype) == (DTYPE, torch.float32)
    assert (q is arguments["q"], k is arguments["k"]) == (inplace, inplace)
    (first, second) = launches.rope.slow
    assert [call.args[0] for call in (first, second)] == [arguments["q"], arguments["k"]]
    assert not any(call.constants["KEYS"] for call in (first, second))


@pytest.mark.parametrize("name", ["packed_freqs", "sections"])
def test_invalid_tensors_do_not_reuse_a_launch(launches, name):
    """Reused launches skip validation, so invalid tensors must not match one."""
    arguments = rope_inputs() | {"positions": integers(3, 2, 4), "sections": integers(32)}
    rope.launch(**arguments)
    invalid = {
        "packed_freqs": (arguments["packed_freqs"].double(), integers(66)[::2]),
        "sections": (integers(16), integers(64)[::2]),
    }
    for x in invalid[name]:
        with pytest.raises(ValueError, match=f"{name} (and sections )?must be"):
            rope.launch(**{**arguments, name: x})


def test_strided_weights_do_not_reuse_a_launch(launches):
    qk_norm_rope.launch_forward(**forward_inputs())
    for weight in ("q_weight", "k_weight"):
        with pytest.raises(ValueError, match="weights must be contiguous"):
            qk_norm_rope.launch_forward(**forward_inputs() | {weight: empty(128)[::2]})


@kernels
def test_unaligned_memory_never_reuses_a_launch(launches, name):
    function, inputs = KERNELS[name]
    arguments = {
        n: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x
        for n, x in inputs().items()
    }
    recorder, count = getattr(launches, name), 0
    function(**arguments)
    for changed_name, x in arguments.items():
        if not isinstance(x, torch.Tensor):
            continue
        unaligned = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        assert unaligned.data_ptr() % 16
        recorder.slow.clear()
        recorder.fast.clear()
        for args in (unaligned, unaligned, x):
            function(**{**arguments, changed_name: args})
        # Code for positions and frequencies fits any alignment; we allocate reciprocal norms.
        fits_any = changed_name in ("positions", "packed_freqs", "q_rstd", "k_rstd")
        assert (len(recorder.slow), len(recorder.fast)) == ((0, 3) if fits_any else (2, 1))
        count += not fits_any
    assert count == {"rope": 2, "forward": 4, "backward": 6}[name]


def test_aligned_memory_does_not_reuse_an_unaligned_launch(launches):
    """An unaligned launch is not stored, because its code is slow."""
    aligned = {
        name: torch.zeros_like(x, device="cpu") if isinstance(x, torch.Tensor) else x
        for name, x in rope_inputs().items()
    }
    q = torch.zeros(aligned["q"].numel() + 1, dtype=DTYPE)
    for start, fast in ((1, 0), (0, 0), (0, 1)):
        rope.launch(**aligned | {"q": q[start:][: len(q) - 1].view(aligned["q"].shape)})
        assert len(launches.rope.fast) == fast


@pytest.mark.parametrize("kind", ["rope", "forward"])  # backward takes what forward took
def test_another_device_does_not_reuse_a_launch(launches, kind):
    function, inputs = KERNELS[kind]
    function(**inputs())
    for name in ("k", "positions", "packed_freqs"):
        elsewhere = torch.zeros_like(inputs()[name], device="cpu")
        with pytest.raises(ValueError, match=f"got q on meta and {name} on cpu: move {name}"):
            function(**inputs() | {name: elsewhere})


def test_stored_launches_are_limited(launches):
    for tokens in range(1030):
        rope.launch(**rope_inputs(tokens=tokens + 1))
    assert len(rope._launcher._launches) == 6


def test_empty_tensors_launch_nothing(launches):
    for name, (function, inputs) in KERNELS.items():
        function(**inputs(tokens=0))
        function(**inputs(batch=0))
        assert not getattr(launches, name).slow


def test_weights_take_a_launch_of_their_own_if_they_are_trained(launches):
    *_, q_sum, k_sum = qk_norm_rope.launch_backward(**backward_inputs(), weights=False)
    assert (q_sum, k_sum) == (None, None)
    assert not launches.sum.slow
    (call,) = launches.backward.slow
    assert not call.constants["WEIGHTS"]
    assert call.args[10].numel() == 0  # no memory for partial sums
    qk_norm_rope.launch_backward(**backward_inputs())
    (call,) = launches.sum.slow
    assert call.grid == (2 * 64 // 4, 1, 1)
    assert call.args[3:] == (16, 64, 64)  # 8 tokens, and 2 programs share the heads of each


# -- grids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2**20, 2**24])
def test_tokens_are_in_the_first_grid_dimension(launches, tokens):
    """Check grids: a GPU allows 2^31 - 1 programs in the first dimension, 65,535 in the others."""
    for name, (function, inputs) in KERNELS.items():
        function(**inputs(batch=3, tokens=tokens))
        (call,) = getattr(launches, name).slow
        if name == "backward":
            assert call.grid == (2048, 2, 1)
        else:
            assert call.grid == (3 * tokens, 1, 1)


@pytest.mark.parametrize(
    ("tokens", "tiles", "programs", "warps"),
    [
        (1, (1, 4), (66, 17), (1, 4)),
        (16, (1, 4), (66, 17), (1, 4)),
        (17, (8, 8), (9, 9), (1, 1)),
        (1023, (8, 8), (9, 9), (1, 1)),
        (1024, (16, 16), (5, 5), (1, 1)),
        (4095, (16, 16), (5, 5), (1, 1)),
        (4096, (32, 16), (1, 1), (4, 1)),
    ],
)
def test_few_tokens_are_shared_between_programs(launches, tokens, tiles, programs, warps):
    """Check how 64 + 2 heads of 64 dimensions are split, without norms and with them."""
    sizes = {"batch": 1, "tokens": tokens, "heads": 64}
    for name, tile, count, warp in zip(("rope", "forward"), tiles, programs, warps, strict=True):
        function, inputs = KERNELS[name]
        function(**inputs(**sizes))
        (call,) = getattr(launches, name).slow
        assert call.constants["HEADS"] == tile
        assert call.grid == (tokens, count, 1)
        assert call.constants["ONE_TILE"] == (count > 1)
        assert call.warps == warp


@pytest.mark.parametrize(
    ("tokens", "dim", "warps"), [(1, 64, 1), (1, 128, 2), (1, 256, 4), (1, 1024, 4), (17, 256, 1)]
)
def test_threads_have_one_pair_of_very_few_tokens(launches, tokens, dim, warps):
    inputs = rope_inputs(batch=1, tokens=tokens, heads=4, dim=dim)
    rope.launch(**inputs | {"packed_freqs": integers(dim // 2 + 1)})
    (call,) = launches.rope.slow
    assert call.warps == warps
    assert (call.constants["HEADS"] == 1) == (tokens == 1)


def test_compiler_is_told_of_alignment_only_where_all_heads_are_aligned(launches):
    """A claim that is wrong makes a GPU read at addresses that it refuses."""
    inputs = rope_inputs(batch=1, tokens=8)
    shifted = empty(1, 8, 4, 72)[..., 4:68]  # from 8 bytes after a multiple of 16 on
    narrow = rope_inputs(batch=1, tokens=8, dim=20) | {"packed_freqs": integers(11)}
    for arguments in (inputs, inputs | {"q": shifted}, inputs | {"k": shifted}, narrow, inputs):
        rope.launch(**arguments)
    assert [call.constants["ALIGNED"] for call in launches.rope.slow] == [True, *[False] * 3]


def test_queries_and_keys_share_a_tile(launches):
    """All 9 + 3 heads of 64 dimensions fit into a tile of 16, so one program has all the work."""
    rope.launch(**rope_inputs(batch=1, tokens=8192, heads=9, key_heads=3))
    (call,) = launches.rope.slow
    assert call.constants["HEADS"] == 16
    assert call.constants["ONE_TILE"]
    assert call.grid == (8192, 1, 1)


@pytest.mark.parametrize(
    ("weights", "tokens", "shares"),
    [
        *((True, *x) for x in ((1, 4), (512, 4), (1024, 2), (2047, 1), (2048, 1))),
        *((False, *x) for x in ((1, 2), (2048, 2), (4096, 1), (8192, 1))),
    ],
)
def test_few_tokens_are_shared_in_the_backward_pass(launches, weights, tokens, shares):
    """The rows of partial sums stay within 2048, because a second launch sums them."""
    inputs = backward_inputs(batch=1, tokens=tokens, heads=32)
    qk_norm_rope.launch_backward(**inputs, weights=weights)
    (call,) = launches.backward.slow
    assert call.constants["HEADS"] == (8 if weights else 16)
    assert call.grid == (tokens if weights else min(tokens, 4096), 2, shares)
    if weights:
        assert call.args[10].shape == (tokens * shares, 2 * 64)


@pytest.mark.parametrize(
    ("batch", "tokens", "kind"),
    [(1, 1, "one"), (1, 5, "one"), (3, 1, "of one token"), (3, 5, "any")],
)
def test_a_division_is_left_out_where_there_is_one_row_or_one_token(launches, batch, tokens, kind):
    for name, (function, inputs) in KERNELS.items():
        function(**inputs(batch=batch, tokens=tokens))
        (call,) = getattr(launches, name).slow
        assert call.constants["ROWS"] == kind


SIZES = [(64, 64), (80, 32), (128, 20), (256, 64), (512, 512), (2048, 2), (4096, 4096)]


@pytest.mark.parametrize("heads", [1, 5, 40])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
def test_tile_sizes_are_the_next_powers_of_two(head_dim, rotary_dim, heads):
    """Wide heads have a tile of one head."""
    arguments = launcher.tile_sizes(head_dim, rotary_dim, heads)
    for name in ("PAIRS", "UNROTATED", "HEADS"):
        assert not arguments[name] & (arguments[name] - 1)
    assert rotary_dim // 2 <= arguments["PAIRS"] < rotary_dim
    assert head_dim - rotary_dim <= arguments["UNROTATED"] < 2 * max(head_dim - rotary_dim, 0.6)
    assert arguments["HEADS"] >= 1
    assert arguments["HEADS"] < 2 * heads
