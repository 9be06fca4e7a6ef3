"""Test `rope-patch` diagnose, patch, env and verify: text, JSON, files and exit codes."""

import contextlib
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.commands import run_in_this_process
from helpers.engine_server import EngineServer
from helpers.kept_predictions import kept_predictions
from helpers.wrong_engines import CONFIGS, configured, plain

import rope_patch
from rope_patch.cli import main
from rope_patch.patching.proof import checks

ASSETS = Path(__file__).parents[1] / "assets"
TINY = ASSETS / "tiny-llama"
YARN = ("--method", "yarn", "--factor", "4")


# -- diagnose --------------------------------------------------------------------------------------


def test_diagnose_prints_the_diagnosis_of_the_function():
    result = run_in_this_process("diagnose", TINY, *YARN, "--option", "beta_fast=16")
    expected = rope_patch.diagnose(TINY, "yarn", factor=4, beta_fast=16)
    assert result.returncode == 0
    assert result.stdout == f"{expected}\n"
    lines = result.stdout.splitlines()
    assert lines[0] == "transformers does what the config says"
    assert lines[2].startswith("for 1,024 tokens: yarn")
    assert "critical dimension" in result.stdout
    rows = [line.split() for line in lines if line[:4].strip().isdigit()]
    assert [row[0] for row in rows] == [str(pair) for pair in range(16)]
    assert all(row[3].startswith("×") for row in rows)


def test_json_holds_the_whole_diagnosis():
    result = run_in_this_process("diagnose", TINY, "--length", "512", "--json")
    assert json.loads(result.stdout) == rope_patch.diagnose(TINY, length=512).to_dict()


def test_a_picture_is_written_besides_the_text(tmp_path, caplog):
    path = tmp_path / "a.svg"
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        result = run_in_this_process("diagnose", TINY, "--length", "512", "--picture", path)
    assert f"picture: {path}" in caplog.messages
    assert result.stdout == f"{rope_patch.diagnose(TINY, length=512)}\n"
    assert "target 512 tokens" in path.read_text()


def test_the_diagnosis_is_printed_even_if_matplotlib_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "a.svg"
    result = run_in_this_process("diagnose", TINY, "--length", "512", "--picture", path)
    assert result.returncode == 1
    assert result.stdout == f"{rope_patch.diagnose(TINY, length=512)}\n"
    assert "pip install '.[eval]'" in result.stderr
    assert not path.exists()


# -- patch -----------------------------------------------------------------------------------------


def patch_to(folder, *words):
    result = run_in_this_process("patch", TINY, *words, "--to", folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_patch_prints_what_is_in_effect_and_the_next_command(tmp_path):
    folder = tmp_path / "new"
    printed = patch_to(folder, *YARN)
    assert printed.startswith("yarn ×4, 256 → 1,024 tokens")
    assert f"wrote {folder}: config.json and rope_patch.json" in printed
    assert f"rope-patch export {folder} --engine vllm" in printed
    assert rope_patch.current(rope_patch.load(folder)).length == 1024


def test_a_rotation_without_a_config_form_says_how_to_load_it(tmp_path):
    printed = patch_to(tmp_path / "new", "--method", "dynamic-yarn", "--length", "2048")
    assert f"rope_patch.load('{tmp_path / 'new'}')" in printed


def test_a_position_map_needs_neither_factor_nor_length(tmp_path):
    printed = patch_to(tmp_path / "new", "--method", "self-extend", "--option", "window=64")
    assert printed.startswith("self-extend, 256 → any length")
    loaded = rope_patch.current(rope_patch.load(tmp_path / "new"))
    assert (loaded.method.name, loaded.method.window, loaded.length) == ("self-extend", 64, None)


def test_json_names_all_files(tmp_path):
    folder = tmp_path / "new"
    report = json.loads(patch_to(folder, *YARN, "--weights", "copy", "--json"))
    assert report["folder"] == str(folder)
    assert report["linked"] == []
    assert "model.safetensors" in report["copied"]
    assert (report["native"], report["length"], report["problem"]) == (True, 1024, None)


@pytest.mark.parametrize("growth", ["stepped", "exact"])
def test_dynamic_in_steps_is_not_transformers_own(tmp_path, growth):
    words = ("--method", "dynamic", "--length", "512", "--option", f"growth={growth}")
    printed = patch_to(tmp_path / "new", *words)
    assert ("plain transformers loads it" in printed) == (growth == "exact")
    assert ("growth='exact' alone" in printed) == (growth != "exact")


# -- env -------------------------------------------------------------------------------------------


def test_a_model_is_proven_by_its_config_alone(tmp_path):
    shutil.copy(ASSETS / "tiny-qwen3" / "config.json", tmp_path)
    result = run_in_this_process("env", "--check", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Qwen3ForCausalLM" in result.stdout
    assert f"| **verdict** |{' passed |' * len(checks.KINDS)}" in result.stdout
    assert "transformers  " in result.stdout
    assert result.stdout.rstrip().endswith("All right.")


@pytest.mark.slow
def test_three_classes_are_proven_without_a_model_and_json_has_every_check():
    result = run_in_this_process("env", "--check", "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["ok"]
    assert "kernels" in data
    classes = [proof["model_class"] for proof in data["proofs"]]
    assert classes == ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
    for proof in data["proofs"]:
        assert [kind["kind"] for kind in proof["kinds"]] == list(checks.KINDS)
        assert {check["verdict"] for kind in proof["kinds"] for check in kind["checks"]} == {"ok"}


def test_what_is_wrong_ends_with_1(monkeypatch):
    def no_baseline(subject, measure, lengths, *arguments):
        subject.baselines[(measure, lengths, arguments)] = 0.0

    monkeypatch.setattr(checks, "LIMIT", 1e-9)  # below rounding, which is then wrong
    monkeypatch.setattr(checks, "_measure_baseline", no_baseline)
    result = run_in_this_process("env", "--check", TINY)
    assert result.returncode == 1
    assert "Not all is right" in result.stdout
    assert "cached steps equal one pass: logits are off by" in result.stdout


def test_a_model_that_does_not_exist_is_an_error():
    result = run_in_this_process("env", "--check", "no/such-model")
    assert result.returncode == 2
    assert "no/such-model" in result.stderr


def test_a_newer_transformers_is_named(monkeypatch):
    monkeypatch.setattr("rope_patch.transformers_api.models.transformers_version", lambda: "99.0")
    facts = json.loads(run_in_this_process("env", "--json").stdout)
    assert "newer than" in facts["transformers"]


@pytest.mark.parametrize("named", [True, False])
def test_the_cache_folder_is_named(named, tmp_path, monkeypatch):
    monkeypatch.delenv("ROPE_PATCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "system"))
    expected = tmp_path / "system" / "rope_patch"
    if named:
        expected = tmp_path / "mine"
        monkeypatch.setenv("ROPE_PATCH_CACHE", str(expected))
    assert str(expected) in run_in_this_process("env").stdout


# -- verify ----------------------------------------------------------------------------------------

AGAINST = ("--against", TINY, *YARN)


@pytest.fixture(scope="module")
def kept():
    """Share predictions among the tests that ask for YaRN."""
    predictions = {}
    return lambda: kept_predictions(predictions)


@pytest.mark.parametrize(("case", "code"), [("as asked", 0), ("attention factor dropped", 1)])
def test_verify_prints_json_and_its_exit_code_is_the_verdict(kept, case, code):
    parameters, expected = CONFIGS[case]
    with kept(), EngineServer(configured("llama", parameters)).running() as url:
        result = run_in_this_process("verify", url, *AGAINST, "--json", "-q")
    assert result.returncode == code
    found = json.loads(result.stdout)
    assert found["explains"] == [expected]
    assert found["margin_nats"] > 100
    assert found["noise_floor_nats"] < 1e-3
    names = {"name", "says", "same_as", "nats_a_token", "margin_nats", "tokens", "explains"}
    assert names == found["hypotheses"][0].keys()


def test_the_verdict_stays_if_nobody_reads_it(kept, monkeypatch):
    parameters, _ = CONFIGS["attention factor dropped"]
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does, which has read enough
    with (
        kept(),
        EngineServer(configured("llama", parameters)).running() as url,
        os.fdopen(writer, "w") as output,
        contextlib.redirect_stdout(output),
    ):
        words = ["rope-patch", "verify", url, *map(str, AGAINST), "-q"]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 1


def test_text_names_the_rotation_the_margin_and_the_noise_floor(kept):
    with kept(), EngineServer(plain()).running() as url:
        result = run_in_this_process("verify", url, *AGAINST)
    assert result.returncode == 1
    first, second = result.stdout.splitlines()[:2]
    assert "does not rotate as asked (yarn ×4, 256 → 1,024 tokens)" in first
    assert "no scaling acts" in first
    assert "margin: " in second
    assert "noise floor: " in second


@pytest.mark.parametrize(
    ("engine", "words", "kind"),
    [
        (lambda: configured("llama", CONFIGS["as asked"][0]), AGAINST, None),
        (plain, AGAINST, "failure"),
        (plain, ("--against", TINY, "--method", "dynamic-yarn", "--tokens", 200), "error"),
    ],
)
def test_verdict_is_written_for_a_build_server(kept, engine, words, kind, tmp_path):
    file = tmp_path / "verify.xml"
    with EngineServer(engine(), name="a<b>\x1b").running() as url:
        result = run_in_this_process("verify", url, *words, "--junit", file)
    suite = ElementTree.parse(file).getroot()
    assert (suite.tag, suite.get("tests")) == ("testsuite", "1")
    assert suite.get("failures") == str(int(kind == "failure"))
    assert suite.get("errors") == str(int(kind == "error"))
    (case,) = suite
    assert case.get("classname").startswith("a<b>")
    if kind is not None:
        assert case[0].tag == kind
        assert case[0].get("message") in result.stdout
    assert case[-1].text.strip() == result.stdout.strip()


def test_verdict_that_cannot_be_written_is_refused_before_the_engine_is_asked(tmp_path):
    words = ("--against", TINY, "--junit", tmp_path)
    result = run_in_this_process("verify", "http://127.0.0.1:9", *words)
    assert result.returncode == 2
    assert str(tmp_path) in result.stderr


def test_what_cannot_be_told_exits_with_3():
    with EngineServer(plain()).running() as url:
        words = ("--against", TINY, "--method", "dynamic-yarn", "--tokens", 200)
        result = run_in_this_process("verify", url, *words)
    assert result.returncode == 3
    assert "cannot be told apart" in result.stdout
