"""Test verdicts about real servers and live models that rotate right, or wrong in known ways."""

import pytest
import torch
from helpers import wrong_engines
from helpers.engine_server import EngineServer
from helpers.wrong_engines import ASSETS, CONFIGS, FACTOR, configured, plain, scaled_twice
from transformers import AutoTokenizer

import rope_patch

TINY = ASSETS / "tiny-llama"
YARN = {"method": "yarn", "factor": FACTOR}


def verify(engine, against=TINY, **arguments):
    return rope_patch.verify(engine, against=against, progress=False, **{**YARN, **arguments})


@pytest.mark.parametrize("case", CONFIGS)
def test_server_with_each_configuration(case):
    parameters, expected = CONFIGS[case]
    with EngineServer(configured("llama", parameters)).running() as url:
        found = verify(url)
    assert found.verdict.explains == (expected,)
    assert found.status == ("as-asked" if expected == "as-asked" else "another")
    assert found.exit_code == (0 if expected == "as-asked" else 1)
    assert bool(found) == (expected == "as-asked")
    assert found.verdict.margin > 100


def test_frequencies_scaled_twice():
    assert verify(scaled_twice()).verdict.explains == ("scaled-twice",)


@pytest.mark.parametrize("wraps", [True, False])
def test_table_that_ends_at_the_trained_length(wraps):
    found = verify(wrong_engines.short_table(wraps=wraps))
    assert found.verdict.explains == ("table-wraps" if wraps else "table-clamps",)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("case", ["as asked", "factor ignored", "attention factor dropped"])
def test_other_architectures(name, case):
    parameters, expected = CONFIGS[case]
    found = verify(configured(name, parameters), against=ASSETS / f"tiny-{name}")
    assert found.verdict.explains == (expected,)


def test_sliding_layers_that_were_scaled_too():
    model = plain("gemma3")
    rope_patch.patch(model, "yarn", factor=4, layer_types=["full_attention", "sliding_attention"])
    found = verify(model, against=ASSETS / "tiny-gemma3")
    assert found.verdict.explains == ("all-layers",)


def test_noise_is_measured_on_tokens_that_are_possible(tmp_path):
    """Of most pairs of a large vocabulary, no token is: they hid what 8 bits do to SmolLM2."""
    sharp = plain("llama")
    with torch.no_grad():
        sharp.model.norm.weight.mul_(4)  # most tokens are below -15 nats
    sharp.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    rope_patch.patch(sharp, "yarn", factor=FACTOR)
    found = verify(wrong_engines.round_to_8_bits(sharp), against=tmp_path)
    assert found.verdict.explains == ("as-asked",)
    assert found.verdict.noise > 0.02


def test_rotation_that_no_hypothesis_has_is_no_verdict():
    found = verify(configured("llama", {"rope_type": "default", "rope_theta": 2.2e4}))
    assert found.status == "cannot-tell"
    assert found.exit_code == 2
    assert "no hypothesis explains" in str(found)


def test_hypotheses_within_the_noise_floor_are_one_group():
    """Up to the trained length a dynamic method is the unscaled model."""
    found = verify(plain(), method="dynamic-yarn", factor=None, tokens=200)
    assert found.status == "cannot-tell"
    assert {"as-asked", "unscaled", "no-attention-factor"} <= set(found.verdict.explains)
    assert {"linear-2", "ntk-2", "theta-500000"} <= set(found.verdict.ruled_out)
    assert "cannot be told apart" in str(found)
    assert found.untested["stale-keys"] == "prompts are shorter than the trained length"


@pytest.mark.parametrize(
    ("rotates", "expected"),
    [
        ("dynamic-yarn", "as-asked"),
        ("plain", "unscaled"),
        ("yarn", "fixed-at-target"),
        ("stale", "stale-keys"),
    ],
)
def test_dynamic_methods(rotates, expected, monkeypatch):
    from rope_patch.patching.dynamic.hooks import LengthHooks

    model = plain()
    if rotates == "yarn":
        rope_patch.patch(model, "yarn", factor=FACTOR)
    elif rotates != "plain":
        rope_patch.patch(model, "dynamic-yarn")
    if rotates == "stale":
        model.forward = _without_rerotation(model.forward, LengthHooks)
    found = verify(model, method="dynamic-yarn")
    assert found.verdict.explains == (expected,)


def _without_rerotation(forward, hooks):
    """Return a forward that leaves cached keys as they were rotated."""

    def stale(*args, **kwargs):
        rerotate, hooks._rerotate = hooks._rerotate, lambda *_, **__: None
        try:
            return forward(*args, **kwargs)
        finally:
            hooks._rerotate = rerotate

    return stale


def test_checkpoint_with_a_scaling_of_its_own(tmp_path):
    configured("llama", CONFIGS["as asked"][0]).save_pretrained(tmp_path)
    no_request = {"method": None, "factor": None}
    right = verify(configured("llama", CONFIGS["as asked"][0]), tmp_path, **no_request)
    assert right.verdict.explains == ("as-asked",)
    wrong = verify(
        configured("llama", CONFIGS["attention factor dropped"][0]), tmp_path, **no_request
    )
    assert wrong.verdict.explains == ("no-attention-factor",)
    assert verify(plain(), tmp_path, **no_request).verdict.explains == ("unscaled",)


def test_saved_patch_is_what_is_asked_for(tmp_path):
    model = plain()
    with rope_patch.patch(model, "ntk", factor=FACTOR):
        rope_patch.save(model, tmp_path)
    engine = plain()
    assert verify(engine, tmp_path, method=None, factor=None).verdict.explains == ("unscaled",)
    rope_patch.patch(engine, "ntk", factor=FACTOR)
    assert verify(engine, tmp_path, method=None, factor=None)


def test_live_model_to_compare_with_keeps_its_patch():
    against = plain()
    handle = rope_patch.patch(against, "yarn", factor=FACTOR)
    ids = torch.arange(300)[None] % 500
    before = against(ids).logits
    found = verify(configured("llama", CONFIGS["as asked"][0]), against, method=None, factor=None)
    assert found
    assert handle.active
    assert torch.equal(against(ids).logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["as asked", "attention factor dropped", "linear for yarn"])
def test_engines_of_16_bits(dtype, case):
    parameters, expected = CONFIGS[case]
    engine = wrong_engines.cast(configured("llama", parameters), dtype)
    assert verify(engine).verdict.explains == (expected,)


def test_map_of_positions():
    engine = plain()
    rope_patch.patch(engine, "rerope", length=1024)
    request = {"method": "rerope", "factor": None, "length": 1024}
    assert verify(engine, **request).verdict.explains == ("as-asked",)
    assert verify(plain(), **request).verdict.explains[0] in ("unscaled", "frequencies-only")


def test_default_is_the_plain_rotation():
    found = verify(plain(), method=None, factor=None)
    assert found.verdict.explains == ("as-asked",)
    scaled = verify(configured("llama", CONFIGS["as asked"][0]), method=None, factor=None)
    assert scaled.verdict.explains == ("yarn-4",)
