"""Test position maps in whole models against attention that is written out, pair by pair."""

from types import MethodType

import pytest
import torch
import transformers
from helpers.growing_texts import read_in_parts
from helpers.tiny_models import SIZES, TRAINED, forward, make_model, step_by_step, tokens
from helpers.written_out_maps import MAPS, written_out

import rope_patch

LENGTH = 120  # DCA has chunks of 48
IDS = tokens(LENGTH)
OVER_THE_TRAINED_LENGTH = [TRAINED - 3, *[1] * 6, LENGTH - TRAINED - 8]


def gpt_oss():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SIZES,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    model.set_attn_implementation("eager")
    return model


FAMILIES = ("llama", "qwen3", "gemma2", "gemma3")
MODELS = {name: lambda name=name: make_model(name) for name in FAMILIES} | {"gpt_oss": gpt_oss}


def use_exact_angles(model):
    """Have a float64 model rotate by angles in float64, which transformers rounds to float32."""

    def exact(module, x, position_ids, layer_type=None):
        prefix = "" if layer_type is None else f"{layer_type}_"
        inv_freq = getattr(module, f"{prefix}inv_freq").double()
        angle = position_ids[..., None].double() * inv_freq
        angle = torch.cat([angle, angle], -1)
        scale = getattr(module, f"{prefix}attention_scaling")
        return (angle.cos() * scale).to(x.dtype), (angle.sin() * scale).to(x.dtype)

    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(exact, module)
    return model


def close(got, expected, atol=1e-4):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def assert_reads_as(model, expected, readings, atol=1e-4):
    """Check a prompt at once, and in parts, after which come steps."""
    close(forward(model, IDS), expected, atol)
    for parts in readings:
        cache = transformers.DynamicCache(config=model.config)
        close(read_in_parts(model, IDS, parts, cache), expected, atol)


@pytest.mark.parametrize("name", MAPS)
def test_prompts_chunks_and_steps_match_attention_written_out(name):
    model = MODELS["llama"]()
    expected, plain = forward(written_out(model, name), IDS), forward(model, IDS)
    assert (expected - plain).abs().max() > 1e-2
    handle = rope_patch.patch(model, name, **MAPS[name][0])
    assert_reads_as(model, expected, [OVER_THE_TRAINED_LENGTH])
    handle.undo()
    assert torch.equal(forward(model, IDS), plain)


@pytest.mark.parametrize(
    ("family", "name", "implementation"),
    [
        *((family, "self-extend", "eager") for family in MODELS if family != "llama"),
        *((family, "dca", "sdpa") for family in ("qwen3", "gemma3")),
    ],
)
def test_architectures_match_attention_written_out(family, name, implementation):
    """Norms of queries and keys, soft caps, windows and sinks are the model's own.

    transformers' SDPA has no soft cap and no sinks.
    """
    model = MODELS[family]()
    model.set_attn_implementation(implementation)
    expected, plain = forward(written_out(model, name), IDS), forward(model, IDS)
    rope_patch.patch(model, name, **MAPS[name][0])
    got = forward(model, IDS)
    assert (got - plain).abs().max() > 1e-2
    close(got, expected)
    close(step_by_step(model, IDS, LENGTH - 20), expected)


@pytest.mark.parametrize("name", MAPS)
def test_float64_models_agree_to_rounding(name):
    model = use_exact_angles(MODELS["llama"]().double())
    expected = forward(written_out(model, name), IDS)
    rope_patch.patch(model, name, **MAPS[name][0])
    assert_reads_as(model, expected, [[37, 37, 37], [LENGTH - 4]], 1e-9)


@pytest.mark.parametrize("name", MAPS)
def test_short_texts_keep_their_bits(name):
    model = MODELS["llama"]()
    plain = [forward(model, tokens(length)) for length in (1, 29, TRAINED)]
    options = {key: value for key, value in MAPS[name][0].items() if key != "on"}
    rope_patch.patch(model, name, **options)
    for length, expected in zip((1, 29, TRAINED), plain, strict=True):
        is_mapped = length > MAPS[name][2]
        assert torch.equal(forward(model, tokens(length)), expected) is not is_mapped


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="this torch does not say that it exports"
)
def test_torch_export_is_refused_in_a_sentence():
    """torch's own error is a page about numbers that depend on data."""
    model = make_model("llama")
    model.config.use_cache = False
    handle = rope_patch.patch(model, "rerope")
    with pytest.raises(rope_patch.Refused, match=r"torch\.export.*rerope") as error:
        torch.export.export(model, (), {"input_ids": tokens(TRAINED + 20)}, strict=False)
    assert "torch.compile" in str(error.value)
    assert len(str(error.value)) < 400
    handle.undo()
    assert torch.export.export(model, (), {"input_ids": tokens(TRAINED + 20)}, strict=False)


def test_texts_that_a_map_cannot_reach_are_refused():
    """With groups of 2 beyond 16 exact tokens, 112 tokens have 64 positions, and 113 have more."""
    model = make_model()
    options = {"window": 16, "group": 2}
    assert rope_patch.patch(model, "self-extend", length=112, **options).length == 112
    rope_patch.unpatch(model)
    with pytest.raises(rope_patch.Refused, match=r"112 tokens.*113"):
        rope_patch.patch(model, "self-extend", length=113, **options)
