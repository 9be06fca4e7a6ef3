"""Test `rope-patch diagnose`: output, pictures and refusals."""

import json
import logging
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run_diagnose(*arguments):
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def test_the_command_prints_the_diagnosis_of_the_function():
    result = run_diagnose(TINY, "--method", "yarn", "--factor", "4", "--option", "beta_fast=16")
    expected = rope_patch.diagnose(TINY, "yarn", factor=4, beta_fast=16)
    assert result.exit_code == 0
    assert result.stdout == f"{expected}\n"
    first = result.stdout.splitlines()
    assert first[0] == "transformers does what the config says"
    assert first[2].startswith("for 1,024 tokens: yarn")


def test_json_holds_the_whole_diagnosis():
    result = run_diagnose(TINY, "--length", "512", "--json")
    assert json.loads(result.stdout) == rope_patch.diagnose(TINY, length=512).to_dict()


def test_start_and_layer_types_reach_the_function():
    for arguments, message in (
        (("--start", "nowhere"), "start must be one of"),
        (("--layer-types", "full_attention"), "rotates all layers alike"),
    ):
        error = run_diagnose(TINY, *arguments).exception
        assert isinstance(error, ValueError)
        assert message in str(error)


def test_a_picture_is_written_besides_the_text(tmp_path, caplog):
    pytest.importorskip("matplotlib")
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        result = run_diagnose(TINY, "--length", "512", "--picture", tmp_path / "a.svg")
    assert f"picture: {tmp_path / 'a.svg'}" in caplog.messages
    assert result.stdout == f"{rope_patch.diagnose(TINY, length=512)}\n"
    assert "target 512 tokens" in (tmp_path / "a.svg").read_text()


def test_the_diagnosis_is_printed_even_if_matplotlib_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run_diagnose(TINY, "--length", "512", "--picture", tmp_path / "a.svg")
    assert result.exit_code == 1
    assert result.stdout == f"{rope_patch.diagnose(TINY, length=512)}\n"
    assert "pip install 'rope-patch[eval]'" in str(result.exception)
    assert not (tmp_path / "a.svg").exists()


def test_an_unknown_picture_format_is_refused_before_the_model_is_read(tmp_path):
    error = run_diagnose("no/such/folder", "--picture", tmp_path / "a.gif").exception
    assert isinstance(error, ValueError)
    assert "an .svg or a .png file" in str(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--factor", "0.5"), "factor must be at least 1"),
        (("--factor", "2", "--length", "512"), "exactly one of --factor and --length"),
        (("--method", "yarn", "--length", "128"), "at least the trained length, 256 tokens"),
        (("--length", "0"), "length must be a whole number of tokens"),
        (("--method", "yran"), "did you mean 'yarn'"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    error = run_diagnose(TINY, *arguments).exception
    assert isinstance(error, ValueError)
    assert message in str(error)


def test_a_config_with_impossible_values_is_refused(tmp_path):
    config = json.loads((Path(TINY) / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": -1.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = run_diagnose(tmp_path).exception
    assert isinstance(error, ValueError)
    assert "rope_theta must be a number of at least 1" in str(error)
