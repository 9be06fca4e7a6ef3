"""`rope-patch export`: its output, and the models it accepts."""

import json
import logging
import shlex
from pathlib import Path

from architectures.tiny_architectures import tiny_model
from checkpoints import CHECKPOINTS
from roundtrip import overridden
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app
from rope_patch.pretrained.loading import read_config

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run(*words):
    return CliRunner().invoke(app, ["export", *words])


def test_its_words_are_quoted_for_a_shell(tmp_path):
    CHECKPOINTS["Llama-3.1"].save_pretrained(tmp_path)
    arguments = (str(tmp_path), "--engine", "vllm", "--method", "yarn", "--length", "32768")
    arguments += ("--start", "unscaled", "--option", "beta_fast=16")
    printed = run(*arguments)
    assert printed.exit_code == 0, printed.output
    line = next(line for line in printed.stdout.splitlines() if "--hf-overrides" in line)
    words = shlex.split(line)
    said = json.loads(words[words.index("--hf-overrides") + 1])
    assert said["rope_parameters"]["beta_fast"] == 16
    assert words[words.index("--max-model-len") + 1] == "32768"
    assert f"    vllm serve {tmp_path} {line.strip()}\n" in printed.stdout
    data = json.loads(run(*arguments, "--json").stdout)
    assert data["config"] == said
    assert data["arguments"] == words
    config = overridden(read_config(tmp_path), said)
    assert config.rope_parameters["rope_type"] == "yarn"


def test_a_saved_patch_needs_no_method(tmp_path):
    tiny = tiny_model("llama")
    handle = rope_patch.patch(tiny, "ntk", factor=4.0)
    rope_patch.save(tiny, tmp_path / "ntk")
    said = json.loads(run(str(tmp_path / "ntk"), "--engine", "mlx", "--json").stdout)
    theta = tiny.config.rope_parameters["rope_theta"]
    assert said["config"]["rope_theta"] == theta > 1e4
    assert said["config"]["max_position_embeddings"] == handle.length
    # Another method starts from the model before it was patched.
    other = run(
        *(str(tmp_path / "ntk"), "--engine", "mlx", "--method", "linear", "--factor", "2"),
        "--json",
    )
    said = json.loads(other.stdout)["config"]
    assert said["rope_theta"] == handle.original["rope_parameters"]["rope_theta"]
    assert said["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_a_saved_patch_that_no_config_says_is_refused(tmp_path):
    tiny = tiny_model("llama")
    rope_patch.patch(tiny, "dynamic-yarn")
    rope_patch.save(tiny, tmp_path / "saved")
    for words in ((), ("--factor", "4")):
        done = run(str(tmp_path / "saved"), "--engine", "vllm", *words)
        assert isinstance(done.exception, ValueError)  # a line on stderr: tests/cli/test_cli.py
        assert "dynamic-yarn" in str(done.exception)


def test_engines_and_searches_are_checked_before_a_model_is_made(monkeypatch):
    built_models = []
    monkeypatch.setattr(
        "rope_patch.pretrained.loading.empty_model", lambda *_: built_models.append(True)
    )
    for words, says in [
        (("--engine", "vlm", "--method", "yarn", "--factor", "2"), "did you mean 'vllm'"),
        (("--engine", "vllm", "--found", "nosuch"), "nosuch"),
    ]:
        done = run(TINY, *words)
        assert isinstance(done.exception, ValueError), done.output
        assert says in str(done.exception)
    assert not built_models


def test_a_folder_that_was_written_is_named(tmp_path, caplog):
    words = ("--engine", "llama.cpp", "--method", "yarn", "--factor", "2")
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        done = run(TINY, *words, "--write", str(tmp_path / "made"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "made" / "config.json").is_file()
    assert f"for llama.cpp's converter: {tmp_path / 'made'}" in caplog.messages
