"""Test verdicts about live models that rotate right, or wrong in known ways."""

from functools import partial

import pytest
import torch
from helpers import wrong_engines
from helpers.engine_server import EngineServer
from helpers.kept_predictions import verify
from helpers.tiny_models import make_other
from helpers.vision_models import vision_model
from helpers.wrong_engines import ASSETS, CONFIGS, FACTOR, TRAINED, YARN, configured, plain
from transformers import AutoTokenizer

import rope_patch

TINY = ASSETS / "tiny-llama"
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5}
DROPPED = CONFIGS["attention factor dropped"][0]
ENGINES = {  # the model, how it is made, and what explains it
    **{
        case: ("llama", partial(configured, "llama", parameters), expected)
        for case, (parameters, expected) in CONFIGS.items()
    },
    "scaled twice": ("llama", wrong_engines.scaled_twice, "scaled-twice"),
    "a table that wraps": ("llama", wrong_engines.short_table, "table-wraps"),
    "a table that ends": (
        "llama",
        partial(wrong_engines.short_table, wraps=False),
        "table-clamps",
    ),
    "doubled positions": ("llama", wrong_engines.doubled_positions, "doubled-positions"),
    "neighbours are pairs": ("llama", wrong_engines.paired_as_neighbours, "other-pairs"),
    "16 bits": (
        "llama",
        lambda: wrong_engines.cast(configured("llama", DROPPED), torch.float16),
        "no-attention-factor",
    ),
    **{
        f"{name}: {case}": (name, partial(configured, name, CONFIGS[case][0]), CONFIGS[case][1])
        for name in ("qwen3", "gemma3")
        for case in ("as asked", "attention factor dropped")
    },
    "qwen3: neighbours are pairs": (
        "qwen3",
        partial(wrong_engines.paired_as_neighbours, "qwen3"),
        "other-pairs",
    ),
}


# To "factor squared", and to Llama.
SIMILAR = {"twice the factor", "half the factor", *(name for name in ENGINES if "qwen3" in name)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SIMILAR else n for n in ENGINES],
)
def test_engine_is_explained(name):
    of, make, expected = ENGINES[name]
    found = verify(make(), ASSETS / f"tiny-{of}")
    assert found.verdict.explains == (expected,)
    assert found.status == ("as-asked" if expected == "as-asked" else "another")
    assert found.exit_code == (0 if expected == "as-asked" else 1)
    assert bool(found) == (expected == "as-asked")
    assert found.verdict.margin > (1 if name == "16 bits" else 100)


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
    assert found.exit_code == 3
    assert "no hypothesis explains" in str(found)


def test_hypotheses_within_the_noise_floor_are_one_group():
    """Up to the trained length a dynamic method is the unscaled model."""
    found = verify(plain(), method="dynamic-yarn", factor=None, tokens=200)
    assert found.status == "cannot-tell"
    assert {"as-asked", "unscaled", "no-attention-factor"} <= set(found.verdict.explains)
    assert {"linear-2", "ntk-2", "theta-500000"} <= set(found.verdict.ruled_out)
    assert "cannot be told apart" in str(found)
    assert found.untested["stale-keys"] == "prompts are shorter than the trained length"


def patched(method, **options):
    model = plain()
    rope_patch.patch(model, method, **options)
    return model


def with_stale_keys():
    """Return a model that leaves cached keys as they were rotated."""
    from rope_patch.patching import LengthHooks

    model = patched("dynamic-yarn")
    forward = model.forward

    def stale(*args, **kwargs):
        rerotate, LengthHooks._rerotate = LengthHooks._rerotate, lambda *_, **__: None
        try:
            return forward(*args, **kwargs)
        finally:
            LengthHooks._rerotate = rerotate

    model.forward = stale
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: patched("dynamic-yarn"), "as-asked"),
        (plain, "unscaled"),
        (lambda: patched("yarn", factor=FACTOR), "fixed-at-target"),
        (with_stale_keys, "stale-keys"),
    ],
)
def test_dynamic_methods(make, expected):
    found = verify(make(), method="dynamic-yarn")
    assert found.verdict.explains == (expected,)


class ServerByRequest(EngineServer):
    """Rotates each request from its start by all tokens that it may read, as the vLLM plugin."""

    def write(self, ids, count):
        handle = rope_patch.current(self.model)
        handle.fix_length(len(ids) + count - 1)
        try:
            return super().write(ids, count)
        finally:
            handle.fix_length(None)


@pytest.mark.parametrize(
    ("growth", "make", "says_ids", "expected"),
    [
        ("stepped", ServerByRequest, True, "by-request"),
        ("stepped", ServerByRequest, False, "as-asked"),  # prompts alone do not tell them apart
        ("admission", ServerByRequest, True, "as-asked"),
        ("admission", EngineServer, True, "another"),
    ],
)
def test_an_engine_may_fix_each_requests_rotation_at_its_start(growth, make, says_ids, expected):
    with make(patched("dynamic-yarn"), says_ids=says_ids).running() as url:
        found = verify(url, method="dynamic-yarn", growth=growth)
    if expected == "another":  # cached keys that are rotated again are not what was asked for
        assert found.status == "cannot-tell"
    else:
        assert found.verdict.explains == (expected,)
        assert found.exit_code == 0


def test_checkpoint_with_a_scaling_of_its_own(tmp_path):
    configured("llama", CONFIGS["as asked"][0]).save_pretrained(tmp_path)
    no_request = {"method": None, "factor": None}
    right = verify(configured("llama", CONFIGS["as asked"][0]), tmp_path, **no_request)
    assert right.verdict.explains == ("as-asked",)
    wrong = verify(configured("llama", DROPPED), tmp_path, **no_request)
    assert wrong.verdict.explains == ("no-attention-factor",)
    assert verify(plain(), tmp_path, **no_request).verdict.explains == ("unscaled",)


OWN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}  # cos and sin keep their length
LONG = [1.0] * 4 + [4.0] * 12  # by pair
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0},
    **{"short_factor": [1.0] * 16, "long_factor": LONG},
    "original_max_position_embeddings": TRAINED,
}


@pytest.mark.parametrize(
    ("own", "engine", "expected"),
    [
        (OWN, OWN, "as-asked"),
        (OWN, YARN, "usual-attention-factor"),
        (YARN, {**YARN, "factor": 8.0}, "factor-8"),
        (YARN, {**YARN, "original_max_position_embeddings": 1024}, "original-length-lost"),
        (YARN, {**YARN, "truncate": False}, "truncate"),
        (LONGROPE, LONGROPE, "as-asked"),
        (LONGROPE, {**LONGROPE, "short_factor": LONG}, "fixed-at-target"),
        (LONGROPE, {**LONGROPE, "long_factor": [1.0] * 16}, "fixed-at-trained"),
    ],
)
def test_scaling_of_a_checkpoint_is_asked_for_where_no_method_is_named(
    own, engine, expected, tmp_path
):
    configured("llama", own).save_pretrained(tmp_path)
    found = verify(configured("llama", engine), tmp_path, method=None, factor=None)
    assert found.verdict.explains == (expected,)


def test_sliding_layers_under_the_scaling_of_a_checkpoint(tmp_path):
    configured("gemma3", YARN).save_pretrained(tmp_path)
    engine = configured("gemma3", YARN, {**YARN, "rope_theta": 1e3})
    found = verify(engine, tmp_path, method=None, factor=None)
    assert found.verdict.explains == ("all-layers",)


def test_yarn_that_was_trained_in_and_is_scaled_once_more(tmp_path):
    configured("llama", YARN).save_pretrained(tmp_path)
    twice = verify(wrong_engines.scaled_twice(), tmp_path, method=None, factor=None)
    assert twice.verdict.explains == ("scaled-twice",)
    request = {"factor": 2, "start": "running", "tokens": 512}
    engine = wrong_engines.on_top("llama", YARN, 2.0)
    assert verify(engine, tmp_path, **request).verdict.explains == ("scaled-on-top",)
    right = configured("llama", {**YARN, "factor": 8.0})
    assert verify(right, tmp_path, **request).verdict.explains == ("as-asked",)


def test_factor_that_the_engine_never_reads():
    found = verify(configured("llama", {**YARN, "factor": 8.0}), factor=2)
    assert found.verdict.explains == ("factor-8",)


def test_original_length_that_the_engine_takes_from_the_longest_position():
    request = {"trained_length": TRAINED // 2, "factor": 8}
    found = verify(configured("llama", {**YARN, "factor": 8.0}), **request)
    assert found.verdict.explains == (f"original-{TRAINED}",)


@pytest.mark.parametrize(("kind", "changes"), [("StableLm", {}), ("Phi", {}), ("Glm", {})])
def test_frequencies_over_the_whole_head_of_which_a_part_rotates(kind, changes):
    def sharp():
        model = make_other(kind, rope_parameters={**PARTIAL, "rope_theta": 1e4}, **changes)
        return model

    engine = sharp()
    config = engine.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = engine.model.rotary_emb
    pairs = torch.arange(rotary.inv_freq.numel())
    rotary.inv_freq = 1e4 ** (-2 * pairs / head_dim)
    request = {"method": None, "factor": None, "tokens": 64}
    assert verify(engine, sharp(), **request).verdict.explains == ("head-width",)
    assert verify(sharp(), sharp(), **request).verdict.explains == ("as-asked",)


def test_sections_of_mrope_are_said_to_be_untested():
    """Tokens of text have one position on all axes."""
    engine, against = vision_model("qwen3_vl"), vision_model("qwen3_vl")
    rope_patch.patch(engine, "yarn", factor=FACTOR)
    found = verify(engine, against, tokens=150)
    assert found.status == "as-asked"
    assert found.untested.keys() == {"the sections of M-RoPE"}


def test_hypotheses_that_are_one_rotation_are_named_together():
    """A linear factor of 4 with doubled positions is a linear factor of 2."""
    engine = configured("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    found = verify(engine, method="linear", factor=4)
    assert found.verdict.explains == ("factor-2",)
    assert "here the same: doubled-positions" in str(found)


def test_hypotheses_that_are_ruled_out_are_read_no_more():
    """A fourth of the readings of all hypotheses on all prompts: a large model takes minutes."""
    for case in ("as asked", "factor squared"):
        found = verify(configured("llama", CONFIGS[case][0]))
        assert found.readings < len(found.hypotheses) * found.prompts / 3


def test_hypothesis_that_comes_back_reads_all_prompts():
    """A dynamic engine is unscaled on the short prompt, the first one, and scales by 2 later."""
    found = verify(patched("dynamic-yarn"))
    assert found.verdict.explains == ("factor-2",)
    assert found.verdict.rivals["factor-2"].tokens == found.tokens
    assert found.verdict.rivals["linear-4"].tokens < found.tokens


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


def test_map_of_positions():
    engine = plain()
    rope_patch.patch(engine, "rerope", length=512)
    request = {"method": "rerope", "factor": None, "length": 512}
    assert verify(engine, **request).verdict.explains == ("as-asked",)
    assert verify(plain(), **request).verdict.explains[0] in ("unscaled", "frequencies-only")


def test_default_is_the_plain_rotation():
    found = verify(plain(), method=None, factor=None)
    assert found.verdict.explains == ("as-asked",)
    scaled = verify(configured("llama", CONFIGS["as asked"][0]), method=None, factor=None)
    assert scaled.verdict.explains == ("yarn-4",)
