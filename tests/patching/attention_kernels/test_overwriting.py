"""Test that queries and keys are overwritten where nobody looks, and copied where somebody does."""

import weakref
from itertools import accumulate

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers.tiny_models import SIZES, make_generator, make_model, tokens
from kernel_models import backward_all, patch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from rope_patch.ops import plain_torch
from rope_patch.patching.kernels import attention_forward, exclusive_memory

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("references_in_this_process")

MODES = [torch.no_grad, torch.inference_mode]
LENGTH = 20


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Overwrite tensors of any size, in blocks of 7 tokens."""
    monkeypatch.setattr(attention_forward, "_MIN_OVERWRITTEN_NUMEL", 0)
    monkeypatch.setattr(plain_torch, "_JOINED_NUMEL", 0)
    monkeypatch.setattr(plain_torch, "_BLOCK_NUMEL", 7 * 4 * 16)


@pytest.fixture
def overwritten(monkeypatch):
    """Record for each rotation whether its results lie in the memory of its inputs."""
    answers = []

    def record(name):
        original = getattr(attention_forward, name)

        def rotate(q, k, *args, **options):
            rotated = original(q, k, *args, **options)
            pairs = zip((q, k), rotated, strict=True)
            answers.append(all(x is None or x.data_ptr() == r.data_ptr() for x, r in pairs))
            return rotated

        monkeypatch.setattr(attention_forward, name, rotate)

    for name in ("rope_from_cos_sin", "rope", "qk_norm_rope"):
        record(name)
    return answers


@pytest.fixture
def copying(monkeypatch):
    """Return a function that has all rotations copy from then on."""
    return lambda: monkeypatch.setattr(
        attention_forward, "is_overwriting_possible", lambda attention: False
    )


@pytest.fixture
def model():
    """Return a patched Llama."""
    model = make_model()
    patch(model, "auto")
    return model


def logits(model, mode=torch.no_grad):
    with mode():
        return model(input_ids=tokens(LENGTH, batch=2), use_cache=False).logits.clone()


def attention_of(model, layer=0):
    return model.model.layers[layer].self_attn


# -- results ---------------------------------------------------------------------------------------

OVERWRITTEN = ["llama", "qwen2", "qwen3", "gemma3", "glm", "cohere", "olmo2", "smollm3"]
SHARED = ["phi3", "gpt_neox", "stablelm"]  # one fused projection; a view of the unrotated part


@pytest.mark.parametrize(
    ("family", "mode"),
    [*((each, torch.no_grad) for each in [*OVERWRITTEN, *SHARED]), ("llama", torch.inference_mode)],
)
def test_overwriting_does_not_change_a_bit(family, mode, overwritten, copying):
    model = make_model(family)
    patch(model, "auto")
    for _ in range(8):  # CPython specializes a call then; before, one more reference may be held
        overwritten.clear()
        got = logits(model, mode)
    assert overwritten
    assert set(overwritten) == {family in OVERWRITTEN}
    copying()
    overwritten.clear()
    assert logits(model, mode).equal(got)
    assert not any(overwritten)


@pytest.mark.parametrize("family", ["llama", "cohere", "qwen3", "gemma3"])
def test_triton_overwrites_to_the_same_bits(family, overwritten, copying):
    """Rotate alone (halves and neighbours), and with the norms."""
    model = make_model(family, num_hidden_layers=1) if family != "gemma3" else make_model(family)
    patch(model, "triton")
    with torch.no_grad():
        ids = tokens(5)
        got = model(input_ids=ids).logits
        assert overwritten
        assert all(overwritten)
        copying()
        overwritten.clear()
        assert model(input_ids=ids).logits.equal(got)
    assert not any(overwritten)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_generated_tokens_are_the_same(family, cache, overwritten, copying):
    model = make_generator(family)
    patch(model, "auto")
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    got = model.generate(tokens(LENGTH, batch=2), **options)
    assert all(overwritten)
    copying()
    assert model.generate(tokens(LENGTH, batch=2), **options).equal(got)


def peak_memory(call):
    """Return the most bytes that are allocated in a call, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes), default=0)


def test_rotation_allocates_less_than_the_queries(monkeypatch):
    """Count by torch's profiler: temporaries of a block instead of new queries and keys."""
    monkeypatch.setattr(plain_torch, "_BLOCK_NUMEL", 2**12)
    q, k = (torch.randn(1, 256, heads, 64).transpose(1, 2) for heads in (8, 2))
    cos, sin = torch.randn(2, 1, 256, 64).unbind()
    peaks = {
        may_overwrite: peak_memory(
            lambda m=may_overwrite: plain_torch.rope_from_cos_sin(q, k, cos, sin, may_overwrite=m)
        )
        for may_overwrite in (False, True)
    }
    assert peaks[False] >= q.nbytes + k.nbytes
    assert peaks[True] <= 3 * 4 * 2**12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 12])
def test_op_overwrites_to_the_same_bits(rotary_dim, interleaved, dtype):
    q, k = (torch.randn(2, 23, heads, 16, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 23, rotary_dim).to(dtype).unbind()
    expected = plain_torch.rope_from_cos_sin(q, k, cos, sin, interleaved=interleaved)
    got = plain_torch.rope_from_cos_sin(q, k, cos, sin, interleaved=interleaved, may_overwrite=True)
    assert got[0] is q
    assert got[1] is k
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


# -- readers ---------------------------------------------------------------------------------------


class Keeper:
    """Keeps the output of a projection in some way, beside a copy of its values."""

    def __init__(self, keep):
        self.keep, self.kept, self.values = keep, [], []

    def __call__(self, output):
        self.kept.append(self.keep(output))
        self.values.append(output.clone())

    def as_tensors(self):
        return [torch.as_tensor(x).reshape(v.shape) for x, v in zip(self.kept, self.values)]  # noqa: B905

    def check(self):
        assert self.kept
        for kept, values in zip(self.as_tensors(), self.values, strict=True):
            assert kept.equal(values)


def by_hook(module, keeper):
    module.register_forward_hook(lambda m, args, output: keeper(output))


def by_nested_hook(module, keeper):
    """Hook a module within the projection, which returns its output (as PEFT's wrappers can)."""
    inner = nn.Sequential(nn.Sequential(nn.Identity()))
    inner[0][0].forward = module.forward
    by_hook(inner[0][0], keeper)
    module.forward = inner.forward
    module.inner = inner


def by_replaced_forward(module, keeper):
    original = module.forward

    def forward(x):
        output = original(x)
        keeper(output)
        return output

    module.forward = forward


def by_accelerate(module, keeper):
    class KeepingHook(ModelHook):
        def post_forward(self, module, output):
            keeper(output)
            return output

    add_hook_to_module(module, KeepingHook())


INSTALL = [by_hook, by_nested_hook, by_replaced_forward, by_accelerate]
KEEP = {
    "itself": lambda x: x,
    "detached": lambda x: x.detach(),
    "slice": lambda x: x[:],
    "numpy": lambda x: x.detach().numpy(),
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "storage": lambda x: torch.empty(0).set_(x.untyped_storage()),
}
READ = {"llama": ["q_proj", "k_proj"], "qwen3": ["q_norm", "k_norm"]}


@pytest.mark.parametrize(
    ("install", "keep", "mode"),
    [
        *((install, "itself", torch.no_grad) for install in INSTALL),
        # Hooks are seen ahead of the call; these are seen by what refers to the memory alone.
        *((by_replaced_forward, keep, mode) for keep in KEEP for mode in MODES),
    ],
)
@pytest.mark.parametrize("family", READ)
def test_kept_outputs_stay_unchanged(family, keep, install, mode, overwritten):
    for name in READ[family]:
        model = make_model(family)
        patch(model, "auto")
        expected = logits(model, mode)
        overwritten.clear()
        keeper = Keeper(KEEP[keep])
        install(getattr(attention_of(model), name), keeper)
        assert logits(model, mode).equal(expected)
        keeper.check()
        assert overwritten == [False, True]  # the other layer has no reader


@pytest.mark.parametrize("install", INSTALL)
def test_kept_outputs_would_change_without_the_proof(install, monkeypatch):
    """Check that the test above can fail."""
    monkeypatch.setattr(attention_forward, "is_overwriting_possible", lambda attention: True)
    monkeypatch.setattr(attention_forward, "are_exclusive", lambda q, k=None: True)
    model, keeper = make_model(), Keeper(KEEP["itself"])
    patch(model, "auto")
    install(attention_of(model).q_proj, keeper)
    logits(model)
    with pytest.raises(AssertionError):
        keeper.check()


def test_storage_objects_are_readers(overwritten):
    model, kept = make_model(), []
    patch(model, "auto")
    by_replaced_forward(attention_of(model).k_proj, lambda x: kept.append(x.untyped_storage()))
    logits(model)
    assert overwritten == [False, True]


@pytest.mark.parametrize("family", READ)
def test_global_hooks_see_unchanged_outputs(family, overwritten):
    model, keeper = make_model(family), Keeper(KEEP["itself"])
    patch(model, "auto")
    modules = {getattr(attention_of(model), name) for name in READ[family]}
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: keeper(output) if module in modules else None
    )
    try:
        logits(model)
    finally:
        handle.remove()
    keeper.check()
    assert not any(overwritten)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_inputs_of_norms_stay_unchanged(kernels, mode, overwritten):
    """The norms' input is what Triton's kernel would overwrite."""
    model, keeper = make_model("qwen3"), Keeper(KEEP["itself"])
    patch(model, kernels)
    attention_of(model).q_norm.register_forward_pre_hook(lambda m, args: keeper(args[0]))
    with mode():
        model(input_ids=tokens(5))
    keeper.check()
    assert overwritten == [False, True]


@pytest.mark.parametrize("base", [TorchFunctionMode, TorchDispatchMode])
def test_modes_that_keep_results_see_them_unchanged(base, overwritten):
    kept = []

    class KeepingMode(base):
        def _keep(self, function, args, kwargs):
            result = function(*args, **(kwargs or {}))
            if type(result) is torch.Tensor and result.shape[-1:] == (16,):
                kept.append((result, result.clone()))
            return result

        def __torch_function__(self, function, types, args=(), kwargs=None):
            return self._keep(function, args, kwargs)

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return self._keep(function, args, kwargs)

    model = make_model()
    patch(model, "auto")
    with KeepingMode():
        logits(model)
    assert not any(overwritten)
    views = [x for x, _ in kept if x.dim() == 4]
    assert views


# -- projections whose output is not their own -----------------------------------------------------


class Constant(nn.Module):
    """A projection that returns the same tensor each time."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output


class SlicedProjections:
    """Two projections that slice one product, as fused ones do; `last` may outlive the slices."""

    def __init__(self, q_proj, k_proj, keep):
        self.weight = torch.cat((q_proj.weight, k_proj.weight)).detach()
        self.sizes = [q_proj.out_features, k_proj.out_features]
        self.keep, self.last = keep, None

    def install(self, attention):
        first, second = nn.Identity(), nn.Identity()
        first.forward, second.forward = self.project_q, self.project_k
        attention.q_proj, attention.k_proj = first, second

    def project_q(self, x):
        self.last = nn.functional.linear(x, self.weight).split(self.sizes, dim=-1)
        return self.last[0]

    def project_k(self, x):
        k = self.last[1]
        if not self.keep:
            self.last = None
        return k


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "both"])
def test_hidden_states_survive_an_identity_as_projection(name, mode, overwritten, copying):
    """Without a norm ahead of the attention, they are also the residual stream."""
    model = make_model(num_key_value_heads=4)
    patch(model, "auto")
    layer = model.model.layers[0]
    layer.input_layernorm = nn.Identity()
    for each in ("q_proj", "k_proj") if name == "both" else (name,):
        setattr(layer.self_attn, each, nn.Identity())
    got = logits(model, mode)
    assert overwritten == [False, True]
    copying()
    assert logits(model, mode).equal(got)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [False, True])
def test_slices_of_one_product(model, keep, mode, overwritten):
    expected = logits(model, mode)
    overwritten.clear()
    attention = attention_of(model)
    SlicedProjections(attention.q_proj, attention.k_proj, keep).install(attention)
    torch.testing.assert_close(logits(model, mode), expected, rtol=0, atol=1e-5)
    assert overwritten == [False, True]


def expanded_rows():
    return torch.randn(1, LENGTH, 32).expand(2, -1, -1)


def from_numpy():
    return torch.from_numpy(torch.randn(2, LENGTH, 32).numpy())


def in_shared_memory():
    return torch.randn(2, LENGTH, 32).share_memory_()


def part_of_more():
    return torch.randn(2, LENGTH, 48).as_strided((2, LENGTH, 32), (LENGTH * 32, 32, 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [expanded_rows, from_numpy, in_shared_memory, part_of_more])
def test_memory_of_another_kind_is_copied(model, make, mode, overwritten):
    attention_of(model).k_proj = projection = nn.Identity()
    projection.forward = lambda x: make()  # held by nothing else
    logits(model, mode)
    assert overwritten == [False, True]


def test_outputs_that_a_projection_returns_again(model, overwritten):
    output = torch.randn(2, LENGTH, 32)
    attention_of(model).k_proj = Constant(output)
    values = output.clone()
    assert logits(model).equal(logits(model))
    assert output.equal(values)
    assert overwritten == [False, True] * 2


def test_values_that_are_the_keys(model, overwritten):
    attention = attention_of(model)
    last = []
    by_replaced_forward(attention.k_proj, last.append)
    attention.v_proj = nn.Identity()
    attention.v_proj.forward = lambda x: last.pop()
    with_shared = logits(model)
    assert overwritten == [False, True]
    attention.v_proj.forward = lambda x: last.pop().clone()
    assert logits(model).equal(with_shared)


def test_weak_references_are_readers():
    probe, kept = exclusive_memory._Probe(), []
    with torch.no_grad():
        assert probe.forward(lambda x: None, lambda x: None)
        assert not probe.forward(lambda x: kept.append(weakref.ref(x)), lambda x: None)
        assert not probe.forward(lambda x: None, lambda x: kept.append(weakref.ref(x)))


@pytest.mark.parametrize("mode", MODES)
def test_references_of_cpp_code_are_readers(mode):
    """A DLPack capsule holds a C++ tensor, and no Python object."""
    probe = exclusive_memory._Probe()
    with mode():
        assert not probe.forward(lambda x: x.__dlpack__(), lambda x: None)
        assert not probe.forward(lambda x: None, lambda x: x.__dlpack__())


def test_lora_results_are_overwritten(model, overwritten, copying):
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    ).eval()
    got = logits(adapted)
    with adapted.disable_adapter():
        assert not logits(adapted).equal(got)
    assert all(overwritten)
    keeper = Keeper(KEEP["itself"])
    overwritten.clear()
    by_hook(attention_of(model).q_proj.base_layer, keeper)
    with adapted.disable_adapter():  # then the base layer's output is the adapter's
        logits(adapted)
    keeper.check()
    assert overwritten == [False, True]
    copying()
    assert logits(adapted).equal(got)


# -- modes -----------------------------------------------------------------------------------------


def test_gradients_and_checkpoints_do_not_change(overwritten, copying):
    """Reentrant checkpoints run without autograd first, so those rotations overwrite."""
    model = make_model("qwen3").train()
    patch(model, "auto")
    model.enable_input_require_grads()
    gradients = []
    for change in (lambda: None, copying):
        change()
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            gradients.append([x.clone() for x in backward_all(model)])
    assert any(overwritten)
    for other in gradients[1:]:
        for got, expected in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_autograd_copies(model, overwritten):
    with torch.enable_grad():
        model(input_ids=tokens(LENGTH))
        model.requires_grad_(False)
        model(input_ids=tokens(LENGTH))
    assert not any(overwritten)


def test_transforms_and_modes_copy():
    attention = attention_of(make_model())
    answers = []

    def ask(x):
        answers.append(exclusive_memory.is_overwriting_possible(attention))
        return x

    with torch.no_grad():
        ask(None)
        torch.func.vmap(ask)(torch.ones(2))
        torch.jit.trace(ask, torch.ones(2), check_trace=False)
        with TorchDispatchMode():
            ask(None)
        attention.q_proj.register_forward_hook(lambda *_: None)
        ask(None)
    with torch.enable_grad():
        ask(None)
    assert answers[0]
    assert not any(answers[1:])


def test_unreliable_counts_copy(monkeypatch):
    """A Python without known references, and a torch whose counts do not count."""
    monkeypatch.setattr(exclusive_memory._Probe, "passed", False)
    assert exclusive_memory.counts_are_reliable()
    monkeypatch.setattr(exclusive_memory._Probe, "passed", False)
    with monkeypatch.context() as context:
        context.setattr(torch._C, "_storage_Use_Count", lambda address: 3)
        assert not exclusive_memory.counts_are_reliable()
    with monkeypatch.context() as context:
        context.setattr(exclusive_memory, "_REFERENCES", 0)
        assert not exclusive_memory.counts_are_reliable()
    with monkeypatch.context() as context:  # one more than the true number: a reader fits in
        context.setattr(exclusive_memory, "_REFERENCES", exclusive_memory._REFERENCES + 1)
        assert not exclusive_memory.counts_are_reliable()


def test_sizes(monkeypatch, overwritten):
    """Small queries and keys are copied, because the proof would take longer."""
    numel = 2 * LENGTH * SIZES["head_dim"] * 6
    model = make_model()
    patch(model, "auto")
    for limit, expected in ((numel, True), (numel + 1, False)):
        monkeypatch.setattr(attention_forward, "_MIN_OVERWRITTEN_NUMEL", limit)
        overwritten.clear()
        logits(model)
        assert set(overwritten) == {expected}
