"""Test the re-rotation of keys of one and many layers in Triton: bits, rounding and launches."""

import inspect
import itertools

import pytest
import torch
from helpers.exact_rotation import DEVICE, Rotation, draw, frequencies, relative_error

pytest.importorskip("triton")

import triton
import triton.language as tl
from mock_kernel import mock_launcher

from rope_patch import ops
from rope_patch.ops.kernels import launcher, rerotate
from rope_patch.ops.kernels.tile import stochastic_round
from rope_patch.ops.reference import _stochastic_round

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
B, K, S, D = 2, 3, 3, 64
POSITIONS = torch.tensor([[5, 1000, 10_000_000], [0, -3, 2**33]])
OLD, NEW = (frequencies(48), 1.25), (frequencies(48, 5e5) / 3, 1.5)
HALF = [torch.float16, torch.bfloat16]


def grow(layers, positions=POSITIONS, old=OLD, new=NEW, kernels="triton", **settings):
    """Re-rotate layers in place from one set of frequencies and factor to another."""
    packed = [ops.pack_frequencies(*f).to(DEVICE) for f in (old, new)]
    ops.rerotate_(layers, positions.to(DEVICE), *packed, kernels=kernels, **settings)
    return layers


def grow_one(keys, *rest, **settings):
    return grow([keys], *rest, **settings)[0]


def rotate_raw(raw, frequencies_and_factor, interleaved=False, positions=POSITIONS):
    """Rotate `[B, K, S, D]` in float64."""
    rotation = Rotation(positions, *frequencies_and_factor, None, interleaved, heads_dim=1)
    return rotation.true_rope(raw)


def make_layers(count, heads=K, dtype=torch.float32):
    return [draw(B, heads, S, D, seed=s, dtype=dtype) for s in range(count)]


def copies(layers):
    """Return copies, of dense tensors with the same strides."""
    return [
        x.new_empty(0).set_(x.untyped_storage().clone(), 0, x.shape, x.stride()) for x in layers
    ]


# -- numbers ---------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("rows", [None, B], ids=["one for all", "per row"])
@pytest.mark.parametrize("rotary_dim", [64, 48, 20])
def test_rerotation_matches_rotating_raw_keys(rotary_dim, rows, interleaved):
    raw, old = draw(B, 2, S, D), (frequencies(rotary_dim), 1.25)
    new = frequencies(rotary_dim, 5e5) / 3, 1.5
    if rows is not None:
        scale = torch.arange(1, rows + 1)
        new = new[0] / scale[:, None], new[1] * scale
    before = rotate_raw(raw, old, interleaved).float().to(DEVICE)
    keys = grow_one(before.clone(), POSITIONS, old, new, interleaved=interleaved)
    expected = rotate_raw(raw, new, interleaved)
    assert (keys.cpu() - expected).abs().max() < 2e-6 * expected.abs().max()
    assert keys[..., rotary_dim:].equal(before[..., rotary_dim:])


@pytest.mark.parametrize(
    ("positions", "dtype"),
    [(POSITIONS[0], torch.float16), (POSITIONS[:1], torch.bfloat16)],
    ids=["[S]", "[1, S]"],
)
def test_rerotation_matches_plain_torch(positions, dtype):
    """Results may differ where float32's last bit changes the rounding noise."""
    raw = draw(B, 2, S, D, dtype=dtype)
    got, expected = (
        grow_one(raw.clone(), positions, kernels=kernels) for kernels in ("triton", "reference")
    )
    assert (got == expected).float().mean() > 0.93
    torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert not got.equal(raw)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding_matches_plain_torch_bit_for_bit(dtype):
    """Change factors only: without rotation, float32 has the same numbers in both."""
    raw, still = draw(B, 2, S, D, dtype=dtype), torch.zeros(D // 2)
    got, expected = (
        grow_one(raw.clone(), POSITIONS, (still, 1.0), (still, 1.01), kernels)
        for kernels in ("triton", "reference")
    )
    assert got.equal(expected)
    assert got.ne(raw).float().mean() > 0.5


def test_rounding_is_stochastic():
    """A small change is applied with a probability in proportion to its size."""
    keys = torch.zeros(1, 1, 1, 2048, dtype=torch.bfloat16, device=DEVICE)
    keys[..., :1024] = torch.linspace(1, 2, 1024)  # the other half of each pair is 0
    new = torch.zeros(1024), 1 + 2**-10  # 1/8 to 1/4 of the way to the next number
    before = keys.clone()
    grow_one(keys, torch.tensor([0]), (torch.zeros(1024), 1.0), new)
    changed_share = keys.ne(before)[..., :1024].float().mean().item()
    assert 0.14 < changed_share < 0.24  # between 1/8 and 1/4
    assert keys[..., 1024:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_equal_frequencies_keep_the_bits(dtype):
    (keys,) = make_layers(1, dtype=dtype)
    assert grow_one(keys.clone(), POSITIONS, OLD, OLD).equal(keys)


@pytest.mark.parametrize("value", [0.0, float("inf"), -float("inf"), float("nan"), 6e-8, 65504.0])
def test_extreme_float16_numbers(value):
    """Bitwise rounding keeps zeros, infinities and the largest numbers."""
    keys = torch.full((1, 1, 1, 64), value, dtype=torch.float16, device=DEVICE)
    got, expected = (
        grow_one(keys.clone(), torch.tensor([1]), kernels=kernels)
        for kernels in ("triton", "reference")
    )
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-7, equal_nan=True)


@triton.jit
def _round_kernel(x, out, DTYPE: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(out + at, stochastic_round(tl.load(x + at), DTYPE))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding_keeps_every_nan(dtype):
    """Check NaNs of all ones, which GPUs produce: the noise would carry them over to -0."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000], dtype=torch.int32, device=DEVICE)
    x = bits.view(torch.float32)
    assert _stochastic_round(x, dtype).isnan().tolist() == [True, True, True, False]
    rounded = torch.empty_like(x)
    _round_kernel[(1,)](x, rounded, tl.bfloat16 if dtype == torch.bfloat16 else tl.float16)
    assert rounded.isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_many_rerotations_drift_like_plain_torch(dtype):
    """Re-rotate 16 times, as in decoding from 8k to 128k; the mean of attention scores stays right.

    Stochastic rounding has 2^(1/2) times the error of rounding to nearest: 5.7 times after 16.
    """
    slots = 4
    raw, positions = draw(1, 8, slots, 128), torch.arange(slots)[None] * 1364
    steps = [(frequencies(128, 5e5 * 1.3**n), 1 + n / 50) for n in range(17)]
    start = rotate_raw(raw, steps[0], positions=positions).to(dtype).to(DEVICE)
    truth = rotate_raw(raw, steps[-1], positions=positions)
    results = {}
    for kernels in ("triton", "reference"):
        keys = start.clone()
        for old, new in itertools.pairwise(steps):
            grow_one(keys, positions, old, new, kernels)
        results[kernels] = keys.cpu().double()
    errors = {kernels: relative_error(keys, truth) for kernels, keys in results.items()}
    assert errors["triton"] == pytest.approx(errors["reference"], rel=0.1)
    assert errors["triton"] < 6.5 * relative_error(truth.to(dtype), truth)
    projection = ((results["triton"] * truth).sum() / truth.square().sum()).item()
    assert projection == pytest.approx(1, abs=torch.finfo(dtype).eps / 4)


# -- memory ----------------------------------------------------------------------------------------

KEYS = {
    "a view of BSHD": lambda: draw(B, S, K, D).transpose(1, 2),
    "the first slots of a cache": lambda: draw(B, K, 2 * S, D)[:, :, :S],
    "some rows of a cache": lambda: draw(2 * B, K, S, D)[::2],
    "beside the values": lambda: draw(B, K, S, 2 * D)[..., :D],
    "every other number": lambda: draw(B, K, S, 2 * D)[..., 1::2],
    "not aligned": lambda: draw(B * K * S * D + 1)[1:].view(B, K, S, D),
}


@layouts
@pytest.mark.parametrize("name", KEYS)
def test_memory_layouts_are_written_in_place(name, interleaved):
    keys = KEYS[name]()
    storage = keys.new_zeros(0).set_(keys.untyped_storage())
    before, is_key = storage.clone(), torch.zeros_like(storage, dtype=torch.bool)
    is_key.as_strided(keys.shape, keys.stride(), keys.storage_offset()).fill_(True)
    expected = grow_one(keys.clone(), interleaved=interleaved)
    grow_one(keys, interleaved=interleaved)
    assert keys.equal(expected)
    assert storage[~is_key].equal(before[~is_key])


def test_empty_layers_slots_and_rows():
    grow([])
    grow_one(draw(B, K, 0, D), POSITIONS[:, :0])
    grow_one(draw(0, K, S, D), POSITIONS[:0])


@pytest.mark.parametrize("count", [1, 3])
def test_autograd_detects_every_changed_layer(count):
    saved = [draw(B, K, S, D, grad=True, seed=s).exp() for s in range(count)]
    grow([x.detach() for x in saved])
    for x in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x.sum().backward()


def test_keys_of_inference_mode():
    with torch.inference_mode():
        (keys,) = make_layers(1)
        expected = grow_one(keys.clone())
    assert grow_one(keys).equal(expected)


def test_frequencies_on_the_cpu_are_copied():
    layers = make_layers(2)
    expected = grow(copies(layers))
    packed = [ops.pack_frequencies(*f) for f in (OLD, NEW)]
    ops.rerotate_(layers, POSITIONS.to(DEVICE), *packed, kernels="triton")
    assert all(got.equal(right) for got, right in zip(layers, expected, strict=True))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_copies_to_a_gpu_start_from_pinned_memory(device):
    """The CPU waits for copies from other memory."""
    calls = []

    class Source:
        def pin_memory(self):
            calls.append("pin")
            return self

        def to(self, device, *, non_blocking):
            calls.append((device.type, non_blocking))

    ops.copy_to_device(Source(), torch.device(device))
    assert calls == ([*["pin"] * (device == "cuda"), (device, True)])


# -- groups of layers ------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """Record the number of layers of each launch of the kernel."""
    counts = []

    class Counter(launcher.Launcher):
        def __call__(self, key, tensors, address_bits, make_spec, *spec_args):
            counts.append(spec_args[1])
            super().__call__(key, tensors, address_bits, make_spec, *spec_args)

    monkeypatch.setattr(rerotate, "_launcher", Counter(rerotate.rerotate_kernel))
    return counts


@pytest.mark.parametrize(
    ("heads", "dtype", "interleaved"),
    [
        (1, torch.bfloat16, True),
        (3, torch.float32, False),
        (8, torch.float16, False),
        (16, torch.bfloat16, True),
    ],
)
def test_one_launch_gives_the_bits_of_one_by_one(launches, heads, dtype, interleaved):
    layers = make_layers(5, heads, dtype)
    one_by_one = [grow_one(x, interleaved=interleaved) for x in copies(layers)]
    together = grow(copies(layers), interleaved=interleaved)
    assert launches == [1] * 5 + [5]
    for keys, got, expected in zip(layers, together, one_by_one, strict=True):
        assert got.equal(expected)
        assert not got.equal(keys)


def test_layers_of_a_deep_model_take_one_launch(launches):
    layers = make_layers(36, heads=1, dtype=torch.bfloat16)
    expected = grow(copies(layers[17:18]))[0]
    grow(layers)
    assert launches[1:] == [36]
    assert layers[17].equal(expected)


def test_other_shapes_dtypes_and_strides_take_a_launch_each(launches):
    window = [x[:, :, -2:] for x in make_layers(2)]
    view = draw(B, S, K, D).transpose(1, 2)
    layers = [*make_layers(2), *make_layers(3, dtype=torch.bfloat16), view]
    order = [layers[n] for n in (0, 2, 5, 1, 3, 4)]
    expected = [grow_one(keys.clone()) for keys in order]
    launches.clear()
    grow(order)
    assert launches == [2, 3, 1]
    assert all(got.equal(right) for got, right in zip(order, expected, strict=True))
    assert [len(group) for group in rerotate.group_layers([*window, *layers])] == [2, 2, 3, 1]


def test_keys_that_are_given_twice_are_rotated_twice(launches):
    first, second = make_layers(2)
    expected = grow_one(grow_one(first.clone()))
    grow([first, second, first])
    assert launches[-2:] == [2, 1]
    assert first.equal(expected)


def test_one_unaligned_layer_among_aligned_ones():
    layers = make_layers(3)
    expected = grow(copies(layers))
    storage = torch.zeros(layers[1].numel() + 1, device=DEVICE)
    layers[1] = storage[1:].view(B, K, S, D).copy_(layers[1])
    assert layers[1].data_ptr() % 16
    assert layers[0].data_ptr() % 16 == 0
    assert all(got.equal(right) for got, right in zip(grow(layers), expected, strict=True))
    assert storage[0] == 0


def test_captured_graphs_need_no_table(launches, monkeypatch):
    layers = make_layers(3)
    expected = grow(copies(layers))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(rerotate, "_table", None)
    assert all(got.equal(right) for got, right in zip(grow(layers), expected, strict=True))
    assert launches == [3, 1, 1, 1]


# -- arguments -------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch):
    """Mock the kernel; record launches through Triton, and fast ones."""
    return mock_launcher(monkeypatch, rerotate, "_launcher")


def launch_meta(count, heads=8, tokens=4, dim=128):
    layers = [
        torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16, device="meta")
        for _ in range(count)
    ]
    positions = torch.empty(tokens, dtype=torch.int64, device="meta")
    packed_freqs = torch.empty(dim // 2 + 1, dtype=torch.int64, device="meta")
    rerotate.launch(layers, positions, packed_freqs, False)


def test_arguments_match_the_kernel_signature(compiled):
    launch_meta(3, tokens=0)
    assert not compiled.slow
    launch_meta(5)
    (call,) = compiled.slow
    names = list(inspect.signature(compiled.fn).parameters)
    assert names[len(call.args) :] == list(call.constants)
    args = dict(zip(names, call.args, strict=False))
    assert (args["layers"], args["S"], args["H"]) == (5, 4, 8)
    assert [args[f"k_{x}"] for x in "bshd"] == [8 * 4 * 128, 128, 4 * 128, 1]
    assert args["addresses"].dtype == torch.int64
    assert args["addresses"].shape == (5,)


def test_equal_launch_is_reused_for_as_many_layers(compiled):
    for count in (5, 5, 6):
        launch_meta(count)
    (slow, _), (fast,) = compiled.slow, compiled.fast
    assert fast.args[4:] == (*slow.args[4:], *slow.constants.values())


@pytest.mark.parametrize(
    ("count", "heads", "dim", "tokens", "kind", "programs", "tiles"),
    [
        (1, 8, 128, 8192, "one", 1, 1),
        (36, 8, 128, 8192, "one a tile", 9, 4),
        (36, 8, 128, 100, "one a tile", 36, 1),
        (36, 2, 128, 8192, "several a tile", 3, 3),  # 9 tiles of 4 layers
        (5, 1, 64, 8192, "several a tile", 1, 1),
        (2, 64, 128, 8192, "one a tile", 4, 4),
    ],
)
def test_tiles_hold_heads_of_all_layers(compiled, count, heads, dim, tokens, kind, programs, tiles):
    launch_meta(count, heads, tokens, dim)
    (call,) = compiled.slow
    assert call.grid == (tokens, programs, 1)
    assert (call.constants["LAYERS"], call.constants["TILES"]) == (kind, tiles)
    assert programs * tiles * call.constants["HEADS"] >= count * heads
