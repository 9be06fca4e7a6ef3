"""Test `rope-patch patch`: what it writes, prints and refuses."""

import json
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process

import rope_patch

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")
YARN = ["--method", "yarn", "--factor", "4"]


def test_it_prints_what_is_in_effect_and_the_next_command(tmp_path):
    folder = tmp_path / "new"
    printed = run_in_this_process("patch", TINY, *YARN, "--to", str(folder)).stdout
    assert printed.startswith("yarn ×4, 256 → 1,024 tokens")
    assert f"wrote {folder}: config.json and rope_patch.json" in printed
    assert f"rope-patch export {folder} --engine vllm" in printed
    assert rope_patch.current(rope_patch.load(folder)).length == 1024


def test_a_rotation_without_a_config_form_says_how_to_load_it(tmp_path):
    folder = tmp_path / "new"
    words = ["--method", "dynamic-yarn", "--length", "2048", "--to", str(folder)]
    printed = run_in_this_process("patch", TINY, *words).stdout
    assert f"rope_patch.load('{folder}')" in printed


def test_a_position_map_needs_neither_factor_nor_length(tmp_path):
    folder = tmp_path / "new"
    words = ["--method", "self-extend", "--option", "window=64", "--to", str(folder)]
    printed = run_in_this_process("patch", TINY, *words).stdout
    assert printed.startswith("self-extend, 256 → any length")
    assert f"rope_patch.load('{folder}')" in printed
    loaded = rope_patch.current(rope_patch.load(folder))
    assert (loaded.method.name, loaded.method.window, loaded.length) == ("self-extend", 64, None)


def test_json_names_all_files(tmp_path):
    folder = tmp_path / "new"
    words = [*YARN, "--to", str(folder), "--weights", "copy", "--json"]
    report = json.loads(run_in_this_process("patch", TINY, *words).stdout)
    assert report["folder"] == str(folder)
    assert report["linked"] == []
    assert "model.safetensors" in report["copied"]
    assert (report["native"], report["length"], report["problem"]) == (True, 1024, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--factor", "4", "--to", "new"], "--method"),
        ([*YARN, "--to", "new", "--weights", "move"], "--weights must be link or copy"),
        (["--method", "yarm", "--factor", "4", "--to", "new"], "unknown method 'yarm'"),
        (["--method", "yarn", "--to", "new"], "exactly one of --factor and --length"),
    ],
)
def test_wrong_words_are_one_error_and_write_nothing(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = run_in_this_process("patch", TINY, *words)
    assert result.returncode != 0
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("growth", ["stepped", "exact"])
def test_dynamic_in_steps_is_not_transformers_own(tmp_path, growth):
    folder = tmp_path / "new"
    words = ["--method", "dynamic", "--length", "512", "--option", f"growth={growth}"]
    printed = run_in_this_process("patch", TINY, *words, "--to", str(folder)).stdout
    assert ("plain transformers loads it" in printed) == (growth == "exact")
    assert ("equals growth='exact' alone" in printed) == (growth != "exact")
