"""Test dispatch: which backend runs, errors if it cannot, and validation of arguments."""

import logging
import sys
from functools import partial

import pytest
import torch
from helpers.exact_rotation import draw, frequencies
from helpers.tiny_models import make_model

import rope_patch
from rope_patch import ops
from rope_patch.ops import dispatch

PACKED_FREQS = ops.pack_frequencies(frequencies(8))
POSITIONS = torch.arange(3)


def heads(count=2, batch=2, tokens=3, dim=8, dtype=torch.float32, grad=False):
    return draw(batch, tokens, count, dim, dtype=dtype).cpu().requires_grad_(grad)


def rope(q, k=None, positions=POSITIONS, packed_freqs=PACKED_FREQS, **settings):
    return ops.rope(q, k, positions, packed_freqs, **settings)


def norm_and_rope(q, k, q_weight, k_weight, **settings):
    return ops.qk_norm_rope(q, k, q_weight, k_weight, POSITIONS, PACKED_FREQS, eps=1e-6, **settings)


def rerotate(keys, **settings):
    return ops.rerotate_([keys], POSITIONS, PACKED_FREQS, PACKED_FREQS, **settings)


CALLS = {
    "rope": lambda **settings: rope(heads(), **settings),
    "qk_norm_rope": lambda **settings: norm_and_rope(
        heads(), heads(), torch.ones(8), torch.ones(8), **settings
    ),
    "rerotate_": lambda **settings: rerotate(heads().transpose(1, 2), **settings),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def set_triton_version(monkeypatch):
    """Return a function that removes Triton or sets its version."""

    def set_version(version):
        if version is None:
            monkeypatch.setitem(sys.modules, "triton", None)
        else:
            triton = pytest.importorskip("triton")
            monkeypatch.setattr(triton, "__version__", version)
        dispatch._triton_unavailable_reason.cache_clear()

    yield set_version
    monkeypatch.undo()
    dispatch._triton_unavailable_reason.cache_clear()


# -- choice of the backend -------------------------------------------------------------------------


@pytest.fixture
def no_launches(monkeypatch):
    if ops.triton_unavailable_reason() is None:
        launching = pytest.importorskip("rope_patch.ops.kernels.launcher")

        def launch(*_):
            raise AssertionError("launched")

        monkeypatch.setattr(launching.Launcher, "__call__", launch)


@calls
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_cpu_uses_plain_torch(no_launches, call, kernels):
    call(kernels=kernels)


@calls
def test_auto_without_triton_uses_plain_torch(set_triton_version, call):
    set_triton_version(None)
    call(kernels="auto")
    assert not ops.use_triton(heads())


def test_plain_torch_keeps_float64():
    """Only Triton has a limited set of dtypes."""
    rotated, _ = rope(heads(dtype=torch.float64))
    assert rotated.dtype == torch.float64


class OnGPU:
    """A stand-in with the attributes of a tensor that `use_triton` reads."""

    is_cuda, dtype = True, torch.bfloat16


def test_triton_takes_plain_tensors_of_three_dtypes_on_a_gpu(monkeypatch, set_triton_version):
    """Change one property at a time; each makes plain torch run."""
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "_PLAIN_TYPES", frozenset((OnGPU,)))
    x = OnGPU()
    assert ops.use_triton(x)
    assert not ops.use_triton(x, "reference")
    assert not ops.use_triton(x, "hf")
    for name, value in (("dtype", torch.float64), ("is_cuda", False)):
        other = OnGPU()
        setattr(other, name, value)
        assert not ops.use_triton(other)
    monkeypatch.setattr(dispatch, "_PLAIN_TYPES", frozenset((torch.Tensor,)))
    assert not ops.use_triton(x)
    monkeypatch.undo()
    set_triton_version(None)
    assert not ops.use_triton(x)


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "Triton cannot be imported (import of triton halted; None in sys.modules)"),
        ("3.5.0", "Triton is 3.5.0, and 3.6 to 3.9 are supported"),
        ("3.10.0", "Triton is 3.10.0, and 3.6 to 3.9 are supported"),
        ("?.6", "Triton cannot be imported (invalid literal for int() with base 10: '?')"),
    ],
)
def test_missing_triton_is_logged_once_and_is_an_error_on_request(
    set_triton_version, caplog, monkeypatch, version, problem
):
    set_triton_version(version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        for _ in range(2):
            assert ops.triton_unavailable_reason() == problem
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == f"{problem}: rotating in plain torch"
    for call in CALLS.values():
        with pytest.raises(ValueError, match=r"but triton .*'\.\[kernels\]'"):
            call(kernels="triton")


def test_missing_triton_is_not_logged_without_a_gpu(set_triton_version, caplog, monkeypatch):
    set_triton_version(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        assert "cannot be imported" in ops.triton_unavailable_reason()
        handle = rope_patch.patch(make_model(), "yarn", factor=4)
    assert "Triton cannot be imported" not in handle.summary() + caplog.text


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1+git1234", "3.9.9", "3.8.0rc1"])
def test_supported_triton_versions(set_triton_version, version):
    set_triton_version(version)
    assert ops.triton_unavailable_reason() is None


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_demanded_kernels_refuse_transforms(transform):
    """Kernels take addresses, which a transformed tensor does not have."""
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="auto"):
        transform(lambda x: rope(x, kernels="triton")[0].sum(), heads())


def test_auto_uses_plain_torch_in_transforms_on_a_gpu(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "_PLAIN_TYPES", frozenset((OnGPU,)))
    answers = []

    def ask(x):
        answers.append(ops.use_triton(OnGPU()))
        return x.sum()

    ask(heads())
    torch.func.vmap(ask)(heads())
    torch.func.jvp(ask, (heads(),), (heads(),))
    torch.func.grad(ask)(heads())
    assert answers == [True, False, False, False]


OTHERS = ("k", "positions", "packed_freqs", "q_weight", "k_weight")


@pytest.mark.parametrize("kernels", ["auto", "triton"])
@pytest.mark.parametrize("name", OTHERS)
def test_tensors_on_another_device_are_an_error(name, kernels):
    """Check with the meta device: on a GPU, a kernel would read an illegal address."""
    pytest.importorskip("triton")
    arguments = {
        "k": heads(1),
        "positions": POSITIONS,
        "packed_freqs": PACKED_FREQS,
        "q_weight": torch.ones(8),
        "k_weight": torch.ones(8),
    }
    call = partial(ops.qk_norm_rope, heads(), eps=1e-6, kernels=kernels)
    call(**arguments)  # the launch is remembered by shapes, strides and dtypes
    with pytest.raises(ValueError, match=f"q on cpu and {name} on meta"):
        call(**arguments | {name: arguments[name].to("meta")})


@calls
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_8_bit_floats_are_an_error(call, kernels, monkeypatch):
    monkeypatch.setitem(globals(), "heads", lambda *_: draw(2, 3, 2, 8).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        call(kernels=kernels)


@calls
def test_tensors_on_a_cpu_are_an_error_without_the_interpreter(monkeypatch, call):
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"GPU, got cpu.*TRITON_INTERPRET=1"):
        call(kernels="triton")


def test_float64_is_an_error_with_triton(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: True)
    with pytest.raises(ValueError, match="float64"):
        rope(heads(dtype=torch.float64), kernels="triton")


@calls
@pytest.mark.parametrize("name", ["hf", "Triton", "cuda", ""])
def test_unknown_kernels_are_an_error(call, name):
    with pytest.raises(ValueError, match=f'"reference" .*got {name!r}'):
        call(kernels=name)


def test_bad_save_and_missing_arguments_are_errors():
    with pytest.raises(ValueError, match="'both'"):
        CALLS["qk_norm_rope"](save="both")
    for missing in ({"positions": None}, {"packed_freqs": None}):
        with pytest.raises(ValueError, match="positions and packed_freqs are needed"):
            rope(heads(), **missing)


# -- validation ------------------------------------------------------------------------------------

AXES = torch.zeros(3, 2, 3, dtype=torch.int64)
SECTIONS = torch.zeros(4, dtype=torch.int64)
TEN = ops.pack_frequencies(frequencies(10))
ROPE_ERRORS = {
    "q of 3 dimensions": ({"q": heads()[0]}, r"q must have 4 .*\[3, 2, 8\]"),
    "heads elsewhere": ({"heads_dim": 3}, r"\[B, H, S, D\].*got 3"),
    "k of other tokens": ({"k": heads(tokens=4)}, r"dimension 2.*\[2, 3, 3, 8\].*\[2, 4, 2, 8\]"),
    "k of other rows": ({"k": heads(batch=1)}, "k must be like q"),
    "k of other sizes": ({"k": heads(dim=16)}, "k must be like q"),
    "k of 3 dimensions": ({"k": heads()[0]}, "k must be like q"),
    "layouts mixed up": ({"k": heads(5), "heads_dim": 1}, "dimension 1"),
    "positions in floats": ({"positions": POSITIONS.float()}, "int32 or int64"),
    "other positions": ({"positions": torch.arange(4)}, r"\[3\] or \[2, 3\], got \[4\]"),
    "positions of other rows": ({"positions": SECTIONS[:3].expand(3, -1)}, r"got \[3, 3\]"),
    "axes without sections": ({"positions": AXES}, r"got \[3, 2, 3\]"),
    "sections without axes": ({"sections": SECTIONS}, r"\[axes, 2, 3\], got \[3\]"),
    "too few sections": ({"positions": AXES, "sections": SECTIONS[:3]}, r"\[4\].*got \[3\]"),
    "packed_freqs in floats": ({"packed_freqs": PACKED_FREQS.float()}, r"int64 .*float32 \[5\]"),
    "packed_freqs of other rows": ({"packed_freqs": PACKED_FREQS.expand(3, -1)}, r"\[3, 5\]"),
    "packed_freqs of other memory": (
        {"packed_freqs": PACKED_FREQS.repeat_interleave(2)[::2]},
        "contiguous",
    ),
    "sections of other memory": (
        {"positions": AXES, "sections": SECTIONS.repeat(2)[::2]},
        "contiguous",
    ),
    "too many pairs": ({"packed_freqs": TEN}, "5 pairs .*8 dimensions"),
}
WEIGHT_ERRORS = {
    "of another size": (torch.ones(7), torch.ones(8), r"\[8\] both, or \[3, 8\]"),
    "of other heads": (torch.ones(3, 8), torch.ones(3, 8), r"got \[3, 8\] and \[3, 8\]"),
    "of two forms": (torch.ones(8), torch.ones(2, 8), r"got \[8\] and \[2, 8\]"),
    "of other memory": (torch.ones(16)[::2], torch.ones(8), "weights must be contiguous"),
}


@pytest.fixture(params=["reference", "triton"])
def kernels(request):
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("tensors are on the CPU here")
    return request.param


@pytest.mark.parametrize("name", ROPE_ERRORS)
def test_invalid_arguments_are_an_error(kernels, name):
    changes, message = ROPE_ERRORS[name]
    with pytest.raises(ValueError, match=message):
        rope(**{"q": heads(3), **changes}, kernels=kernels)


@pytest.mark.parametrize("name", WEIGHT_ERRORS)
def test_invalid_weights_are_an_error(kernels, name):
    *weights, message = WEIGHT_ERRORS[name]
    with pytest.raises(ValueError, match=message):
        norm_and_rope(heads(3), heads(2), *weights, kernels=kernels)


def test_invalid_keys_to_rerotate_are_an_error(kernels):
    with pytest.raises(ValueError, match=r"positions must be \[4\] or \[2, 4\], got \[3\]"):
        rerotate(heads(tokens=4).transpose(1, 2), kernels=kernels)
