"""Test exports to trainers: the YAML that they print, and what they refuse."""

import json
import shlex
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from architectures.tiny_architectures import tiny_model
from helpers.tiny_models import TRAINED, make_model
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app
from rope_patch.exporting import TRAINERS

PLUGIN = "rope_patch.integrations.axolotl_plugin.RopePatchPlugin"
TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run(*words):
    return CliRunner().invoke(app, words)


def printed_yaml(output):
    """Return the YAML that the command printed, read again."""
    lines = output.splitlines()
    start = lines.index("  YAML:") + 1
    block = []
    for line in lines[start:]:
        if not line.startswith("    "):
            break
        block.append(line.removeprefix("    "))
    return yaml.safe_load("\n".join(block))


def frequencies(model):
    return model.model.rotary_emb.inv_freq


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk", "llama3", "clipped"])
def test_axolotl_override_rotates_as_the_patch(method):
    """axolotl sets each field on the config, and builds the model from it."""
    words = ("export", TINY, "--engine", "axolotl", "--method", method, "--factor", "4")
    result = run(*words)
    assert result.exit_code == 0, result.output
    keys = printed_yaml(result.stdout)
    assert keys == json.loads(run(*words, "--json").stdout)["yaml"]
    assert (keys["base_model"], keys["sequence_len"]) == (TINY, 1024)
    config = transformers.AutoConfig.from_pretrained(TINY)
    for name, value in keys["overrides_of_model_config"].items():
        setattr(config, name, value)
    built = transformers.AutoModelForCausalLM.from_pretrained(TINY, config=config)
    patched = transformers.AutoModelForCausalLM.from_pretrained(TINY)
    rope_patch.patch(patched, method, factor=4)
    torch.testing.assert_close(frequencies(built), frequencies(patched), rtol=1e-5, atol=1e-12)
    expected = rope_patch.current(patched).frequencies[None].attention_factor
    assert built.model.rotary_emb.attention_scaling == pytest.approx(expected)
    assert built.config.max_position_embeddings == 1024


PLUGGED = {
    "dynamic-yarn": {},
    "mixed-yarn": {"factor": 4},
    "rerope": {"window": 16},
    "yarn": {"factor": 4, "temperature": "log-n"},
}


@pytest.mark.parametrize("method", ["dynamic-yarn", "mixed-yarn", "rerope"])
def test_axolotl_patches_by_the_plugin_what_no_config_says(method):
    model = make_model()
    handle = rope_patch.patch(model, method, **PLUGGED[method])
    exported = rope_patch.export(model, "axolotl")
    assert exported.needs_plugin
    assert exported.yaml["plugins"] == [PLUGIN]
    again = make_model()
    request = yaml.safe_load(exported.yaml_lines())["rope_patch"]
    assert rope_patch.patch(again, **request).extension == handle.extension
    assert exported.yaml["sequence_len"] >= 4 * TRAINED or handle.length


def test_axolotl_does_not_override_a_nested_config():
    model = tiny_model("gemma3")
    if model.config.get_text_config(decoder=True) is model.config:
        pytest.skip("its config is flat here")
    rope_patch.patch(model, "yarn", factor=4)
    exported = rope_patch.export(model, "axolotl")
    assert "overrides_of_model_config" not in exported.yaml
    assert "nested" in exported.notes[0]


@pytest.mark.parametrize("method", ["yarn", "ntk"])
def test_llama_factory_reads_the_folder_that_the_note_writes(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--engine", "llama-factory", "--method", method, "--factor", "4")
    result = run("export", TINY, *words)
    assert result.exit_code == 0, result.output
    assert printed_yaml(result.stdout) == {"model_name_or_path": "FOLDER", "cutoff_len": 1024}
    command = next(line for line in result.stdout.splitlines() if "rope-patch patch" in line)
    written = run(*shlex.split(command.partition("weights: ")[2])[1:])
    assert written.exit_code == 0, written.output
    built = transformers.AutoModelForCausalLM.from_pretrained("FOLDER")
    patched = transformers.AutoModelForCausalLM.from_pretrained(TINY)
    rope_patch.patch(patched, method, factor=4)
    torch.testing.assert_close(frequencies(built), frequencies(patched), rtol=1e-5, atol=1e-12)
    # A folder that has the rotation is read as it is.
    saved = run("export", "FOLDER", "--engine", "llama-factory")
    assert printed_yaml(saved.stdout)["model_name_or_path"] == "FOLDER"
    assert "write FOLDER first" not in saved.stdout
    saved = run("export", "FOLDER", "--engine", "axolotl")
    assert printed_yaml(saved.stdout) == {"base_model": "FOLDER", "sequence_len": 1024}


@pytest.mark.parametrize("method", ["dynamic-yarn", "dynamic", "mixed-yarn", "rerope"])
def test_llama_factory_refuses_what_no_config_says(method):
    model = make_model()
    rope_patch.patch(model, method, **PLUGGED.get(method, {}))
    with pytest.raises(rope_patch.Refused, match=r"llama-factory cannot run .*"):
        rope_patch.export(model, "llama-factory")


def test_every_trainer_is_named_by_the_help():
    text = run("export", "--help").stdout
    assert all(trainer in text for trainer in TRAINERS)


def test_models_that_do_not_rotate_are_refused():
    gpt2 = tiny_model("gpt2")
    rope_patch.patch(gpt2, "linear", factor=2)
    for trainer in TRAINERS:
        with pytest.raises(rope_patch.Refused):
            rope_patch.export(gpt2, trainer)
