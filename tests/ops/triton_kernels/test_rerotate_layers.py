"""Test the re-rotation of many layers in one launch: bits, groups of layers and launches."""

import inspect

import pytest
import torch
from helpers.exact_rotation import DEVICE, Rotation, draw, frequencies

pytest.importorskip("triton")

from mock_kernel import mock_launcher

from rope_patch import ops
from rope_patch.ops.kernels import launcher, rerotate
from rope_patch.ops.transfer import copy_to_device

B, K, S, D = 2, 3, 3, 64
POSITIONS = torch.tensor([[5, 1000, 10_000_000], [0, -3, 2**33]])
OLD, NEW = (frequencies(48), 1.25), (frequencies(48, 5e5) / 3, 1.5)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


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


def grow(layers, **settings):
    packed = [ops.pack_frequencies(*f).to(DEVICE) for f in (OLD, NEW)]
    ops.rerotate_(layers, POSITIONS.to(DEVICE), *packed, kernels="triton", **settings)
    return layers


def copies(layers):
    """Return copies, of dense tensors with the same strides."""
    return [
        x.new_empty(0).set_(x.untyped_storage().clone(), 0, x.shape, x.stride()) for x in layers
    ]


def make_layers(count, heads=K, dtype=torch.float32):
    return [draw(B, heads, S, D, seed=s, dtype=dtype) for s in range(count)]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 8, 16])
def test_one_launch_gives_the_bits_of_one_by_one(launches, heads, dtype, interleaved):
    layers = make_layers(5, heads, dtype)
    one_by_one = copies(layers)
    for keys in one_by_one:
        grow([keys], interleaved=interleaved)
    together = grow(copies(layers), interleaved=interleaved)
    assert launches == [1] * 5 + [5]
    for keys, got, expected in zip(layers, together, one_by_one, strict=True):
        assert got.equal(expected)
        assert not got.equal(keys)


@pytest.mark.parametrize("heads", [1, 3, 16])
def test_every_layer_is_rotated_exactly(heads):
    raw = make_layers(4, heads)
    old, new = (Rotation(POSITIONS, *f, None, False, heads_dim=1) for f in (OLD, NEW))
    layers = grow([old.true_rope(x).float().to(DEVICE) for x in raw])
    for keys, x in zip(layers, raw, strict=True):
        expected = new.true_rope(x)
        assert (keys.cpu() - expected).abs().max() < 2e-6 * expected.abs().max()


def test_layers_of_a_deep_model_take_one_launch(launches):
    layers = make_layers(36, dtype=torch.bfloat16)
    expected = grow(copies(layers[17:18]))[0]
    grow(layers)
    assert launches[1:] == [36]
    assert layers[17].equal(expected)


def test_other_shapes_dtypes_and_strides_take_a_launch_each(launches):
    window = [x[:, :, -2:] for x in make_layers(2)]
    view = draw(B, S, K, D).transpose(1, 2)
    layers = [*make_layers(2), *make_layers(3, dtype=torch.bfloat16), view]
    order = [layers[n] for n in (0, 2, 5, 1, 3, 4)]
    expected = [grow([keys.clone()])[0] for keys in order]
    launches.clear()
    grow(order)
    assert launches == [2, 3, 1]
    for got, right in zip(order, expected, strict=True):
        assert got.equal(right)
    assert [len(group) for group in rerotate.group_layers([*window, *layers])] == [2, 2, 3, 1]


def test_keys_that_are_given_twice_are_rotated_twice(launches):
    first, second = make_layers(2)
    expected = grow(grow([first.clone()]))[0]
    grow([first, second, first])
    assert launches[-2:] == [2, 1]
    assert first.equal(expected)


def test_one_unaligned_layer_among_aligned_ones(launches):
    layers = make_layers(3)
    expected = grow(copies(layers))
    storage = torch.zeros(layers[1].numel() + 1, device=DEVICE)
    layers[1] = storage[1:].view(B, K, S, D).copy_(layers[1])
    assert layers[1].data_ptr() % 16
    assert layers[0].data_ptr() % 16 == 0
    for got, right in zip(grow(layers), expected, strict=True):
        assert got.equal(right)
    assert storage[0] == 0


def test_captured_graphs_need_no_table(launches, monkeypatch):
    layers = make_layers(3)
    expected = grow(copies(layers))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(rerotate, "_table", None)
    for got, right in zip(grow(layers), expected, strict=True):
        assert got.equal(right)
    assert launches == [3, 1, 1, 1]


def test_autograd_detects_every_changed_layer():
    saved = [draw(B, K, S, D, grad=True, seed=s).exp() for s in range(3)]
    grow([x.detach() for x in saved])
    for x in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x.sum().backward()


def test_frequencies_on_the_cpu_are_copied():
    layers = make_layers(2)
    expected = grow(copies(layers))
    packed = [ops.pack_frequencies(*f) for f in (OLD, NEW)]
    ops.rerotate_(layers, POSITIONS.to(DEVICE), *packed, kernels="triton")
    for got, right in zip(layers, expected, strict=True):
        assert got.equal(right)


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

    copy_to_device(Source(), torch.device(device))
    assert calls == ([*["pin"] * (device == "cuda"), (device, True)])


# -- arguments -------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch):
    """Mock the kernel; record launches through Triton, and fast ones."""
    return mock_launcher(monkeypatch, rerotate, "_launcher")


def launch_meta(count, heads=8, tokens=4, dim=128, dtype=torch.bfloat16):
    layers = [torch.empty(1, heads, tokens, dim, dtype=dtype, device="meta") for _ in range(count)]
    positions = torch.empty(tokens, dtype=torch.int64, device="meta")
    packed_freqs = torch.empty(dim // 2 + 1, dtype=torch.int64, device="meta")
    rerotate.launch(layers, positions, packed_freqs, False)


def test_arguments_match_the_kernel_signature(compiled):
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
    assert (len(compiled.slow), len(compiled.fast)) == (2, 1)
    assert compiled.fast[0].args[4:] == (
        *compiled.slow[0].args[4:],
        *compiled.slow[0].constants.values(),
    )


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


def test_empty_keys_launch_nothing(compiled):
    launch_meta(3, tokens=0)
    assert not compiled.slow
