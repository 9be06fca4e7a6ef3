"""Test hostile command lines and damaged files: one error line each, and no traceback."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process

import rope_patch
from rope_patch.cli.commands import WITH_VERDICTS
from rope_patch.pretrained import demo
from rope_patch.pretrained.device_map import require_device
from rope_patch.pretrained.loading import read_model, read_tokenizer
from rope_patch.utils.errors import describe_error, one_line

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
DEEP = "[" * 3000 + "]" * 3000


@pytest.fixture
def damaged_model(tmp_path):
    """Copy the tiny Llama with other files in it; None omits a file."""

    def copy_with(**files):
        shutil.copytree(TINY, tmp_path / "model")
        for name, content in files.items():
            path = tmp_path / "model" / name.replace("__", ".")
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / "model"

    return copy_with


def config(**changes):
    return json.dumps(json.loads((TINY / "config.json").read_text()) | changes)


def error_line(*words):
    """Return the single error line of a command."""
    result = run_in_this_process(*words)
    assert result.returncode == (2 if words[0] in WITH_VERDICTS else 1)
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--factor", "1e308"], "factor must be a ratio of two lengths in tokens, got 1e+308"),
        (["--length", "9" * 400], "length must be finite, got"),
        (["--factor", "4", "--option", "beta_fast='"], "--option beta_fast=': expected a number"),
        (
            ["--factor", "4", "--option", "beta_fast=!!python/object/apply:os.system ['x']"],
            "could not determine a constructor",
        ),
        (["--factor", "4", "--option", f"beta_fast={'[' * 1200}"], "[[[ ...: expected"),
        (["--factor", "4", "--option", "beta_fast=2020-13-45"], "month must be in 1..12"),
    ],
)
def test_bad_numbers_and_options_are_refused(words, message):
    assert message in error_line("diagnose", TINY, "--method", "yarn", *words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, "the lists or objects in its config are nested too deep"),
        ("7", "must hold an object"),
        (config(model_type=["llama"]), "TypeError: unhashable"),
        (config(dtype="int99"), "AttributeError"),
    ],
)
@pytest.mark.parametrize("command", ["diagnose", "export"])
def test_damaged_configs_are_refused(damaged_model, command, content, message):
    folder = damaged_model(config__json=content)
    options = (
        ["--engine", "vllm", "--method", "yarn", "--factor", "4"] if command == "export" else []
    )
    line = error_line(command, folder, *options)
    assert message in line
    assert str(folder) in line


def test_a_trained_length_beyond_all_floats_is_refused(damaged_model):
    folder = damaged_model(config__json=config(max_position_embeddings=10**400))
    assert "does not say on how many tokens the model was trained" in error_line("diagnose", folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, "nested too deep"),
        (
            json.dumps(
                {
                    "method": "yarn",
                    "options": [],
                    "original": 3,
                    "trained_length": "x",
                    "layer_types": 4,
                }
            ),
            "options is []",
        ),
    ],
)
def test_damaged_sidecars_are_refused(damaged_model, content, message):
    folder = damaged_model(rope_patch__json=content)
    line = error_line("export", folder, "--engine", "vllm", "--method", "yarn", "--factor", "4")
    assert f"{folder / 'rope_patch.json'} is damaged" in line
    assert message in line


def test_a_deeply_nested_report_is_refused(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("[" * 100_000)
    assert f"{path} is not JSON (its lists or objects are nested" in error_line("report", path)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hacked",)


@pytest.mark.parametrize("content", [b"junkjunkjunk", b"", pickle.dumps(Hostile())])
def test_pickled_code_is_refused_and_never_runs(damaged_model, monkeypatch, tmp_path, content):
    folder = damaged_model(model__safetensors=None, pytorch_model__bin=content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"its \.bin file of weights is damaged, or holds code"):
        read_model(folder)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config__json": config(num_hidden_layers=3)}, r"lack 9 tensors .*model\.layers\.2"),
        ({"config__json": config(vocab_size=700)}, "not of the sizes in its config"),
        ({"config__json": config(hidden_act="none")}, "KeyError: 'none'|KeyError: \"'none'\""),
        ({"generation_config__json": DEEP}, "RecursionError"),
        ({"model__safetensors": b"\2\0\0\0\0\0\0\0{}"}, "lack 21 tensors"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(damaged_model, files, message):
    folder = damaged_model(**files)
    with pytest.raises(ValueError, match=message) as refusal:
        read_model(folder)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize("content", ["{}", "junk", "[]"])
def test_damaged_tokenizers_are_refused(damaged_model, content):
    folder = damaged_model(tokenizer__json=content)
    with pytest.raises(ValueError, match="its files are damaged or of no known kind") as refusal:
        read_tokenizer(folder)
    assert f"cannot load the tokenizer of {folder}" in str(refusal.value)


def test_a_missing_tokenizer_is_refused_with_advice(damaged_model):
    folder = damaged_model(tokenizer__json=None, tokenizer_config__json=None)
    line = error_line("search", folder, "--length", 512)
    assert line.endswith(f"save the model's there with tokenizer.save_pretrained('{folder}')")


@pytest.mark.parametrize("device_map", ["xpu", "nonsense", "mps:0", {"": "xpu:1"}])
def test_unknown_devices_are_refused(device_map):
    with pytest.raises(ValueError, match=r"device_map (names|must be)"):
        require_device(device_map)
    for valid_map in (None, "auto", "cpu", {"model": "cpu", "lm_head": "disk"}):
        require_device(valid_map)


def test_an_unavailable_device_is_refused_before_the_model_is_read():
    line = error_line("search", TINY, "--length", 512, "--device-map", "xpu:0")
    assert "device_map names 'xpu:0'" in line


def test_a_model_of_speech_is_refused_with_advice(damaged_model):
    folder = damaged_model(config__json='{"model_type": "qwen2_5_omni"}')
    line = error_line("export", folder, "--engine", "vllm", "--method", "yarn", "--factor", "4")
    assert "no causal language model of the type 'qwen2_5_omni'" in line
    assert "rope-patch diagnose" in line
    assert len(line) < 500


def test_demo_is_a_model_name_in_python_too(monkeypatch):
    monkeypatch.setattr(demo, "demo_folder", lambda: TINY)
    model = rope_patch.load("demo", "yarn", factor=2)
    assert rope_patch.current(model).length == 512


def test_error_descriptions_are_one_line():
    error = OSError("one of: (1) a file,\n(2) a folder,\n  or (3) nothing")
    assert describe_error(error) == "OSError: one of: (1) a file, (2) a folder, or (3) nothing"
    assert describe_error(KeyError()) == "KeyError"
    assert one_line("word " * 100, 20) == "word word word ..."
