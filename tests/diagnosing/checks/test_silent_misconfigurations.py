"""Test that diagnose finds each silent misconfiguration that transformers' logits show."""

import json
import math

import pytest
import torch
from architectures.tiny_architectures import tiny_config
from helpers.tiny_models import (
    FACTOR,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_differs,
    logits,
    make_config,
    make_model,
    step_by_step,
    tokens,
)
from transformers import AutoConfig, AutoModelForCausalLM, PhimoeConfig, PhimoeForCausalLM
from transformers.models.llama import modeling_llama

import rope_patch

INV_FREQ = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
SLIDING = {"sliding_attention": dict(DEFAULT)}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
    "long_factor": LONG_FACTOR,
    "short_factor": SHORT_FACTOR,
}


def find(model, code, **arguments):
    """Diagnose a model and return its only finding of this code."""
    diagnosis = rope_patch.diagnose(model, **arguments)
    assert not diagnosis.healthy
    matches = [finding for finding in diagnosis.findings if finding.code == code]
    assert len(matches) == 1, [finding.code for finding in diagnosis.findings]
    assert matches[0].what in " ".join(str(diagnosis).split())
    return matches[0]


def is_healthy(model):
    diagnosis = rope_patch.diagnose(model)
    assert [f.code for f in diagnosis.findings if f.severity != "note"] == []
    assert str(diagnosis).startswith("transformers does what the config says")
    return True


@pytest.fixture
def folder(tmp_path):
    """Save a tiny Llama; return a function that changes its config.json."""
    make_model("llama").save_pretrained(tmp_path)

    def write(**changes):
        file = tmp_path / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return tmp_path

    return write


def test_config_edited_after_loading(folder):
    model = AutoModelForCausalLM.from_pretrained(folder())
    before = logits(model)
    model.config.rope_parameters = dict(YARN)
    model.config.max_position_embeddings = TARGET
    assert torch.equal(logits(model), before)
    finding = find(model, "config-edited-after-load")
    yarn = rope_patch.frequencies("yarn", head_dim=16, theta=1e4, trained_length=TRAINED, factor=4)
    assert finding.numbers["changed"] == int((INV_FREQ / yarn.inv_freq > 1 + 1e-5).sum())
    assert finding.numbers["ratio"] == pytest.approx(4)
    assert "attention factor 1 instead of 1.13863" in finding.evidence
    line = finding.fix.split(", which")[0].removeprefix("model = ")
    rebuilt = eval(line, {"AutoModelForCausalLM": AutoModelForCausalLM, "model": model})
    assert_differs(logits(rebuilt), before)
    assert is_healthy(rebuilt)


def test_theta_edited_after_loading():
    model = make_model("llama")
    before = logits(model)
    model.config.rope_parameters["rope_theta"] = 5e5
    assert torch.equal(logits(model), before)
    ratio = (5e5 / 1e4) ** (14 / 16)
    finding = find(model, "config-edited-after-load")
    assert finding.numbers == {"pairs": 8, "changed": 7, "ratio": pytest.approx(ratio, rel=1e-5)}


def test_dynamic_added_after_loading():
    model = make_model("llama")
    before = logits(model)
    model.config.rope_parameters = dict(DYNAMIC)
    assert torch.equal(logits(model), before)
    assert "runs with 'default'" in find(model, "config-edited-after-load").what


@pytest.mark.parametrize(
    ("wrong", "right", "parameters"),
    [
        ("facto", "factor", {"rope_type": "default", "facto": 4.0}),
        ("beta_fst", "beta_fast", YARN | {"beta_fst": 16}),
        ("original_max_position_embedding", "original_max_position_embeddings", {}),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_misspelt_keys(wrong, right, parameters, live):
    """Nothing reads them: the frequencies are those without them."""
    parameters = {"rope_type": "default", "rope_theta": 1e4, wrong: 64} | parameters
    model = make_model("llama", rope_parameters=dict(parameters))
    without = {key: value for key, value in parameters.items() if key != wrong}
    expected = make_model("llama", rope_parameters=without).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)
    finding = find(model if live else model.config, "misspelt-keys")
    assert repr(wrong) in finding.what
    assert finding.fix == f"write {right!r} for {wrong!r}"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "linear", "facto": 4.0}, "got nothing (did you mean 'factor' by 'facto'?)"),
        ({"ropetype": "linear", "factor": 4.0}, "(did you mean 'rope_type' by 'ropetype'?)"),
    ],
)
def test_misspelt_keys_without_which_nothing_can_be_built(parameters, words):
    model = make_model("llama")
    model.config.rope_parameters = {"rope_theta": 1e4, **parameters}
    for call in (rope_patch.diagnose, lambda model: rope_patch.patch(model, "yarn", factor=2)):
        with pytest.raises(rope_patch.Refused) as error:
            call(model)
        assert words in str(error.value)


def test_keys_of_other_models_are_not_misspelt():
    known = make_config(
        "llama", rope_parameters={"rope_theta": 1e4, "rope_type": "default", "my_own": 3}
    )
    assert is_healthy(known)


def test_length_edited_after_loading():
    model = make_model("llama")
    before = logits(model)
    model.config.max_position_embeddings = TARGET
    assert torch.equal(logits(model), before)
    finding = find(model, "length-edited-after-load")
    assert finding.numbers == {"built": TRAINED, "now": TARGET}
    exec(finding.fix.replace(", then ", "; "), {"model": model, "rope_patch": rope_patch})
    assert_differs(logits(model), before)


def test_longer_length_without_scaling():
    config = make_config("llama", max_position_embeddings=TARGET)
    assert is_healthy(config)  # without the trained length, the config looks right
    finding = find(config, "length-without-scaling", trained_length=TRAINED)
    assert finding.numbers["pairs"] == int((2 * math.pi > TRAINED * INV_FREQ).sum())


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 reads no scaling for Gemma 3")
@pytest.mark.parametrize("nested", [True, False])
def test_flat_dict_on_a_model_with_layer_types(nested):
    plain = make_model("gemma3")
    parameters = {**SLIDING, "full_attention": dict(YARN, rope_theta=1e6)} if nested else YARN
    model = make_model("gemma3", rope_parameters=dict(parameters))
    if nested:
        assert_differs(logits(model), logits(plain))
        assert "flat-on-layer-types" not in {f.code for f in rope_patch.diagnose(model).findings}
        return
    assert torch.equal(logits(model), logits(plain))
    finding = find(model, "flat-on-layer-types")
    config = make_config("gemma3")
    exec(finding.fix.split(" before")[0], {"config": config})
    assert_differs(logits(make_model("gemma3", config)), logits(plain))


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 reads no scaling for Gemma 3")
def test_truncate_in_a_layer_types_dict():
    def model(**changes):
        parameters = {**SLIDING, "full_attention": {**YARN, "rope_theta": 1e6, **changes}}
        return make_model("gemma3", rope_parameters=parameters, max_position_embeddings=TARGET)

    assert torch.equal(logits(model(truncate=False)), logits(model()))
    finding = find(model(truncate=False), "truncate-unread")
    known = {"head_dim": 16, "theta": 1e6, "trained_length": TRAINED, "factor": 4}
    rounded = rope_patch.frequencies("yarn", **known).inv_freq
    exact = rope_patch.frequencies("yarn", truncate=False, **known).inv_freq
    ratio = float(torch.maximum(rounded / exact, exact / rounded).max())
    assert finding.numbers["ratio"] == pytest.approx(ratio, rel=1e-5)
    outer = make_config("gemma3", max_position_embeddings=TARGET)
    outer.rope_parameters["full_attention"] = {**YARN, "rope_theta": 1e6, "truncate": False}
    exec(finding.fix.split(" before")[0], {"config": outer})
    assert_differs(logits(make_model("gemma3", outer)), logits(model()))


def test_dynamic_scaling_that_starts_too_late():
    late = dict(DYNAMIC, original_max_position_embeddings=TRAINED // 4)
    model = make_model("llama", rope_parameters=late)
    assert torch.equal(logits(model, TRAINED), logits(make_model("llama"), TRAINED))
    finding = find(model, "dynamic-starts-late")
    base = 1e4 * (2 * 4 - 1) ** (16 / 14)  # dynamic NTK at four times the length, factor 2
    stretch = (base / 1e4) ** (14 / 16)
    assert finding.numbers["ratio"] == pytest.approx(stretch, rel=1e-9)
    # Cached keys become stale from the length at which transformers starts to scale.
    late = 1e4 * (2 * 2 - 1) ** (16 / 14)
    off = (INV_FREQ - late ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)).abs()
    numbers = find(model, "cached-keys-left-behind").numbers
    assert numbers["length"] == 2 * TRAINED
    assert numbers["radians"] == pytest.approx(float(off.max()) * (TRAINED - 1), rel=1e-9)
    line = finding.fix.split(", or ")[0]
    exec(line, {"model": model, "rope_patch": rope_patch})
    assert_differs(logits(model, TRAINED), logits(make_model("llama"), TRAINED))
    assert rope_patch.current(model).trained_length == TRAINED // 4


def test_dynamic_scaling_with_a_raised_length():
    raised = make_config("llama", rope_parameters=dict(DYNAMIC), max_position_embeddings=TARGET)
    model = make_model("llama", raised)
    plain = make_model("llama", max_position_embeddings=TARGET)
    assert torch.equal(logits(model, TARGET), logits(plain, TARGET))
    assert "dynamic-starts-late" not in {f.code for f in rope_patch.diagnose(raised).findings}
    finding = find(raised, "dynamic-starts-late", trained_length=TRAINED)
    assert finding.numbers["starts"] == TARGET
    assert finding.numbers["trained"] == TRAINED


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_changes_by_transformers_are_no_edit(parameters):
    model = make_model("llama", rope_parameters=dict(parameters))
    before = rope_patch.diagnose(model)
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    logits(model, 2 * TRAINED)
    assert not torch.equal(model.model.rotary_emb.inv_freq, inv_freq)
    assert rope_patch.diagnose(model) == before


def test_dynamic_scaling_with_a_cache():
    model = make_model("llama", rope_parameters=dict(DYNAMIC))
    ids = tokens(2 * TRAINED)
    decoded = step_by_step(model, ids, TRAINED)[:, -1]
    whole = model(input_ids=ids, use_cache=False).logits[:, -1]
    assert_differs(whole, decoded)
    finding = find(model, "cached-keys-left-behind")
    base = 1e4 * (2 * 2 - 1) ** (16 / 14)
    off = (INV_FREQ - base ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)).abs()
    assert finding.numbers["radians"] == pytest.approx(float(off.max()) * (TRAINED - 1), rel=1e-9)
    exec(finding.fix, {"model": model, "rope_patch": rope_patch})
    assert "dynamic" in str(rope_patch.current(model))


def test_longrope_with_a_cache():
    model = make_model("llama", rope_parameters=dict(LONGROPE), max_position_embeddings=TARGET)
    ids = tokens(TRAINED + 20)
    decoded = step_by_step(model, ids, TRAINED)[:, -1]
    whole = model(input_ids=ids, use_cache=False).logits[:, -1]
    assert_differs(whole, decoded)
    finding = find(model, "cached-keys-left-behind")
    short, long = torch.tensor(SHORT_FACTOR).double(), torch.tensor(LONG_FACTOR).double()
    off = (INV_FREQ / short - INV_FREQ / long).abs()
    assert finding.numbers["radians"] == pytest.approx(float(off.max()) * (TRAINED - 1), rel=1e-6)
    exec(finding.fix, {"model": model, "rope_patch": rope_patch})
    assert len(rope_patch.current(model).frequencies) == 1


def test_phi3_longrope_reads_the_prompt_again():
    parameters = {k: v for k, v in LONGROPE.items() if k != "original_max_position_embeddings"}
    config = make_config("phi3", rope_parameters=parameters, max_position_embeddings=TARGET)
    diagnosis = rope_patch.diagnose(config)
    assert diagnosis.healthy
    assert [f.code for f in diagnosis.findings] == ["prompt-read-again"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_frequencies(dtype):
    model = make_model("llama").to(dtype)
    finding = find(model, "cast-frequencies", length=TARGET)
    off = (INV_FREQ.float().to(dtype).double() - INV_FREQ.float().double()).abs()
    assert finding.numbers["radians"] == pytest.approx(float(off.max()) * (TARGET - 1), rel=1e-4)
    positions = torch.arange(TARGET, dtype=torch.float64)
    live, exact = INV_FREQ.float().to(dtype).double(), INV_FREQ.float().double()
    cos = torch.outer(positions, live).cos() - torch.outer(positions, exact).cos()
    assert finding.numbers["cos"] == pytest.approx(float(cos.abs().max()), rel=1e-6)
    find(model.float(), "cast-frequencies", length=TARGET)  # casting back restores nothing


def test_loading_in_another_dtype_is_no_cast(folder):
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert is_healthy(model)


def test_replaced_rotation_in_the_modeling_module(monkeypatch):
    original = modeling_llama.apply_rotary_pos_emb

    def replacement(q, k, cos, sin, unsqueeze_dim=1):
        q, k = original(q, k, cos, sin, unsqueeze_dim)
        return q + 0.125, k

    model = make_model("llama")
    assert is_healthy(model)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", replacement)
    finding = find(model, "rotation-replaced")
    assert __name__ in finding.what
    assert finding.numbers["difference"] == pytest.approx(0.125, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"max_position_embeddings": 2 * TARGET}, "factor-and-lengths"),
        ({"max_position_embeddings": TRAINED}, "promises-too-little"),
        ({"rope_parameters": {**DYNAMIC, "alpha": 4.0}}, "unread-keys"),
        ({"rope_parameters": {**DEFAULT, "factor": 4.0, "beta_fast": 32.0}}, "unread-keys"),
        ({"rope_parameters": {**YARN, "attn_factor": 1.2}}, "unread-keys"),
        (
            {"rope_parameters": {**YARN, "attention_factor": 1.3, "attn_factor": 1.3}},
            "unread-keys",
        ),
    ],
)
def test_ignored_or_contradictory_fields(changes, code):
    fields = {"rope_parameters": dict(YARN), "max_position_embeddings": TARGET, **changes}
    assert find(make_config("llama", **fields), code)
    assert is_healthy(
        make_config("llama", rope_parameters=dict(YARN), max_position_embeddings=TARGET)
    )


def test_an_attention_factor_under_both_names_that_engines_read_is_no_finding():
    both = {"attention_factor": 1.3, "attn_factor": 1.3 / (0.1 * math.log(FACTOR) + 1)}
    with_both, without = (
        rope_patch.diagnose(
            make_config("llama", rope_parameters=rope, max_position_embeddings=TARGET)
        )
        for rope in ({**YARN, **both}, {**YARN, "attention_factor": 1.3})
    )
    assert [each.code for each in with_both.findings] == [each.code for each in without.findings]


def test_folder_written_by_transformers_is_healthy(folder):
    assert is_healthy(folder())
    assert is_healthy(folder(rope_parameters=dict(YARN), max_position_embeddings=TARGET))
    legacy = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    old = folder(rope_parameters=None, rope_scaling=legacy, rope_theta=1e4)
    assert is_healthy(old)


def test_lost_theta(folder):
    both = folder(rope_parameters=dict(DEFAULT), rope_theta=5e5)
    assert find(both, "theta-lost").numbers == {"written": 5e5, "taken": 1e4}
    model = AutoModelForCausalLM.from_pretrained(both)
    assert torch.equal(logits(model), logits(make_model("llama")))


def test_parameters_without_theta(folder):
    parameters = {k: v for k, v in YARN.items() if k != "rope_theta"}
    path = folder(rope_parameters=parameters, max_position_embeddings=TARGET)
    assert find(path, "theta-unsaid").numbers == {"taken": 1e4}


def test_two_scaling_dicts(folder):
    legacy = {"type": "linear", "factor": 8.0}
    path = folder(rope_parameters=dict(YARN), rope_scaling=legacy, rope_theta=1e4)
    finding = find(path, "two-dicts")
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.rope_parameters["rope_type"] == "linear"
    assert "transformers took linear" in finding.evidence


def test_missing_original_length(folder):
    parameters = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    finding = find(folder(rope_parameters=parameters), "original-length-unsaid")
    assert finding.numbers == {"full": TRAINED, "reached": FACTOR * TRAINED}


def test_unknown_scaling(folder):
    path = folder(rope_parameters={"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0})
    assert "rope_patch.patch(model, 'ntk', ...)" in find(path, "unknown-scaling").fix
    with pytest.raises(KeyError):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="a newer architecture")
def test_dropped_scaling(tmp_path):
    tiny_config("zaya").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | {"rope_parameters": dict(YARN)}
    file.write_text(json.dumps(fields))
    finding = find(tmp_path, "scaling-dropped")
    assert "asks for 'yarn' in rope_parameters" in finding.what
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.rope_parameters["rope_type"] == "default"
    notes = [f for f in rope_patch.diagnose(tmp_path).findings if f.code == "no-model"]
    assert "KeyError: 'hybrid'" in notes[0].evidence
    with pytest.raises(KeyError, match="hybrid"):
        AutoModelForCausalLM.from_config(config)


def phi_moe(long_factor, short_mscale=1.1, long_mscale=1.243163121016122):
    """Return a small Phi-3.5-MoE, whose config must have both mscales."""
    return PhimoeForCausalLM(
        PhimoeConfig(
            **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64},
            **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
            num_local_experts=2,
            max_position_embeddings=TARGET,
            rope_parameters={
                **LONGROPE,
                "long_factor": long_factor,
                "short_mscale": short_mscale,
                "long_mscale": long_mscale,
            },
        )
    )


def cos_and_sin(model, length):
    """Return what a model's rotary module computes at positions 0 and 1 of a text, doubled."""
    positions = torch.tensor([[0, 1, length - 1]])
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
    return cos[0, :2, :8].double(), sin[0, :2, :8].double()


@pytest.mark.parametrize("live", [True, False], ids=["model", "config"])
def test_mscales_of_phi_moe_are_read_and_are_its_attention_factor(live):
    model = phi_moe(LONGROPE["short_factor"])  # transformers never takes another set
    diagnosis = rope_patch.diagnose(model if live else model.config)
    assert diagnosis.healthy, str(diagnosis)
    assert "unread-keys" not in [finding.code for finding in diagnosis.findings]
    factor = float(cos_and_sin(model, TARGET)[0][0, 0])
    assert factor == pytest.approx(1.243163121016122)
    assert diagnosis.rotations[None].attention_factor == pytest.approx(factor)
    assert float(cos_and_sin(model, TRAINED)[0][0, 0]) == pytest.approx(1.1)


def test_long_factors_that_phi_moe_never_takes():
    model = phi_moe(LONG_FACTOR)
    cos, sin = cos_and_sin(model, TARGET)
    inv_freq = torch.atan2(sin[1], cos[1])
    if not torch.allclose(inv_freq, INV_FREQ / torch.tensor(SHORT_FACTOR), rtol=1e-5):
        pytest.skip("this release takes them")
    finding = find(model, "long-factors-unused")
    ratios = inv_freq * torch.tensor(LONG_FACTOR) / INV_FREQ
    ratios = torch.maximum(ratios, 1 / ratios)
    assert finding.numbers == {
        "pairs": 8,
        "changed": int((ratios > 1 + 1e-5).sum()),
        "ratio": pytest.approx(float(ratios.max()), rel=1e-5),
    }
    assert "cached-keys-left-behind" not in str(rope_patch.diagnose(model).to_dict())


def test_exports_of_phi_moe_have_its_own_attention_factor():
    mscale = 1.243163121016122
    model = phi_moe(LONGROPE["short_factor"], mscale, mscale)
    for engine in ("vllm", "sglang"):
        fields = rope_patch.export(model, engine).config["rope_parameters"]
        assert fields["short_mscale"] == fields["long_mscale"] == pytest.approx(mscale)
    with pytest.raises(rope_patch.Refused, match="follows the length"):
        rope_patch.export(phi_moe(LONGROPE["short_factor"]), "vllm")  # one factor for all lengths


def test_a_key_that_an_architecture_reads_beside_the_formula_is_no_finding():
    rope = {**DYNAMIC, "alpha": 100.0}
    unread = {
        kind: "unread-keys" in [f.code for f in rope_patch.diagnose(config).findings]
        for kind, config in {
            "hunyuan": tiny_config("hunyuan_v1_dense", rope_parameters=dict(rope)),
            "llama": make_config("llama", rope_parameters=dict(rope)),
        }.items()
    }
    assert unread == {"hunyuan": False, "llama": True}
