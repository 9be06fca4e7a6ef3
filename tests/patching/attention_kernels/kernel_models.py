"""Define models and helpers for tests that compare kernels."""

import torch
from helpers.tiny_models import forward, tokens

import rope_patch

OURS = ["reference", "triton"]
FEW = 6  # tokens, because Triton's interpreter is slow

# More than the families of all tests: norms across heads, experts, interleaved pairs, partly
# rotated heads, layers without rotation (with norms in EXAONE 4). Olmo 3's full-attention layers
# have another rotary module.
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
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
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", _TWO_KINDS),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", _TWO_KINDS),
}
NORMED = ["qwen3", "gemma3", "olmo2", "olmo3", "qwen3_moe"]


def logits(model):
    return forward(model, tokens(FEW))


def patched_attentions(model):
    """Return the attentions whose forward was replaced."""
    return [m for m in model.modules() if "forward" in vars(m) and hasattr(m, "layer_idx")]


def deferred_norms(model):
    """Return what attentions call in the place of norms."""
    return [x for m in model.modules() for name, x in vars(m).items() if "_deferred_" in name]


def patch(model, kernels, method="yarn", **options):
    options = options or ({} if method.startswith("dynamic") else {"factor": 4})
    return rope_patch.patch(model, method, kernels=kernels, **options)


def backward(model, length=6):
    """Return the gradients of the loss for every parameter."""
    ids = tokens(length)
    loss = model(input_ids=ids, labels=ids).loss
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def saved_bytes(call):
    """Return the bytes of all storages that a call saves for the backward pass."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    assert out.requires_grad
    return sum(size for _, size in storages.values())


def backward_all(model, length=6):
    """Return the gradients by `.backward()`, the only way that reentrant checkpoints support."""
    model.zero_grad()
    model(input_ids=tokens(length), labels=tokens(length)).loss.backward()
    return [parameter.grad for parameter in model.parameters()]
