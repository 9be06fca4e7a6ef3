"""Test what a proof says of classes, right, wrong or refusing, and the tiny models it makes."""

import inspect
import json

import pytest
import torch
import transformers
from helpers.releases import plain_transformers
from helpers.tiny_models import make_config, make_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cache,
    DeepseekV3Config,
    LlamaForCausalLM,
)

from rope_patch.entry_points import prove
from rope_patch.patching import CannotShrink, tiny_config, tiny_model

STATIC, DYNAMIC, TWO_SETS, MAP = "static", "dynamic", "two sets", "position map"
KINDS = [STATIC, DYNAMIC, TWO_SETS, MAP, "temperature", "start tokens"]
LIMIT = 1e-3  # of logits


def empty_model(config):
    """Return a model without weights, on the meta device."""
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    kind = next(each for each in kinds if type(config) in each._model_mapping)
    with torch.device("meta"):
        return kind.from_config(config)


@pytest.mark.parametrize(("implementation", "kinds"), [("sdpa", None), ("eager", [STATIC, MAP])])
def test_every_kind_passes(implementation, kinds):
    model = make_model("gemma3")
    model.set_attn_implementation(implementation)
    proof = prove(model, *([] if kinds is None else [kinds]))
    assert [kind.kind for kind in proof.kinds] == (kinds or KINDS)
    assert {kind.verdict for kind in proof.kinds} == {"passed"}
    assert proof.is_ok
    for kind in proof.kinds:
        assert {check.verdict for check in kind.checks} == {"ok"}
        assert len(kind.checks) >= 10
        assert all(check.error < LIMIT / 10 for check in kind.checks if check.error is not None)


def test_the_proof_reads_as_text_and_as_json():
    proof = prove(make_model(), [STATIC, DYNAMIC])
    text = proof.as_text()
    assert text.startswith("LlamaForCausalLM, a tiny model")
    assert "| **verdict** | passed | passed |" in text
    assert "| cached keys follow a growing text |  | " in text  # dynamic alone
    data = json.loads(json.dumps(proof.as_dict(), allow_nan=False))
    assert data["ok"]
    assert data["kinds"][0]["checks"][0]["verdict"] == "ok"


def test_a_method_that_a_class_refuses_is_no_failure():
    model = empty_model(DeepseekV3Config())
    proof = prove(model, [STATIC, MAP])
    assert [kind.verdict for kind in proof.kinds] == ["passed", "refused"]
    assert "latent attention" in proof.as_text()
    assert proof.is_ok


@pytest.mark.parametrize(
    ("part", "kind", "properties"),
    [
        # A guard that finds nothing to guard, as on a release that renames an argument.
        (
            "handle.install_cache_stamps",
            STATIC,
            (
                "a cache of the unpatched model is refused",
                "a cache of another patch is refused",
            ),
        ),
        *(
            (
                "dynamic.rerotation.KeyRerotation.rerotate",
                kind,
                ("cached keys follow a growing text",),
            )
            for kind in (DYNAMIC, TWO_SETS)
        ),
        ("handle.set_frequencies", STATIC, ("the patch acts",)),
    ],
)
def test_a_part_that_does_nothing_fails_the_proof(part, kind, properties, monkeypatch):
    model = make_model()
    monkeypatch.setattr(f"rope_patch.patching.{part}", lambda *_, **__: [])
    proof = prove(model, [kind])
    assert not proof.is_ok
    (failed,) = proof.kinds
    assert failed.verdict == "failed"
    verdicts = {check.name: check.verdict for check in failed.checks}
    for property_ in properties:
        assert verdicts[property_] == "wrong"
        assert property_ in " ".join(failed.failures)


def test_an_undo_that_leaves_something_fails_the_proof(monkeypatch):
    monkeypatch.setattr("rope_patch.patching.undo_log.ConfigOverride.undo", lambda *_: [])
    (kind,) = prove(make_model(), [STATIC]).kinds
    assert kind.verdict == "failed"
    assert "refused after it was undone" in kind.problem


class Forgetful(LlamaForCausalLM):
    """Loses the last token of a cache, with and without a patch."""

    def forward(self, *args, **kwargs):
        for value in kwargs.values():
            if isinstance(value, Cache):
                value.crop(-1)
        return super().forward(*args, **kwargs)

    forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)


def test_what_transformers_lacks_is_not_asked_of_a_patch():
    torch.manual_seed(0)
    (kind,) = prove(Forgetful(make_config()), [STATIC]).kinds
    checks = {check.name: check for check in kind.checks}
    assert checks["cached steps equal one pass"].verdict == "not asked"
    assert "the unpatched model lacks it, too" in checks["cached steps equal one pass"].problem
    assert checks["rows padded on the left equal rows alone"].verdict == "ok"
    assert kind.verdict == "not proven"  # nothing is known of caches
    assert "cannot be told" in kind.problem


# -- tiny models -----------------------------------------------------------------------------------

# Sizes of published models.
LLAMA_3 = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
PHI_4_MINI = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 200064,
    "pad_token_id": 199999,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 48,
        "long_factor": [1 + 0.5 * pair for pair in range(48)],
        "original_max_position_embeddings": 4096,
    },
}
QWEN_2_VL = {
    "text_config": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    }
}
MODELS = {
    "llama-3.1-8b": ("LlamaConfig", LLAMA_3),
    "phi-4-mini": ("Phi3Config", PHI_4_MINI),
    "qwen2-vl-7b": ("Qwen2VLConfig", QWEN_2_VL),
    "deepseek-v3": ("DeepseekV3Config", {}),
    "gemma-3": ("Gemma3Config", {}),
    "gpt-neox": ("GPTNeoXConfig", {"rope_parameters": None}),
    "qwen3-moe": ("Qwen3MoeConfig", {}),
    "gpt-oss": ("GptOssConfig", {}),
}


def live(name):
    """Return a model of the published sizes on the meta device, and its text config."""
    config, fields = MODELS[name]
    with plain_transformers():  # 5.0 cannot build Phi-4-mini
        model = empty_model(getattr(transformers, config)(**fields))
    return model, model.config.get_text_config(decoder=True)


@pytest.mark.parametrize("name", MODELS)
def test_models_shrink(name):
    model, config = live(name)
    state = torch.get_rng_state()
    tiny = tiny_model(model, config)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(tiny) is type(model)
    assert sum(parameter.numel() for parameter in tiny.parameters()) < 3_000_000
    assert {p.dtype for p in tiny.parameters()} == {torch.float32}
    assert {p.device.type for p in tiny.parameters()} == {"cpu"}
    text = tiny.config.get_text_config(decoder=True)
    assert text.max_position_embeddings == 64
    kinds = getattr(config, "layer_types", None)
    assert set(getattr(text, "layer_types", None) or ()) == set(kinds or ())
    again = tiny_model(model, config)
    assert all(
        torch.equal(a, b) for a, b in zip(tiny.parameters(), again.parameters(), strict=True)
    )
    assert model.config.get_text_config(decoder=True).num_hidden_layers > 4  # it is only read


def test_scaled_frequencies_keep_their_kind():
    tiny = tiny_config(transformers.LlamaConfig(**LLAMA_3))
    assert tiny.rope_parameters["rope_type"] == "llama3"
    assert tiny.rope_parameters["rope_theta"] == 5e5
    assert tiny.rope_parameters["factor"] == 8
    assert (tiny.num_attention_heads, tiny.num_key_value_heads) == (4, 2)


def test_each_pair_keeps_a_stretch():
    tiny = tiny_config(transformers.Phi3Config(**PHI_4_MINI)).rope_parameters
    assert tiny["partial_rotary_factor"] == 0.75
    assert tiny["long_factor"] == [1 + 0.5 * pair for pair in range(0, 48, 8)]  # 6 pairs of 16 dims
    assert tiny["short_factor"] == [1.0] * 6


def test_sections_of_axes_keep_their_shares():
    model, config = live("qwen2-vl-7b")
    assert tiny_model(model, config).config.text_config.rope_parameters["mrope_section"] == [
        2,
        3,
        3,
    ]


def test_yarn_reaches_the_trained_length():
    tiny = tiny_config(transformers.DeepseekV3Config(max_position_embeddings=163840))
    rope = tiny.rope_parameters
    if rope["rope_type"] == "yarn":
        assert rope["factor"] * rope["original_max_position_embeddings"] == 64
    assert tiny.num_key_value_heads == tiny.num_attention_heads == 4  # latent attention


@pytest.mark.parametrize("heads", [(32, 1, 1), (32, 32, 4), (32, 8, 2)])
def test_groups_of_heads_stay_groups(heads):
    own, groups, expected = heads
    config = transformers.LlamaConfig(num_attention_heads=own, num_key_value_heads=groups)
    assert tiny_config(config).num_key_value_heads == expected


def test_settings_of_single_layers_follow_their_layers():
    config = transformers.SmolLM3Config(num_hidden_layers=8, no_rope_layers=[1, 1, 1, 0] * 2)
    assert tiny_config(config).no_rope_layers == [1, 1]
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, layer_types=kinds)
    assert tiny_config(config).layer_types == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("extended", ["full_attention", "sliding_attention"])
def test_the_extended_layer_comes_last(extended):
    model, config = live("gemma-3")
    tiny = tiny_model(model, config, last=[extended])
    types = tiny.config.text_config.layer_types
    assert (len(types), types[-1]) == (2, extended)


def test_two_attentions_in_a_layer_have_no_last_one():
    config = transformers.LongcatFlashConfig()
    model = empty_model(config)
    assert tiny_model(model, config)
    with pytest.raises(CannotShrink, match="attentions, expected 1"):
        tiny_model(model, config, last=[None])


def test_quantized_weights_shrink_to_plain_ones():
    config = transformers.LlamaConfig(**LLAMA_3)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert getattr(tiny_config(config), "quantization_config", None) is None


def test_what_is_not_of_transformers_cannot_shrink():
    with pytest.raises(CannotShrink, match="Linear is not of transformers"):
        tiny_model(torch.nn.Linear(2, 2), transformers.LlamaConfig())
