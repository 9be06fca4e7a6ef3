"""Test the layers of the kernels' package against transformers' own rotations."""

import inspect

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from rope_patch.ops import apply_rotary_transformers

MODELS = {"llama": (modeling_llama, 1), "gpt-oss": (modeling_gpt_oss, 2)}
DIM = 32


def inputs(heads_dim=1, dtype=torch.float32, share=1):
    """Return queries, keys, cos and sin; `share` is the share of D that cos and sin have."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 5, DIM).to(dtype) for heads in (4, 2))
    if heads_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angle = torch.rand(2, 5, DIM // 2) * 6
    angle = torch.cat((angle, angle), -1) if share == 1 else angle
    return q.requires_grad_(), k.requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(*args):
    return apply_rotary_transformers()(*args)


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_float32_is_transformers_to_the_bit(model, heads_dim):
    module, share = MODELS[model]
    q, k, cos, sin = inputs(heads_dim, share=share)
    found = rotate(q, k, cos, sin, heads_dim)
    expected = module.apply_rotary_pos_emb(q, k, cos, sin, heads_dim)
    weights = [torch.randn_like(x) for x in found]
    grads, expected_grads = (torch.autograd.grad(x, (q, k), weights) for x in (found, expected))
    for x, y in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(x, y)


def test_bfloat16_is_rounded_once():
    q, k, cos, sin = inputs(dtype=torch.bfloat16)
    wide = [x.double() for x in (q, k, cos, sin)]
    expected = modeling_llama.apply_rotary_pos_emb(*wide)
    for x, y in zip(rotate(q, k, cos, sin), expected, strict=True):
        assert torch.equal(x, y.float().bfloat16())


def test_other_shapes_agree():
    """Vision models have no batch: `[S, H, D]` and `[S, D]`."""
    q, k, cos, sin = inputs(heads_dim=2)
    args = (q[0], k[0], cos[0], sin[0], 1)
    expected = modeling_llama.apply_rotary_pos_emb(*args)
    for x, y in zip(rotate(*args), expected, strict=True):
        torch.testing.assert_close(x, y)


def test_compiles_in_one_graph():
    args = inputs()
    compiled = torch.compile(rotate, backend="eager", fullgraph=True)
    for x, y in zip(compiled(*args), rotate(*args), strict=True):
        torch.testing.assert_close(x, y)


def test_refuses_tables_of_another_width():
    q, k, cos, sin = inputs()
    with pytest.raises(ValueError, match="32 or 16"):
        rotate(q, k, cos[..., :24], sin[..., :24])


def test_is_a_layer_as_the_library_wants_it():
    """Stateless, without other members, and with the signature of what it stands for."""
    layer = apply_rotary_transformers
    assert layer.__init__ is nn.Module.__init__
    assert set(dir(layer)) - set(dir(nn.Module)) == {"can_torch_compile", "has_backward"}
    parameters = list(inspect.signature(layer.forward).parameters.values())[1:]
    expected = inspect.signature(modeling_llama.apply_rotary_pos_emb).parameters.values()
    assert [(p.name, p.default) for p in parameters] == [(p.name, p.default) for p in expected]
