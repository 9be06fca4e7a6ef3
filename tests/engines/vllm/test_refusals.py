"""Test that engines which the plugin cannot rotate by request are refused at their start."""

import pytest

pytest.importorskip("vllm")
import transformers
from engine import ASSETS, LONGEST, rope_parameters
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding

from rope_patch.serving.vllm import requirements

pytestmark = pytest.mark.engines


def configure(model="tiny-llama", rope=None, **options):
    """Complete an engine's config as vLLM does at its start."""
    folder = ASSETS / model if isinstance(model, str) else model
    overrides = {"rope_parameters": rope_parameters("llama") if rope is None else rope}
    overrides["max_position_embeddings"] = LONGEST
    options = {"max_model_len": LONGEST, "hf_overrides": overrides, **options}
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", **options
    ).create_engine_config()


def test_an_engine_that_can_be_served_passes_and_takes_the_first_model_runner():
    config = configure()
    assert requirements.uses_plugin(config)
    assert not config.use_v2_model_runner


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_vllms_own_rotations_are_left_alone(rope_type):
    config = configure(rope=rope_parameters("llama", rope_type))
    assert not requirements.uses_plugin(config)
    assert requirements.FEATURE not in config._get_v2_model_runner_unsupported_features()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2}},
            "speculative decoding by 'ngram_gpu' was never compared; use ngram, draft_model, eagle",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "kv_transfer_config",
        ),
        ({"model_impl": "transformers"}, "transformers' own code"),
    ],
)
def test_options_that_would_rotate_wrongly_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        configure(**options)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_draft_model_that_asks_for_a_profile_is_refused(method, tmp_path):
    config = transformers.AutoConfig.from_pretrained(ASSETS / "tiny-llama")
    config.rope_parameters = rope_parameters("llama")
    config.save_pretrained(tmp_path)
    drafts = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="no request's profile reaches a draft"):
        configure(speculative_config=drafts)


def test_the_second_model_runner_is_refused(monkeypatch):
    config = configure()
    # Later, since without Triton vLLM itself refuses the switch.
    monkeypatch.setattr(envs, "VLLM_USE_V2_MODEL_RUNNER", True, raising=False)
    with pytest.raises(ValueError, match="second model runner has no place for it"):
        requirements.require_servable(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"original_max_position_embeddings": None}, "expected original_max_position_embeddings"),
        ({"factor": "four"}, "factor must be a number, got 'four'"),
        ({"rope_type": "mixed-yarn", "factor": "four"}, "factor must be a number, got 'four'"),
        (
            {"original_max_position_embeddings": 2 * LONGEST},
            r"expected at most max_position_embeddings \(1,024\), got 2,048",
        ),
        ({"betafast": 16}, r"no option 'betafast' \(did you mean 'beta_fast'"),
        ({"growth": "exact"}, "leave growth out"),
        ({"temperature": "log-n"}, "acts on queries"),
        ({"rope_type": "rerope", "window": 32}, "mapped positions"),
        ({"rope_type": "rope_patch:no-such-method"}, "unknown method"),
    ],
)
def test_rotations_that_no_table_can_hold_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        configure(rope=rope_parameters("llama") | changes)


def test_latent_attention_is_refused(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    config = transformers.DeepseekV2Config(
        **sizes, num_attention_heads=4, n_routed_experts=2, num_experts_per_tok=1
    )
    config.architectures = ["DeepseekV2ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="latent attention"):
        configure(tmp_path)


def test_an_unknown_release_is_refused_with_what_is_known(monkeypatch):
    monkeypatch.setattr(requirements, "KNOWN_RELEASES", ((0, 31),))
    with pytest.raises(ValueError, match=r"knows vLLM 0\.31, got 0\.32"):
        configure()


def test_get_rope_is_vllms_own_for_its_own_names():
    from vllm.config import VllmConfig, set_current_vllm_config

    configure()  # loads the plugin
    with set_current_vllm_config(VllmConfig()):
        arguments = (16, 64, True, {"rope_type": "default", "rope_theta": 123.0})
        extended = rotary_embedding.get_rope(*arguments)
        assert rotary_embedding.get_rope.rope_patch_original(*arguments) is extended
        assert type(extended) is rotary_embedding.RotaryEmbedding
