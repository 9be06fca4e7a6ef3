"""Test the advice of a diagnosis: its rules, its commands, and what is hard to extend."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import transformers
import typer
from architectures.tiny_architectures import tiny_config, tiny_model
from helpers.tiny_models import TARGET, TRAINED, make_config, make_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.cli import app

SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TRAINED}
YARN = {"rope_type": "yarn", **SCALED}
LLAMA3 = {"rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXTENDED = {"max_position_embeddings": TARGET}
TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run_line(line):
    """Return a function that runs a recommended line on a model and returns the patch."""

    def run(model):
        names = {"model": model, "rope_patch": rope_patch}
        exec(line, names)
        return rope_patch.current(names["model"])

    return run


def parse_command(line):
    """Parse a command line without running it; return its context."""
    program, name, *arguments = shlex.split(line)
    assert program == "rope-patch"
    command = typer.main.get_command(app).commands[name]
    return command.make_context(name, arguments, parent=None)


@pytest.mark.parametrize(
    ("config", "length", "method", "text"),
    [
        ({}, None, None, "training went to 64 tokens"),
        ({}, TRAINED // 2, None, "training went to 64 tokens, 32 are within"),
        ({}, 2 * TRAINED, "dynamic-yarn", "rotated as they were, bit for bit"),
        ({}, 2 * TRAINED + 1, "yarn", "trained 400 steps"),
        ({"rope_parameters": YARN, **EXTENDED}, None, None, "own yarn reaches 256 tokens, from 64"),
        ({"rope_parameters": YARN, **EXTENDED}, 2 * TARGET, "yarn", 'start="unscaled"'),
        ({"rope_parameters": LLAMA3, **EXTENDED}, None, None, "training went to 256 tokens"),
        ({"rope_parameters": LLAMA3, **EXTENDED}, 2 * TARGET, "dynamic-yarn", 'start="running"'),
    ],
)
def test_rules(config, length, method, text):
    advice = rope_patch.diagnose(make_config(**config), length=length).advice
    assert advice.method == method
    assert text in " ".join(reason.text for reason in advice.reasons)
    if method is None:
        return
    handle = run_line(advice.python)(make_model(**config))
    assert (handle.method.name, handle.length) == (method, length)
    is_extension = handle.geometries[None].base != ()
    assert is_extension == ('start="running"' in text)
    shell = parse_command(advice.shell)
    if method == "dynamic-yarn":
        assert ",".join(shell.params["method"]).split(",") == ["none", "yarn", "dynamic-yarn"]
        assert int(shell.params["length"]) == length
    else:
        assert str(shell.params["config"]) == "yarn_64k"


@pytest.mark.parametrize(
    "name",
    ["gemma3_text", "qwen3", "glm4", "deepseek_v3", "gpt_oss", "phi3", "llama4_text"],
)
def test_advised_lines_work_on_other_architectures(name):
    model = tiny_model(name)
    full = rope_patch.diagnose(model).length
    advice = rope_patch.diagnose(model, length=2 * full).advice
    assert advice.method is not None, advice.reasons
    handle = run_line(advice.python)(model)
    assert (handle.method.name, handle.length) == (advice.method, 2 * full)


@pytest.mark.parametrize("rope_type", [{}, {"rope_type": "default"}])
def test_advice_for_a_vision_language_model(rope_type):
    text = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TRAINED,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2], **rope_type},  # as on the Hub
        "rope_theta": 1e6,
    }
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    diagnosis = rope_patch.diagnose(config, length=2 * TRAINED)
    assert diagnosis.healthy
    assert diagnosis.advice.method == "dynamic-yarn"
    assert diagnosis.advice.shell.startswith("rope-patch compare MODEL --method none,yarn,dynamic")
    with torch.device("meta"):
        model = transformers.Qwen2VLForConditionalGeneration(config)
    assert run_line(diagnosis.advice.python)(model).length == 2 * TRAINED


def test_advice_names_a_static_method_where_lengths_cannot_be_followed():
    diagnosis = rope_patch.diagnose(tiny_config("glm4v"), length=2 * TRAINED)
    assert diagnosis.advice.method == "yarn"
    assert "dynamic-yarn is refused here" in diagnosis.advice.reasons[0].text


@pytest.mark.parametrize("name", ["cohere2", "exaone4"])
def test_no_advice_if_only_sliding_layers_rotate(name):
    config = tiny_config(name)
    advice = rope_patch.diagnose(config, length=4 * TRAINED).advice
    assert advice.method is None
    assert f"a window of {config.sliding_window:,} tokens" in advice.reasons[0].text


def test_reasons_name_unrotated_and_sliding_layers():
    reasons = rope_patch.diagnose(make_config("gemma3"), length=TARGET).advice.reasons
    assert any("sliding_attention layers see a window only" in r.text for r in reasons)
    config = tiny_config("smollm3")
    config.no_rope_layers = [1, 0]
    reasons = rope_patch.diagnose(config, length=2 * TRAINED).advice.reasons
    assert any("1 of 2 layers do not rotate at all" in r.text for r in reasons)


def test_reasons_name_a_base_below_the_bound():
    def names_the_bound(theta):
        parameters = {"rope_type": "default", "rope_theta": theta}
        config = make_config(rope_parameters=parameters, head_dim=32)
        diagnosis = rope_patch.diagnose(config, length=2 * TRAINED)
        assert (theta < diagnosis.rotations[None].base_bound) == (theta == 100.0)
        return any(r.source == "arXiv:2405.14591" for r in diagnosis.advice.reasons)

    assert names_the_bound(100.0)
    assert not names_the_bound(1e6)


def test_findings_are_the_first_reason():
    model = make_model()
    model.config.rope_parameters = dict(YARN)
    advice = rope_patch.diagnose(model, length=4 * TARGET).advice
    assert advice.reasons[0].text.startswith("first put right what is found above (config-edited")


def test_advised_line_loads_a_folder():
    diagnosis = rope_patch.diagnose(TINY, length=512)
    assert diagnosis.advice.python.startswith(f"model = rope_patch.load({TINY!r}, ")
    assert run_line(diagnosis.advice.python)(None).length == 512
    assert parse_command(diagnosis.advice.shell).params["model"] == TINY


def test_config_with_dynamic_scaling_gets_a_trained_length():
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    diagnosis = rope_patch.diagnose(make_config(rope_parameters=parameters), length=3 * TRAINED)
    assert [f.code for f in diagnosis.findings if f.severity == "note"] == [
        "original-length-unsaid"
    ]
    assert f"trained_length={TRAINED}" in diagnosis.advice.python
    handle = run_line(diagnosis.advice.python)(make_model(rope_parameters=parameters))
    assert handle.trained_length == TRAINED
    # transformers' exact growth: base 1e4 * (2 * 3 - 1)^(16 / 14) at three times the length.
    base = 1e4 * (2 * 3 - 1) ** (16 / 14)
    after = [2 * torch.pi / p.wavelength / p.stretch for p in diagnosis.rotations[None].pairs]
    assert after == pytest.approx([base ** (-2 * i / 16) for i in range(8)], rel=1e-9)


def test_diagnosis_is_valid_json():
    for config in (make_config(), make_config("gemma3"), make_config(rope_parameters=YARN)):
        diagnosis = rope_patch.diagnose(config, "nope", length=TARGET)
        data = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
        assert {"findings", "advice", "rotations", "healthy", "length"} <= data.keys()
        assert data["rotations"].keys() <= {"all", "full_attention"}


def test_other_objects_and_models_without_rope_are_refused():
    with pytest.raises(TypeError, match="a config, a folder or a name on the Hub, got int"):
        rope_patch.diagnose(3)
    with pytest.raises(ValueError, match="no such folder"):
        rope_patch.diagnose("/no/such/folder")
    plain = AutoModelForCausalLM.from_config(tiny_config("mamba"))
    with pytest.raises(ValueError, match="rotary"):
        rope_patch.diagnose(plain)


def test_plain_rotation_is_that_of_transformers():
    scaled = rope_patch.diagnose(make_config(rope_parameters=dict(YARN), **EXTENDED))
    pairs = scaled.rotations[None].pairs
    assert pairs[-1].stretch == pytest.approx(4, rel=1e-12)
    assert not any(pair.extrapolates for pair in pairs)
    late = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    late["original_max_position_embeddings"] = TRAINED // 4
    diagnosis = rope_patch.diagnose(make_config(rope_parameters=late), length=TRAINED)
    assert {pair.stretch for pair in diagnosis.rotations[None].pairs} == {1.0}


def test_a_path_with_a_space_is_quoted_for_the_shell_and_for_python(tmp_path):
    folder = tmp_path / "my model"
    shutil.copytree(TINY, folder)
    advice = rope_patch.diagnose(str(folder), length=2048).advice
    assert advice.python.startswith(f"model = rope_patch.load({str(folder)!r}, ")
    assert str(folder) in shlex.split(advice.shell)


# -- OlmPool's choices, which make a model hard to extend (arXiv:2608.10296) -----------------------


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 8192,
}
LONG = 32768
GROUPED, SHORT, NORM = (
    {"query_heads": 8, "key_heads": 2},
    {"trained": 4096},
    {"query_norm": 1},
)
WINDOWS = {"window": 4096, "windowed_layers": 3, "layers": 4}


@pytest.mark.parametrize(
    ("family", "changes", "counted"),
    [
        # Up to two choices, by olmpool.com's table of Llama 3, OLMo 3 and Qwen 3, are no note.
        ("Llama", {"num_key_value_heads": 2}, []),
        ("Olmo3", {"sliding_window": 4096}, []),
        ("Qwen3", {"num_key_value_heads": 2}, []),
        ("Llama", {"num_key_value_heads": 2, "max_position_embeddings": 4096}, []),
        ("Olmo3", {"sliding_window": 4096, "num_key_value_heads": 2}, [NORM, GROUPED, WINDOWS]),
        (
            "Olmo3",
            {"sliding_window": 4096, "num_key_value_heads": 2, "max_position_embeddings": 4096},
            [NORM, GROUPED, WINDOWS, SHORT],
        ),
        # 16 key heads of 32 are what OlmPool's best model has.
        (
            "Olmo3",
            {"sliding_window": 4096, "num_key_value_heads": 4, "max_position_embeddings": 4096},
            [NORM, WINDOWS, SHORT],
        ),
        (
            "Qwen3",
            {"num_key_value_heads": 2, "max_position_embeddings": 4096},
            [NORM, GROUPED, SHORT],
        ),
        (
            "Mistral",
            {"num_key_value_heads": 2, "max_position_embeddings": 4096, "sliding_window": 4096},
            [GROUPED, {**WINDOWS, "windowed_layers": 4}, SHORT],
        ),
        # Windows that are switched off, or as wide as the text.
        *(
            (family, {"num_key_value_heads": 2, "max_position_embeddings": 4096, **windows}, [])
            for family, windows in [
                ("Mistral", {"sliding_window": None}),
                ("Mistral", {"sliding_window": LONG}),
                ("Qwen2", {"use_sliding_window": False, "sliding_window": 4096}),
            ]
        ),
    ],
)
def test_three_choices_of_olmpool_are_a_note(family, changes, counted):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    diagnosis = rope_patch.diagnose(config, length=LONG)
    assert diagnosis.healthy
    notes = [f for f in diagnosis.findings if f.code == "hard-to-extend"]
    if not counted:
        assert notes == []
        return
    (note,) = notes
    assert note.severity == "note"
    assert "arXiv:2608.10296" in note.what
    expected = {"choices": len(counted)}
    for numbers in counted:
        expected |= numbers
    assert note.numbers == expected
    assert note.evidence.count(";") == len(counted) - 1
    if WINDOWS in counted:
        assert "3 of 4 layers see 4,096 tokens back" in note.evidence
