"""Test position maps in one compiled graph, against eager mode and against autograd."""

import pytest
import torch
from helpers.tiny_models import LONG, SHORT, assert_close, make_model, tokens
from torch.library import opcheck
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

import rope_patch
from rope_patch.methods import build
from rope_patch.patching.position_maps.graph_operator import (
    attend_in_graph,
    mapped_attention,
    write_settings,
)
from rope_patch.patching.position_maps.shift_tables import ShiftRotation
from rope_patch.transformers_api.attention_functions import AttentionCall

pytestmark = [
    pytest.mark.usefixtures("reset_compiler"),
    pytest.mark.skipif(
        not hasattr(torch._C.Tag, "cudagraph_unsafe"), reason="maps break graphs of this torch"
    ),
]


def logits(model, ids, **arguments):
    with torch.no_grad():
        return model(ids, use_cache=False, **arguments).logits


@pytest.mark.parametrize(
    ("family", "attention", "method"),
    [
        ("llama", "sdpa", "rerope"),
        # Softcaps, layers with a window, weights.
        pytest.param("gemma2", "eager", "self-extend", marks=pytest.mark.slow),
        pytest.param("gemma3", "sdpa", "self-extend", marks=pytest.mark.slow),
        pytest.param("qwen3", "eager", "rerope", marks=pytest.mark.slow),
    ],
)
def test_a_forward_is_one_graph_and_equals_eager_mode(family, attention, method):
    model = make_model(family)
    model.set_attn_implementation(attention)
    rope_patch.patch(model, method)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    batch = tokens(LONG).repeat(2, 1)
    mask = torch.ones_like(batch)
    mask[1, :30] = 0
    for ids in (tokens(LONG), tokens(SHORT)):
        assert_close(logits(compiled, ids), logits(model, ids))
    got, expected = (logits(each, batch, attention_mask=mask) for each in (compiled, model))
    assert_close(got[mask.bool()], expected[mask.bool()])
    places = torch.arange(40, 40 + SHORT)[None]
    got, expected = (logits(each, tokens(SHORT), position_ids=places) for each in (compiled, model))
    assert_close(got, expected)


def test_a_training_step_is_one_graph_with_the_gradients_of_eager_mode():
    model, ids = make_model("llama"), tokens(LONG)
    rope_patch.patch(model, "self-extend")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for each in (model, compiled):
        model.zero_grad()
        each(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


class OtherAttention(LlamaAttention):
    """A Llama's attention that hands its function more than its own does."""

    passed = ()  # by position, behind the mask
    copies = 1  # of the keys

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (torch.cat([each] * self.copies, dim=2) for each in (k, v))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        given = {"dropout": 0.0, "scaling": self.scaling}
        output, weights = attend(self, q, k, v, attention_mask, *self.passed, **given, **kwargs)
        return self.o_proj(output.flatten(2)), weights


@pytest.mark.parametrize(
    ("differs", "said"),
    [({"passed": (None,)}, "by position"), ({"copies": 2}, "the position of every key")],
)
@pytest.mark.parametrize("compiles", [False, True])
def test_what_a_map_cannot_know_is_refused_in_a_graph_too(differs, said, compiles):
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Attention", (OtherAttention,), differs)
    rope_patch.patch(model, "rerope")
    called = torch.compile(model, backend="eager") if compiles else model
    with pytest.raises(rope_patch.Refused, match=said):
        logits(called, tokens(LONG))


def case(method="rerope", steps=90, dtype=torch.float64):
    """Return the settings, positions and inputs of an attention with shared keys."""
    torch.manual_seed(0)
    rotation = ShiftRotation(1e4 ** -(torch.arange(4, dtype=torch.float64) / 4), False)
    settings = write_settings(build(method, window=16), 64, rotation)
    sizes = ((1, 4, steps, 8), (1, 2, steps, 8), (1, 2, steps, 8), (4,))
    inputs = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
    return settings, torch.arange(steps)[None], inputs


@pytest.mark.parametrize("method", ["rerope", "self-extend"])
def test_gradients_are_those_of_finite_differences(method):
    """With a soft cap and sinks, in float64; each direction is drawn at random."""
    settings, positions, inputs = case(method)
    probe = torch.randn(1, 90, 4, 8, dtype=torch.float64)

    def loss(q, k, v, sinks):
        call = AttentionCall(0.5, softcap=3.0, sinks=sinks, first_ahead=1)
        return (attend_in_graph(settings, call, positions, q, k, v)[0] * probe).sum()

    gradients = torch.autograd.grad(loss(*inputs), inputs)
    for index, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        ends = []
        for sign in (1, -1):
            moved = [each.detach() for each in inputs]
            moved[index] = moved[index] + sign * 1e-6 * direction
            ends.append(loss(*moved).item())
        expected = (ends[0] - ends[1]) / 2e-6
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("returns_weights", [False, True])
def test_torch_accepts_the_operator(returns_weights):
    settings, positions, (q, k, v, sinks) = case(dtype=torch.float32)
    how = (0.5, None, 0.0, False, False, 1, returns_weights)
    opcheck(mapped_attention, (q, k, v, positions, None, sinks, None, settings, *how))


def test_dropout_has_no_gradients_in_a_graph():
    settings, positions, (q, k, v, _) = case()
    call = AttentionCall(0.5, dropout=0.5, first_ahead=1)
    with pytest.raises(rope_patch.Refused, match=r"0\.5.*attention_dropout"):
        attend_in_graph(settings, call, positions, q, k, v)
