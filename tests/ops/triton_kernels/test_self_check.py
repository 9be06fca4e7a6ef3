"""Test the check of kernels at their first use, with kernels that are wrong on purpose."""

import logging
import threading
from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers.exact_rotation import DEVICE, assert_rounded, draw, draw_heads, make_rotation
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import triton

from rope_patch import ops
from rope_patch.ops import dispatch, self_check
from rope_patch.ops.kernels import cache_write, qk_norm_rope, rerotate, rope

EPS, D = 1e-6, 16
PLACE = torch.empty(0, device=DEVICE).device
ROTATION = make_rotation(12, heads_dim=1)


@pytest.fixture(autouse=True)
def first_use(monkeypatch):
    """Check kernels as in a new process, and let "auto" choose them on a CPU."""
    monkeypatch.setenv("ROPE_PATCH_SELF_CHECK", "1")
    monkeypatch.setattr(self_check, "passed", set())
    monkeypatch.setattr(self_check, "_problems", {})
    monkeypatch.setattr(self_check, "_reports", {})
    assert ops.triton_unavailable_reason() is None  # imports the kernels
    monkeypatch.setattr(dispatch, "use_triton", lambda x, kernels="auto": kernels != "reference")


@pytest.fixture
def trials(monkeypatch):
    """Record the variants that are tried."""
    variants = []

    run_trial = self_check.run_trial

    def record(variant, **sizes):
        variants.append(variant)
        return run_trial(variant, **sizes)

    monkeypatch.setattr(self_check, "run_trial", record)
    return variants


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.INFO, "rope_patch")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]


@dataclass
class Launch:
    """A launch that returns wrong numbers, or raises, if its arguments are `chosen`."""

    real: object
    error: Exception | None = None
    chosen: object = lambda *args: True
    calls: list = field(default_factory=list)

    def __call__(self, *args):
        self.calls.append(args)
        if not self.chosen(*args):
            return self.real(*args)
        if self.error is not None:
            raise self.error
        outputs = self.real(*args)
        with torch.no_grad():
            for x in outputs[:2]:
                if x is not None:
                    x.mul_(1.02)
        return outputs


@pytest.fixture
def break_launch(monkeypatch):
    """Break a launch; return its stand-in."""

    def replace_launch(module, name, **settings):
        launch = Launch(getattr(module, name), **settings)
        monkeypatch.setattr(module, name, launch)
        return launch

    return replace_launch


def heads(dtype=torch.float32, grad=False, rotation=ROTATION):
    return tuple(
        draw_heads(n, D, rotation, seed=n, dtype=dtype).requires_grad_(grad) for n in (3, 2)
    )


def weights(grad=False, dtype=torch.float32):
    return tuple((1 + draw(D, seed=s) / 10).to(dtype).requires_grad_(grad) for s in (5, 6))


def rotate(q, k, kernels="auto", rotation=ROTATION, **settings):
    positions = rotation.positions.to(DEVICE)
    return ops.rope(
        q, k, positions, rotation.packed_freqs, kernels=kernels, **rotation.settings, **settings
    )


def norm_and_rotate(q, k, *norms, kernels="auto", rotation=ROTATION, **settings):
    return rotation.norm_and_rope(q, k, *norms, kernels=kernels, eps=EPS, **settings)


def grow(*layers, kernels="auto"):
    """Re-rotate keys of layers in place."""
    packed = [ops.pack_frequencies(ROTATION.inv_freq / n).to(DEVICE) for n in (1, 4)]
    ops.rerotate_(layers, ROTATION.positions.to(DEVICE), *packed, kernels=kernels)
    return layers


def assert_true(outputs, inputs, norms=(), **slack):
    """Assert that results, and gradients of what requires them, are those in float64."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in (*inputs, *norms)]
    if norms:
        pairs = zip(leaves[:2], leaves[2:], strict=True)
        truths = [ROTATION.true_norm_and_rope(x, w, EPS) for x, w in pairs]
    else:
        truths = [ROTATION.true_rope(x) for x in leaves]
    for output, truth in zip(outputs, truths, strict=True):
        assert_rounded(output, truth, **slack)
    needed = [i for i, x in enumerate((*inputs, *norms)) if x.requires_grad]
    if not needed:
        return
    grads = [draw(*x.shape, seed=9, dtype=x.dtype) for x in outputs]
    got = torch.autograd.grad(outputs, [(*inputs, *norms)[i] for i in needed], grads)
    right = torch.autograd.grad(truths, leaves, [g.cpu().double() for g in grads])
    for grad, i in zip(got, needed, strict=True):
        assert_rounded(grad, right[i], slack=2e-6)


# -- right kernels ---------------------------------------------------------------------------------


def test_right_kernels_are_tried_once_for_each_variant(trials, warnings):
    rotations = (ROTATION, make_rotation(12, tokens=3, heads_dim=1))
    for rotation in rotations:  # other lengths are the same kernels
        for dtype in (torch.float32, torch.float16):
            rotate(*heads(dtype, rotation=rotation), rotation=rotation)
            rotate(*heads(dtype, grad=True, rotation=rotation), rotation=rotation)
            rotate(*heads(dtype, rotation=rotation), rotation=rotation, inplace=True)
    assert len(trials) == 6
    for recorded in ("dtype", "needs_grad", "inplace"):
        assert len({getattr(variant, recorded) for variant in trials}) == 2
    assert not warnings()


def rotate_into_cache(q, k, *norms):
    """Return rotated queries, and the cache's keys and values in the slots 1 and 2 of 4."""
    v = draw_heads(2, 8, ROTATION, seed=7, dtype=k.dtype)
    caches = [torch.zeros(2, 2, 4, x.shape[-1], dtype=k.dtype, device=DEVICE) for x in (k, v)]
    settings = ROTATION.settings | dict(zip(("q_weight", "k_weight"), norms, strict=False))
    where = (torch.tensor(1, device=DEVICE), ROTATION.positions.to(DEVICE), ROTATION.packed_freqs)
    q = ops.rope_into_cache(q, k, v, *caches, *where, eps=EPS, **settings)
    assert caches[1][:, :, 1:3].equal(v)
    return q, caches[0][:, :, 1:3]


@pytest.mark.parametrize("normed", [False, True])
def test_write_into_a_cache_is_tried_and_falls_back(trials, warnings, break_launch, normed):
    inputs, norms = heads(), weights() if normed else ()
    for _ in range(2):
        assert_true(rotate_into_cache(*inputs, *norms), inputs, norms, slack=1e-6)
    assert [variant.writes_cache for variant in trials] == [True]
    assert not warnings()
    self_check.passed.clear()
    break_launch(cache_write, "launch")
    for _ in range(2):
        assert_true(rotate_into_cache(*inputs, *norms), inputs, norms, slack=1e-6)
    (warning,) = warnings()
    op = "qk_norm_rope_into_cache" if normed else "rope_into_cache"
    assert f"kernel {op} is wrong: q is off by" in warning


@pytest.mark.parametrize(
    "change",
    [
        {"interleaved": True},
        {"heads_dim": 2},
        {"sections": torch.arange(6) % 3, "positions": torch.arange(6).view(3, 1, 2)},
        {"inv_freq": make_rotation(16).inv_freq},
    ],
    ids=["neighbours", "heads_dim", "sections", "all rotate"],
)
def test_every_layout_is_a_variant_with_right_kernels(trials, warnings, change):
    rotate(*heads())
    changed = replace(ROTATION, **change)
    for _ in range(2):
        rotate(*heads(rotation=changed), rotation=changed)
    norm_and_rotate(*heads(rotation=changed), *weights(), rotation=changed)
    assert len(trials) == 3
    assert not warnings()


@pytest.mark.parametrize("together", [False, True], ids=["each head", "all heads"])
def test_every_norm_is_a_variant_with_right_kernels(trials, warnings, together):
    norms = weights(grad=True)
    if together:
        norms = [draw(n, D).div(10).add(1).requires_grad_() for n in (3, 2)]
    norm_and_rotate(*heads(grad=True), *norms)
    norm_and_rotate(*heads(grad=True), *norms, save="output")
    with torch.no_grad():
        norm_and_rotate(*heads(), *norms, inplace=True)
    norm_and_rotate(*heads(grad=True), *norms)
    assert all(variant.norm_all_heads is together for variant in trials)
    settings = [(v.trains_weights, v.recompute_input, v.inplace) for v in trials]
    assert settings == [(True, False, False), (True, True, False), (False, False, True)]
    assert not warnings()


def test_keys_that_are_rerotated_are_tried(trials, warnings):
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        grow(heads(dtype)[1])
    assert [variant.dtype for variant in trials] == [torch.float32, torch.bfloat16]
    grow(*(heads(torch.bfloat16)[1] for _ in range(3)))
    assert [variant.several_layers for variant in trials] == [False, False, True]
    assert not warnings()


def test_memory_layout_is_imitated(trials):
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads())
    rotate(q, k)
    (variant,) = trials
    assert variant.q_layout == (tuple(q.shape), q.stride())
    batch, head, token, dim = variant.q_layout.resized((2, 3, 5, D))
    assert (head, token, dim) == (D, 3 * D, 1)
    assert batch == 5 * 3 * D


# -- wrong kernels ---------------------------------------------------------------------------------


BROKEN = {
    "wrong": {},
    "does not compile": {"error": triton.CompilationError(None, None, "no such instruction")},
}
CANNOT_START = {"error": RuntimeError("out of resource: shared memory")}
failures = pytest.mark.parametrize("settings", BROKEN.values(), ids=BROKEN)
# One that does not compile goes the way of one that cannot start.
mostly_wrong = pytest.mark.parametrize(
    "settings",
    [
        BROKEN["wrong"],
        pytest.param(BROKEN["does not compile"], marks=pytest.mark.slow),
    ],
    ids=BROKEN,
)


@pytest.mark.parametrize(
    ("settings", "grad"), [(BROKEN["wrong"], False), (BROKEN["wrong"], True), (CANNOT_START, False)]
)
def test_rotation_falls_back(break_launch, warnings, settings, grad):
    launch = break_launch(rope, "launch", **settings)
    for _ in range(2):
        inputs = heads(grad=grad)
        assert_true(rotate(*inputs), inputs)
        assert len(launch.calls) <= 2  # of the trial
    (text,) = warnings()
    for part in (
        torch.__version__, triton.__version__, str(PLACE), "kernel rope", "float32",
        "3 + 2 heads of 16, 12 rotated", "rope-patch bench --self-test", "ROPE_PATCH_SELF_CHECK=0",
    ):  # fmt: skip
        assert part in text
    if "error" in settings:
        assert type(settings["error"]).__name__ in text
    else:
        assert "units of rounding" in text


@mostly_wrong
def test_rotation_in_place_falls_back(break_launch, warnings, settings):
    break_launch(rope, "launch", chosen=lambda *args: len(args) > 8 and args[8], **settings)
    inputs = heads()
    q, k = (x.clone() for x in inputs)
    outputs = rotate(q, k, inplace=True)
    assert outputs[0] is q
    assert outputs[1] is k
    assert_true((q, k), inputs)
    assert len(warnings()) == 1
    assert "in place" in warnings()[0]
    rotate(*inputs, kernels="triton")  # not in place, this kernel is right
    with pytest.raises(RuntimeError, match="in place"):
        rotate(q, k, kernels="triton", inplace=True)


@mostly_wrong
@pytest.mark.parametrize(("grad", "inplace"), [(False, False), (True, False), (False, True)])
def test_norm_falls_back(break_launch, warnings, settings, grad, inplace):
    launch = break_launch(qk_norm_rope, "launch_forward", **settings)
    for _ in range(2):
        inputs, norms = heads(grad=grad), weights(grad=grad)
        given = [x.clone() for x in inputs] if inplace else inputs
        outputs = norm_and_rotate(*given, *norms, inplace=inplace)
        assert_true(outputs, inputs, norms, slack=1e-6)
        assert len(launch.calls) == 1
    assert len(warnings()) == 1


@mostly_wrong
@pytest.mark.parametrize("save", ["input", "output"])
def test_wrong_backward_pass_falls_back_in_both_directions(break_launch, warnings, settings, save):
    forward = break_launch(qk_norm_rope, "launch_forward", chosen=lambda *args: False)
    break_launch(qk_norm_rope, "launch_backward", **settings)
    inputs, norms = heads(grad=True), weights(grad=True)
    outputs = norm_and_rotate(*inputs, *norms, save=save)
    assert len(forward.calls) == 1  # of the trial: results come from plain torch
    assert_true(outputs, inputs, norms, slack=1e-6)
    with torch.no_grad():
        norm_and_rotate(*inputs, *norms)
    assert len(forward.calls) == 3  # a trial and the call: without gradients, the kernel is right
    assert len(warnings()) == 1


def test_wrong_backward_rotation_falls_back(break_launch, warnings):
    launch = break_launch(rope, "launch", chosen=lambda *args: args[7])
    inputs = heads(grad=True)
    assert_true(rotate(*inputs), inputs)
    assert len(launch.calls) == 2
    rotate(*heads())
    assert len(launch.calls) == 4
    assert "backward" in warnings()[0]


def test_wrong_sum_of_weight_gradients_falls_back(break_launch, warnings):
    launch = break_launch(qk_norm_rope, "sum_programs")
    inputs, norms = heads(grad=True), weights(grad=True)
    assert_true(norm_and_rotate(*inputs, *norms), inputs, norms, slack=1e-6)
    assert len(launch.calls) == 1
    assert "gradient of" in warnings()[0]
    assert "weight" in warnings()[0]
    norm_and_rotate(*heads(grad=True), *weights(), kernels="triton")  # frozen weights sum nothing
    with pytest.raises(RuntimeError, match="gradient of"):
        norm_and_rotate(*inputs, *norms, kernels="triton")


@pytest.mark.parametrize("layers", [1, 3])
def test_wrong_rerotation_falls_back(break_launch, warnings, layers):
    def spoil(group, *args):
        real(group, *args)
        return group[-1], None  # wrong in the last layer

    real = rerotate.launch
    launch = break_launch(rerotate, "launch")
    launch.real = spoil
    keys = [draw_heads(2, D, ROTATION, seed=s, dtype=torch.float16) for s in range(layers)]
    expected = grow(*(x.clone() for x in keys), kernels="reference")
    for _ in range(2):
        for got, right in zip(grow(*(x.clone() for x in keys)), expected, strict=True):
            assert torch.equal(got, right)
    assert len(launch.calls) == 1
    assert len(warnings()) == 1
    with pytest.raises(RuntimeError, match="rerotate_"):
        grow(*keys, kernels="triton")


def test_layers_that_take_each_others_place_are_found(break_launch, warnings):
    def swap(layers, *args):
        real(layers, *args)
        first = layers[0].clone()
        layers[0].copy_(layers[1])
        layers[1].copy_(first)

    real = rerotate.launch
    break_launch(rerotate, "launch", chosen=lambda *args: False).real = swap
    keys = [draw_heads(2, D, ROTATION, seed=s) for s in range(2)]
    expected = grow(*(x.clone() for x in keys), kernels="reference")
    for got, right in zip(grow(*(x.clone() for x in keys)), expected, strict=True):
        assert torch.equal(got, right)
    assert "several layers" in warnings()[0]


def test_other_variants_are_unaffected(break_launch, warnings):
    launch = break_launch(rope, "launch", chosen=lambda q, *args: q.dtype == torch.float16)
    for _ in range(2):
        inputs = heads(torch.float16)
        assert_true(rotate(*inputs), inputs, slack=2e-6)
    calls = len(launch.calls)
    for _ in range(2):
        inputs = heads()
        assert_true(rotate(*inputs, kernels="triton"), inputs)
    assert len(launch.calls) == calls + 3  # a trial and two calls
    assert len(warnings()) == 1


def test_one_warning_for_all_variants_of_a_kernel(break_launch, warnings):
    break_launch(rope, "launch")
    rotate(*heads())
    rotate(*heads(grad=True))
    rotate(heads()[0], None)
    assert len(warnings()) == 1
    rotate(*heads(torch.float16))
    assert len(warnings()) == 2


@failures
def test_required_kernels_raise_each_time(break_launch, warnings, settings):
    break_launch(rope, "launch", **settings)
    break_launch(qk_norm_rope, "launch_forward", **settings)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?s)kernel rope .*rope-patch bench --self-test"):
            rotate(*heads(), kernels="triton")
        with pytest.raises(RuntimeError, match="kernel qk_norm_rope"):
            norm_and_rotate(*heads(), *weights(), kernels="triton")
    assert not warnings()
    inputs = heads()
    assert_true(rotate(*inputs), inputs)


# -- settings --------------------------------------------------------------------------------------


def test_variable_skips_the_check(monkeypatch, break_launch, trials, warnings):
    monkeypatch.setenv("ROPE_PATCH_SELF_CHECK", "0")
    break_launch(rope, "launch")
    inputs = heads()
    with pytest.raises(AssertionError, match="off by"):
        assert_true(rotate(*inputs), inputs)
    assert not trials
    assert not warnings()


def test_interpreter_is_not_checked_unless_asked(monkeypatch, trials):
    monkeypatch.delenv("ROPE_PATCH_SELF_CHECK")
    monkeypatch.setattr(self_check, "is_interpreted", lambda: True)
    rotate(*heads())
    assert not trials
    monkeypatch.setattr(self_check, "is_interpreted", lambda: False)
    rotate(*heads(torch.float16))
    assert len(trials) == 1


def test_unknown_value_of_the_variable_raises(monkeypatch):
    monkeypatch.setenv("ROPE_PATCH_SELF_CHECK", "no")
    with pytest.raises(ValueError, match=r"must be 1 .* or 0 .*, got 'no'"):
        rotate(*heads())


# -- surroundings ----------------------------------------------------------------------------------


class Log(TorchDispatchMode):
    """Names of the operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_surroundings_of_the_first_call_see_nothing(trials):
    state = torch.get_rng_state()
    packed = []
    inputs = heads(grad=True)
    logs = []
    for _ in range(2):
        with (
            Log() as log,
            torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x),
            torch.autocast(DEVICE, dtype=torch.bfloat16),
        ):
            rotate(*inputs)
        logs.append(log.names)
    assert len(trials) == 1
    assert logs[0] == logs[1]
    assert "_local_scalar_dense" not in logs[1]
    assert len(packed) % 2 == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_trials_run_in_every_mode(trials, warnings, mode):
    with mode():
        inputs = heads()
        outputs = norm_and_rotate(*inputs, *weights())
    assert_true(outputs, inputs, weights(), slack=1e-6)
    assert len(trials) == 1
    assert not warnings()


def test_threads_wait_for_one_trial(monkeypatch, break_launch, warnings):
    launch = break_launch(rope, "launch")
    barrier, outputs = threading.Barrier(4), []

    def work():
        barrier.wait()
        outputs.append(rotate(*heads()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launch.calls) == len(warnings()) == 1
    for output in outputs:
        assert_true(output, heads())


def test_captured_streams_run_no_trial(monkeypatch, trials):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    dtype, device = torch.float32, torch.device("cuda", 0)
    variant = ops.KernelVariant(
        op="rope", device=device, dtype=dtype, key_dtype=dtype, heads=1, key_heads=1, head_dim=D,
        rotary_dim=D,
    )  # fmt: skip
    assert self_check.passes("key", "auto", variant)
    assert not trials
    assert "key" not in self_check.passed  # the next call outside of a capture tries it


def test_lack_of_memory_is_no_verdict(break_launch, warnings):
    launch = break_launch(rope, "launch", error=torch.OutOfMemoryError("full"))
    launch.chosen = lambda *args: len(launch.calls) == 1
    for _ in range(2):
        inputs = heads()
        assert_true(rotate(*inputs), inputs)
    assert len(launch.calls) == 4  # a trial and a call each time
    assert not warnings()


def test_tracing_runs_no_trial_but_knows_of_failures(reset_compiler, break_launch, trials):
    compiled = torch.compile(rotate, backend="eager", fullgraph=True)
    inputs = heads()
    assert_true(compiled(*inputs, kernels="triton"), inputs)
    assert not trials
    launch = break_launch(rope, "launch")
    rotate(*inputs)
    calls = len(launch.calls)
    torch._dynamo.reset()
    assert_true(compiled(*inputs), inputs)
    assert len(launch.calls) == calls
    with pytest.raises(Exception, match="rope-patch bench --self-test"):
        compiled(*inputs, kernels="triton")
    assert len(trials) == 1
