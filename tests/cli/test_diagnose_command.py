"""`rope-patch diagnose`: what it prints, what it writes, how it fails."""

import json
import logging
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run(*arguments):
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def test_it_prints_what_the_function_returns():
    done = run(TINY, "--method", "yarn", "--factor", "4", "--option", "beta_fast=16")
    expected = rope_patch.diagnose(TINY, "yarn", factor=4, beta_fast=16)
    assert done.exit_code == 0
    assert done.stdout == f"{expected}\n"
    first = done.stdout.splitlines()
    assert first[0] == "transformers does what the config says"
    assert first[2].startswith("for 1,024 tokens: yarn")


def test_json_has_all_of_it():
    done = run(TINY, "--length", "512", "--json")
    assert json.loads(done.stdout) == rope_patch.diagnose(TINY, length=512).to_dict()


def test_start_and_layer_types_are_handed_on():
    for arguments, says in (
        (("--start", "nowhere"), "start must be one of"),
        (("--layer-types", "full_attention"), "rotates all layers alike"),
    ):
        failed = run(TINY, *arguments).exception
        assert isinstance(failed, ValueError)
        assert says in str(failed)


def test_a_picture_beside_the_text(tmp_path, caplog):
    pytest.importorskip("matplotlib")
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        done = run(TINY, "--length", "512", "--picture", tmp_path / "a.svg")
    assert f"picture: {tmp_path / 'a.svg'}" in caplog.messages
    assert done.stdout == f"{rope_patch.diagnose(TINY, length=512)}\n"
    assert "target 512 tokens" in (tmp_path / "a.svg").read_text()


def test_a_diagnosis_does_not_wait_for_a_missing_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run(TINY, "--length", "512", "--picture", tmp_path / "a.svg")
    assert done.exit_code == 1
    assert done.stdout == f"{rope_patch.diagnose(TINY, length=512)}\n"
    assert "pip install 'rope-patch[eval]'" in str(done.exception)
    assert not (tmp_path / "a.svg").exists()


def test_a_picture_of_another_kind_is_refused_before_anything_is_read(tmp_path):
    failed = run("no/such/folder", "--picture", tmp_path / "a.gif").exception
    assert isinstance(failed, ValueError)
    assert "an .svg or a .png file" in str(failed)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--factor", "0.5"), "factor must be at least 1"),
        (("--factor", "2", "--length", "512"), "exactly one of --factor and --length"),
        (("--method", "yarn", "--length", "128"), "at least the trained length, 256 tokens"),
        (("--length", "0"), "length must be a whole number of tokens"),
        (("--method", "yran"), "did you mean 'yarn'"),
    ],
)
def test_requests_that_cannot_be_met(arguments, says):
    failed = run(TINY, *arguments).exception
    assert isinstance(failed, ValueError)
    assert says in str(failed)


def test_a_config_that_says_what_cannot_be(tmp_path):
    said = json.loads((Path(TINY) / "config.json").read_text())
    said["rope_parameters"] = {"rope_type": "default", "rope_theta": -1.0}
    (tmp_path / "config.json").write_text(json.dumps(said))
    failed = run(tmp_path).exception
    assert isinstance(failed, ValueError)
    assert "rope_theta must be a number of at least 1" in str(failed)
