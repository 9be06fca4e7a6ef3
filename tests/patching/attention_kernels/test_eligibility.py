"""Test which models and requests our kernels refuse."""

import pytest
import transformers
from helpers.tiny_models import (
    SIZES,
    make_model,
)
from kernel_models import (
    logits,
    modules_with_forward,
    patch,
)

import rope_patch
from rope_patch import ops
from rope_patch.patching.kernels.attention_forward import (
    PatchedAttentionForward,
)
from rope_patch.patching.kernels.position_passthrough import PositionPassthrough

pytest.importorskip("triton")


def test_model_that_uses_cos_and_sin_itself_is_refused():
    config = transformers.DeepseekV3Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        first_k_dense_replace=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"DeepseekV3Attention uses cos and sin in a way of its"):
        patch(model, "triton")
    assert rope_patch.current(model) is None
    patch(model, "auto")
    assert not modules_with_forward(model, PatchedAttentionForward)
    summary = rope_patch.current(model).summary()
    assert "transformers' own rotation (DeepseekV3Attention uses" in summary


def test_several_positions_per_token_are_refused():
    config = transformers.Qwen2VLTextConfig(
        **SIZES,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )
    model = transformers.Qwen2VLTextModel(config).eval()
    with pytest.raises(ValueError, match='kernels="reference" cannot rotate this model'):
        patch(model, "reference")
    patch(model, "auto")
    assert not modules_with_forward(model, PositionPassthrough)


def test_unknown_kernels_error_lists_the_known_ones():
    with pytest.raises(ValueError, match="one of auto, reference, triton, hf, got 'cuda'"):
        patch(make_model(), "cuda")


def test_triton_on_a_cpu_error_names_the_next_step(monkeypatch):
    model = make_model()
    patch(model, "triton")
    monkeypatch.setattr("rope_patch.ops.dispatch.is_interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"needs tensors on a GPU, got cpu.*auto"):
        logits(model)


def test_missing_triton_is_an_error_only_on_request(monkeypatch):
    monkeypatch.setattr(
        "rope_patch.patching.kernels.eligibility.triton_unavailable_reason",
        lambda: "Triton is gone",
    )
    model = make_model()
    with pytest.raises(ValueError, match=r"triton is gone.*pip install 'rope-patch\[kernels\]'"):
        patch(model, "triton")
    patch(model, "auto")
    logits(model)


def test_failed_patch_leaves_the_model_unchanged(monkeypatch):
    model = make_model("qwen3")
    before = logits(model)
    monkeypatch.setattr(
        "rope_patch.patching.kernels.eligibility.PositionPassthrough",
        lambda *a: (_ for _ in ()).throw(KeyError()),
    )
    with pytest.raises(KeyError):
        patch(model, "reference")
    assert logits(model).equal(before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert ops.KERNELS == ("auto", "reference", "triton", "hf")
