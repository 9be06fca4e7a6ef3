"""Test attention at mapped positions against sums over pairs in complex float64."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.exact_rotation import DEVICE, frequencies

pytest.importorskip("triton", minversion="3.6")

from rope_patch import ops
from rope_patch.ops import (
    AttentionRegions,
    dispatch,
    mapped_attention,
    pack_frequencies,
    self_check,
)

assert ops.triton_unavailable_reason() is None
attention = dispatch.kernel_module("attention")
attention_backward = dispatch.kernel_module("attention_backward")

# Of outputs of size 1; Triton's interpreter truncates to bfloat16, where a GPU rounds.
ERRORS = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 6e-2}


@dataclass
class Case:
    """One call, and what makes it: tensors are on the CPU and float32.

    Attributes:
        spans: First and last slot of the keys, `[B, R, Q, 2]`.
        shifts: Tokens by which queries, `[B, R, Q, N]`, and keys, `[B, R, S, N]`, are turned.
    """

    q: Any
    k: Any
    v: Any
    spans: Any
    shifts: Any
    inv_freq: Any
    settings: dict
    dtype: Any = torch.float32
    splits: int = 1

    @property
    def regions(self):
        (queries, keys), (start, stop) = self.shifts, self.spans.unbind(-1)
        turns = keys.ne(0).any(-1).any(-1).any(0).int()
        tables = (start.int(), stop.int(), queries, keys, turns, pack_frequencies(self.inv_freq))
        return AttentionRegions(*(x.contiguous().to(DEVICE) for x in tables))

    def inputs(self):
        return [x.to(self.dtype).to(DEVICE) for x in (self.q, self.k, self.v)]

    def sinks(self):
        sinks = self.settings["sinks"]
        return None if sinks is None else sinks.to(DEVICE)

    def launch(self):
        how = [self.settings[name] for name in ("scaling", "softcap", "interleaved")]
        return attention.launch(*self.inputs(), self.sinks(), self.regions, *how, self.splits)

    def gradients(self, out_grad):
        """Return gradients of queries, keys, values and sinks, if there are any."""
        leaves = [x.requires_grad_() for x in (*self.inputs(), self.sinks()) if x is not None]
        how = [self.settings[name] for name in ("scaling", "softcap", "interleaved")]
        sinks = leaves[3] if len(leaves) > 3 else None
        arguments = (*leaves[:3], sinks, self.regions, *how, self.splits)
        output = attention_backward.AttentionFunction.apply(*arguments)
        return torch.autograd.grad(output, leaves, out_grad.to(self.dtype).to(DEVICE))

    def true_gradients(self, out_grad):
        leaves = [x.to(self.dtype).double().requires_grad_() for x in (self.q, self.k, self.v)]
        settings = dict(self.settings)
        if settings["sinks"] is not None:
            settings["sinks"] = settings["sinks"].double().requires_grad_()
            leaves.append(settings["sinks"])
        output, _ = truth(*leaves[:3], self.spans, self.shifts, self.inv_freq, **settings)
        return torch.autograd.grad(output, leaves, out_grad.to(self.dtype).double())

    def check_gradients(self):
        generator = torch.Generator().manual_seed(99)
        out_grad = torch.randn(*self.q.shape[:3], self.v.shape[-1], generator=generator)
        got, expected = self.gradients(out_grad), self.true_gradients(out_grad)
        for each, exact in zip(got, expected, strict=True):
            limit = ERRORS[self.dtype] * max(1.0, float(exact.abs().max()))
            torch.testing.assert_close(each.cpu().double(), exact, rtol=0, atol=limit)

    def truth(self):
        """Return output and log-sum-exp: the angle of a pair is that of the sum of its shifts."""
        q, k, v = (x.to(self.dtype).double() for x in (self.q, self.k, self.v))
        return truth(q, k, v, self.spans, self.shifts, self.inv_freq, **self.settings)

    def check(self):
        for got, expected in zip(self.launch(), self.truth(), strict=True):
            assert got.dtype == (self.dtype if got.ndim == 4 else torch.float32)
            limit = ERRORS[self.dtype]
            torch.testing.assert_close(got.cpu().double(), expected, rtol=limit, atol=limit)


def as_complex(x, pairs, interleaved):
    part = x[..., : 2 * pairs].unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    return torch.complex(*part.unbind(-1 if interleaved else -2)), x[..., 2 * pairs :]


def truth(q, k, v, spans, shifts, inv_freq, *, scaling, softcap, sinks, interleaved):
    pairs, groups = len(inv_freq), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    (q, q_rest), (k, k_rest) = (as_complex(x, pairs, interleaved) for x in (q, k))
    plain = q_rest @ k_rest.transpose(-1, -2)
    slots = torch.arange(k.shape[2])
    logits = torch.full_like(plain, -torch.inf)
    for region in range(spans.shape[1]):
        turned, shift = [], [x[:, region].double() for x in shifts]
        for each in shift:
            turned.append(each.repeat_interleave(pairs // each.shape[-1], -1) * inv_freq.double())
        angle = turned[0][:, :, None] - turned[1][:, None]  # [B, Q, S, P]
        product = (q[:, :, :, None] * k[:, :, None].conj() * torch.polar(
            torch.ones_like(angle), angle
        )[:, None]).real.sum(-1)  # fmt: skip
        start, stop = (x[:, None, :, None] for x in spans[:, region].unbind(-1))
        logits = torch.where((slots >= start) & (slots < stop), (product + plain) * scaling, logits)
    if softcap is not None:
        logits = torch.where(logits.isneginf(), logits, softcap * (logits / softcap).tanh())
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    lse = logits.logsumexp(-1)
    is_blind = lse.isneginf()[..., None]  # whose gradients are 0, not NaN
    weights = logits.masked_fill(is_blind, 0).softmax(-1).masked_fill(is_blind, 0)
    weights = weights[..., : len(slots)]
    return weights @ v, lse


def draw_case(seed, **changes):
    """Draw a small call of any kind."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, key_heads, group = dice.choice([1, 1, 2]), dice.choice([1, 2]), dice.choice([1, 2, 3])
    steps = dice.choice([1, dice.randint(2, 18)])
    slots, regions = steps + dice.randint(0, 25), dice.choice([1, 2, 3])
    parts = dice.choice([1, 1, 2, 3])
    pairs = parts * dice.choice([1, 2, 4])
    rest, dims = dice.choice([0, 0, 5]), dice.choice([8, 16, 20])
    spans = torch.zeros(batch, regions, steps, 2, dtype=torch.int64)
    for row in range(batch):
        for query in range(steps):
            cuts = sorted(dice.choices(range(slots + 1), k=2 * regions))
            spans[row, :, query] = torch.tensor(cuts).view(regions, 2)[
                dice.sample(range(regions), regions)
            ]
            if dice.random() < 0.2:  # sees nothing, by an end before the start
                spans[row, :, query] = torch.tensor([dice.randint(1, slots), 0])
    size = dice.choice([3, 1_000, 10_000_019])
    shifts = [
        torch.randint(-size, size, (batch, regions, n, parts), generator=generator)
        for n in (steps, slots)
    ]
    for shift in shifts:  # regions that turn neither or one of both
        shift[:, dice.randrange(regions)] *= dice.choice([0, 1])
    heads = key_heads * group
    shapes = [(batch, heads, steps), (batch, key_heads, slots), (batch, key_heads, slots)]
    widths = [2 * pairs + rest, 2 * pairs + rest, dims]
    tensors = []
    for shape, width in zip(shapes, widths, strict=True):
        x = torch.randn(*shape, width, generator=generator)
        layout = dice.choice(["plain", "tokens before heads", "every other component"])
        if layout == "tokens before heads":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "every other component":
            x = torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]
        tensors.append(x)
    settings = {
        "scaling": dice.choice([0.2, 0.5]),
        "softcap": dice.choice([None, None, 2.0]),
        "sinks": dice.choice([None, torch.randn(heads, generator=generator)]),
        "interleaved": dice.random() < 0.5,
    }
    dtype = dice.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    splits = dice.choice([1, 1, 2, 3])
    case = Case(*tensors, spans, shifts, frequencies(2 * pairs), settings, dtype, splits)
    for name, value in changes.items():
        setattr(case, name, value)
    return case


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_match_float64(seed):
    draw_case(seed).check()


@pytest.mark.parametrize("seed", range(400, 412))
def test_random_gradients_match_float64(seed):
    draw_case(seed).check_gradients()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 312))
def test_many_random_calls_match_float64(seed):
    draw_case(seed).check()
    draw_case(seed).check_gradients()


PLAIN = {"scaling": 1.0, "softcap": None, "sinks": None, "interleaved": False}


def test_queries_without_keys_are_0():
    case = draw_case(3, settings=PLAIN)
    case.spans = torch.zeros_like(case.spans)
    for splits in (1, 2):
        case.splits = splits
        output, lse = case.launch()
        assert not output.any()
        assert lse.isneginf().all()


def test_steps_over_long_texts_share_their_keys():
    case = draw_case(1)
    slots = 600
    case.q = torch.randn(1, 2, 1, 16)
    case.k, case.v = (torch.randn(1, 1, slots, 16) for _ in range(2))
    case.spans = torch.tensor([[[[500, slots]], [[0, 500]]]])
    case.shifts = [torch.tensor([[[[0]], [[-77]]]]), torch.randint(-9, 9, (1, 2, slots, 1))]
    case.inv_freq, case.settings, case.dtype = frequencies(16), PLAIN, torch.float32
    case.splits = attention.count_splits(case.q, case.k)
    assert case.splits == 2
    case.check()
    assert attention.count_splits(case.q.expand(1, 2, 8192, 16), case.k) == 1


# -- the op ----------------------------------------------------------------------------------------


def call(case, kernels="triton", **changes):
    q, k, v = (changes.get(name, x) for name, x in zip("qkv", case.inputs(), strict=True))
    how = {**case.settings, "sinks": case.sinks()}
    return mapped_attention(q, k, v, case.regions, kernels=kernels, **how)


def test_the_op_returns_the_kernels_output():
    case = draw_case(5)
    assert torch.equal(call(case), case.launch()[0])


def test_what_the_kernel_does_not_take_is_left_to_others():
    case = draw_case(1, dtype=torch.float32)
    q, k, v = case.inputs()
    assert call(case, "hf") is None
    assert call(case, "reference") is None
    assert call(case, k=k.half()) is None
    assert call(case, v=torch.zeros(*v.shape[:3], 300, device=DEVICE)) is None
    if DEVICE == "cpu":
        assert call(case, "auto") is None
        with pytest.raises(ValueError, match="float64"):
            call(case, q=q.double(), k=k.double(), v=v.double())


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_kernel_is_checked_at_its_first_use(is_wrong, softcap, monkeypatch, caplog):
    monkeypatch.setenv("ROPE_PATCH_SELF_CHECK", "1")
    for name in ("passed", "_problems", "_reports"):
        monkeypatch.setattr(self_check, name, type(getattr(self_check, name))())
    monkeypatch.setattr(dispatch, "use_triton", lambda x, kernels="auto": True)
    real, launched = attention.launch, []

    def launch(*arguments):
        launched.append(arguments)
        output, lse = real(*arguments)
        return (output * 1.01 if is_wrong else output), lse

    monkeypatch.setattr(attention, "launch", launch)
    case = draw_case(5, dtype=torch.float32)
    case.settings["softcap"] = softcap
    output = call(case, "auto")
    assert len(launched) == (1 if is_wrong else 2)
    assert (output is None) is is_wrong
    if is_wrong:
        assert "mapped_attention" in caplog.text
        with pytest.raises(RuntimeError, match="output is off by"):
            call(case, "triton")
    call(case, "auto")
    assert len(launched) == (1 if is_wrong else 3)
