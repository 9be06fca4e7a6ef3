"""Test `rope-patch export`: its output, and the models it accepts."""

import json
import logging
import shlex
from pathlib import Path

from architectures.tiny_architectures import tiny_model
from checkpoints import CHECKPOINTS
from roundtrip import override_config
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app
from rope_patch.pretrained.loading import read_config

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run(*words):
    return CliRunner().invoke(app, ["export", *words])


def test_output_is_quoted_for_a_shell(tmp_path):
    CHECKPOINTS["Llama-3.1"].save_pretrained(tmp_path)
    arguments = (str(tmp_path), "--engine", "vllm", "--method", "yarn", "--length", "32768")
    arguments += ("--start", "unscaled", "--option", "beta_fast=16")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if "--hf-overrides" in line)
    words = shlex.split(line)
    overrides = json.loads(words[words.index("--hf-overrides") + 1])
    assert overrides["rope_parameters"]["beta_fast"] == 16
    assert words[words.index("--max-model-len") + 1] == "32768"
    assert f"    vllm serve {tmp_path} {line.strip()}\n" in result.stdout
    data = json.loads(run(*arguments, "--json").stdout)
    assert data["config"] == overrides
    assert data["arguments"] == words
    config = override_config(read_config(tmp_path), overrides)
    assert config.rope_parameters["rope_type"] == "yarn"


def test_saved_patch_needs_no_method(tmp_path):
    tiny = tiny_model("llama")
    handle = rope_patch.patch(tiny, "ntk", factor=4.0)
    rope_patch.save(tiny, tmp_path / "ntk")
    exported = json.loads(run(str(tmp_path / "ntk"), "--engine", "mlx", "--json").stdout)
    theta = tiny.config.rope_parameters["rope_theta"]
    assert exported["config"]["rope_theta"] == theta > 1e4
    assert exported["config"]["max_position_embeddings"] == handle.length
    # Another method starts from the model before it was patched.
    result = run(
        *(str(tmp_path / "ntk"), "--engine", "mlx", "--method", "linear", "--factor", "2"),
        "--json",
    )
    exported = json.loads(result.stdout)["config"]
    assert exported["rope_theta"] == handle.original["rope_parameters"]["rope_theta"]
    assert exported["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_saved_patch_without_a_config_form_is_refused(tmp_path):
    tiny = tiny_model("llama")
    rope_patch.patch(tiny, "dynamic-yarn")
    rope_patch.save(tiny, tmp_path / "saved")
    for words in ((), ("--factor", "4")):
        result = run(str(tmp_path / "saved"), "--engine", "vllm", *words)
        assert isinstance(result.exception, ValueError)  # a line on stderr: tests/cli/test_cli.py
        assert "dynamic-yarn" in str(result.exception)


def test_engines_and_searches_are_checked_before_building_a_model(monkeypatch):
    built_models = []
    monkeypatch.setattr(
        "rope_patch.pretrained.loading.empty_model", lambda *_: built_models.append(True)
    )
    for words, message in [
        (("--engine", "vlm", "--method", "yarn", "--factor", "2"), "did you mean 'vllm'"),
        (("--engine", "vllm", "--found", "nosuch"), "nosuch"),
    ]:
        result = run(TINY, *words)
        assert isinstance(result.exception, ValueError), result.output
        assert message in str(result.exception)
    assert not built_models


def test_written_folder_is_logged(tmp_path, caplog):
    words = ("--engine", "llama.cpp", "--method", "yarn", "--factor", "2")
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        result = run(TINY, *words, "--write", str(tmp_path / "made"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "made" / "config.json").is_file()
    assert f"for llama.cpp's converter: {tmp_path / 'made'}" in caplog.messages
