"""Models and helpers of the tests that compare kernels."""

import torch
from helpers.tiny_models import (
    forward,
    tokens,
)

import rope_patch

OURS = ["reference", "triton"]
FEW = 20  # tokens: the interpreter takes its time

# Beside the families of all tests: norms across heads, experts, neighbours, parts of heads, layers
# that do not rotate. Olmo 3's long layers have a rotary module of their own kind.
OTHERS = {
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    ),
    "cohere": ("CohereConfig", "CohereForCausalLM", {}),
    "glm": ("GlmConfig", "GlmForCausalLM", {}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    ),
}
NORMED = ["qwen3", "gemma3", "olmo2", "olmo3", "qwen3_moe"]


def logits(model):
    return forward(model, tokens(FEW))


def parts(model, kind):
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), kind)]


def patch(model, kernels, method="yarn", **options):
    options = options or ({} if method.startswith("dynamic") else {"factor": 4})
    return rope_patch.patch(model, method, kernels=kernels, **options)


def backward(model, length=12):
    """Return a loss's gradients of every parameter."""
    ids = tokens(length)
    loss = model(input_ids=ids, labels=ids).loss
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def saved_by(call):
    """Return the bytes of all storages that are saved for the backward pass."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    assert out.requires_grad
    return sum(size for _, size in storages.values())


def backward_all(model, length=12):
    """Run `backward` for reentrant checkpoints, which only support `.backward()`."""
    model.zero_grad()
    model(input_ids=tokens(length), labels=tokens(length)).loss.backward()
    return [parameter.grad for parameter in model.parameters()]
