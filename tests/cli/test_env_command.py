"""Test `env --check`: its table, its JSON and its exit code."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process

from rope_patch.patching.proof import checks
from rope_patch.transformers_api import releases
from rope_patch.utils import cache_folder

ASSETS = Path(__file__).parents[1] / "assets"


def test_a_model_is_proven_by_its_config_alone(tmp_path):
    shutil.copy(ASSETS / "tiny-qwen3" / "config.json", tmp_path)
    result = run_in_this_process("env", "--check", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Qwen3ForCausalLM, a tiny model of random weights" in result.stdout
    assert f"| **verdict** |{' passed |' * len(checks.KINDS)}" in result.stdout
    assert "transformers  " in result.stdout
    assert result.stdout.rstrip().endswith("All right.")


def test_json_has_every_check():
    result = run_in_this_process("env", ASSETS / "tiny-llama", "--check", "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["ok"]
    (proof,) = data["proofs"]
    assert proof["model_class"] == "LlamaForCausalLM"
    assert [kind["kind"] for kind in proof["kinds"]] == list(checks.KINDS)
    assert all(check["verdict"] == "ok" for kind in proof["kinds"] for check in kind["checks"])
    assert "kernels" in data


def test_three_classes_are_proven_without_a_model(monkeypatch):
    result = run_in_this_process("env", "--check", "--json")
    assert result.returncode == 0, result.stderr
    classes = [proof["model_class"] for proof in json.loads(result.stdout)["proofs"]]
    assert classes == ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]


def test_what_is_wrong_ends_with_1(monkeypatch):
    monkeypatch.setattr(checks, "LIMIT", 1e-9)  # below rounding, which is then wrong
    monkeypatch.setattr(checks, "_measure_baseline", _no_baseline)
    result = run_in_this_process("env", "--check", ASSETS / "tiny-llama")
    assert result.returncode == 1
    assert "Not all is right" in result.stdout
    assert "cached steps equal one pass: logits are off by" in result.stdout


def _no_baseline(subject, measure, lengths, *arguments):
    subject.baselines[(measure, lengths, arguments)] = 0.0


def test_a_model_goes_with_check():
    result = run_in_this_process("env", ASSETS / "tiny-llama")
    assert result.returncode == 2
    assert "--check" in result.stderr


def test_a_model_that_does_not_exist_is_an_error():
    result = run_in_this_process("env", "--check", "no/such-model")
    assert result.returncode == 2
    assert "no/such-model" in result.stderr


def test_a_newer_transformers_is_named(monkeypatch):
    monkeypatch.setattr(releases, "transformers_version", lambda: "99.0")
    facts = json.loads(run_in_this_process("env", "--json").stdout)
    assert facts["transformers"].endswith(
        f"(newer than {releases.NEWEST_TESTED}, the newest that was tested)"
    )


@pytest.mark.parametrize("named", [True, False])
def test_the_cache_folder_is_named(named, tmp_path, monkeypatch):
    monkeypatch.delenv(cache_folder.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "system"))
    expected = tmp_path / "system" / "rope_patch"
    if named:
        expected = tmp_path / "mine"
        monkeypatch.setenv(cache_folder.VARIABLE, str(expected))
    assert cache_folder.cache_folder() == expected
    assert str(expected) in run_in_this_process("env").stdout
