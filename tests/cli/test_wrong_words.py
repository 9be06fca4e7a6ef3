"""Test wrong words and damaged files: one error line each, no traceback, and nothing written.

What each command says to wrong words is recorded, and read as a diff where it changes.
"""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process
from helpers.recorded import check_recorded

import rope_patch

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
DEEP = "[" * 3000 + "]" * 3000
WITH_VERDICTS = {"verify", "env", "bench", "eval", "compare", "report"}  # 1 is a verdict of theirs


def error_line(*words):
    """Return the single error line of a command."""
    result = run_in_this_process(*words)
    assert result.returncode == (2 if words[0] in WITH_VERDICTS else 1)
    assert result.stdout == ""
    # A busy machine may take long enough to be told that work goes on.
    said = [line for line in result.stderr.splitlines() if not line.startswith("working, ")]
    (line,) = [line for line in said if line.strip()]
    assert line.startswith("error: ")
    return line


# -- words -----------------------------------------------------------------------------------------

RECORDED = Path(__file__).with_name("recorded") / "refusals.txt"
YARN = "--method yarn --factor 4"
DIAGNOSE_YARN = "diagnose TINY --method yarn"
BETA_FAST = f"{DIAGNOSE_YARN} --factor 4 --option beta_fast="
# The words of commands, in which TINY is a model. What they answer is recorded.
REFUSED = [
    "methods yran",
    "diagnose /no/such",
    "diagnose TINY --option beta_fast",
    "diagnose TINY --factor 0.5",
    "diagnose TINY --factor 2 --length 512",
    "diagnose TINY --length 0",
    "diagnose TINY --length 4y",
    "diagnose TINY --factor 1k --length 1024",
    "diagnose TINY --trained-length 4x",
    "diagnose TINY --method yran",
    "diagnose TINY --start nowhere",
    "diagnose TINY --layer-types full_attention",
    "diagnose no/such/folder --picture a.gif",
    f"{DIAGNOSE_YARN} --length 128",
    f"{DIAGNOSE_YARN} --factor 1e308",
    f"{DIAGNOSE_YARN} --factor 64.1",
    "diagnose TINY --length 16385",
    f"{DIAGNOSE_YARN} --length {'9' * 400}",
    f"{BETA_FAST}'",
    f"{BETA_FAST}!!python/object/apply:os.abort",
    f"{BETA_FAST}{'[' * 1200}",
    f"{BETA_FAST}2020-13-45",
    "eval TINY --method yarn --lengths many",
    "eval TINY --method yarn",
    "eval TINY --method yarn --factor 2 --length 512",
    "eval TINY --method yarn --length 12",
    "eval TINY --method yarn --length 16385 --lengths 512",
    f"eval TINY {YARN} --tasks rp_nothing",
    "compare TINY --methods yarn,yarm --factor 4 --lengths 512",
    "compare TINY --methods yarn --lengths 512",
    "compare TINY --methods yarn --factor 65",
    "report no/such",
    "report TINY",
    "recommend TINY --length 512 --minutes 0",
    "recommend TINY --length 128 --minutes 1",
    "recommend TINY --length 16385 --minutes 1",
    "search TINY --length 512 --device-map xpu:0",
    "search TINY --length 128",
    "search TINY --factor 65",
    "search TINY --length 512 --strategy best",
    "extend TINY --to new",
    "extend TINY --to 65x",
    "extend TINY --to 4y",
    "extend TINY --to 1",
    "bench TINY --methods yarn --factor 1k",
    "picture angles --length 2x",
    "finetune --config no_recipe",
    "finetune --config smoke_cpu --max_stepps 1",
    "finetune --config smoke_cpu --max_steps many",
    "finetune --config smoke_cpu --train_length 2x",
    "recipes no_recipe",
    f"patch TINY {YARN} --to new --weights move",
    "patch TINY --method yarm --factor 4 --to new",
    "patch TINY --method yarn --to new",
    "patch TINY --method yarn --factor 65 --to new",
    "patch TINY --method dynamic --factor 4 --to TINY",
    f"export TINY {YARN} --engine vlm",
    "export TINY --method dynamic-yarn --length 16385 --engine vllm",
    f"verify http://127.0.0.1:9 --against TINY {YARN}",
    "verify http://127.0.0.1:9 --against no/such/folder",
    "verify ftp://127.0.0.1 --against TINY",
    "verify TINY --against TINY --method yarn --factor 65",
    "bench TINY --methods yarm",
    "bench TINY --methods yarn --factor 65",
    "picture clocks",
    "lab --encodings rope,ropy",
    "env TINY",
]

# What differs between machines, and what is recorded instead.
MACHINE = (
    (re.escape(str(TINY)), "TINY"),
    (r"torch \d\S+", "torch VERSION"),
    (r"URLError: [^)]*", "URLError"),
)


def test_wrong_words_are_one_error_line_and_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusals = []
    for words in REFUSED:
        line = error_line(*(TINY if word == "TINY" else word for word in words.split()))
        shown = words if len(words) < 100 else f"{words[:60]}..."
        for machine, everywhere in MACHINE:
            line = re.sub(machine, everywhere, line)
        refusals.append(f"$ rope-patch {shown}\n{line}\n")
        assert not list(tmp_path.iterdir()), words
    check_recorded("\n".join(refusals), RECORDED)


def test_training_refuses_a_far_length(tmp_path):
    words = ("finetune", "--config", "smoke_cpu", "--model", TINY, "--output_dir", tmp_path)
    assert "--anyway" in error_line(*words, "--factor", 65)


# -- damaged files ---------------------------------------------------------------------------------


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


def export_line(folder):
    return error_line("export", folder, "--engine", "vllm", *YARN.split())


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (DEEP, "nested too deep"),
        ("7", "must hold an object"),
        (config(model_type=["llama"]), "TypeError: unhashable"),
        (config(dtype="int99"), "AttributeError"),
    ],
)
def test_damaged_configs_are_refused(damaged_model, content, fact):
    folder = damaged_model(config__json=content)
    for line in (error_line("diagnose", folder), export_line(folder)):
        assert fact in line
        assert str(folder) in line


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"max_position_embeddings": 10**400}, "on how many tokens"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta"),
    ],
)
def test_configs_with_impossible_values_are_refused(damaged_model, changes, fact):
    assert fact in error_line("diagnose", damaged_model(config__json=config(**changes)))


@pytest.mark.parametrize(
    ("content", "fact"),
    [(DEEP, "nested too deep"), ('{"method": "yarn", "options": []}', "options is []")],
)
def test_damaged_sidecars_are_refused(damaged_model, content, fact):
    more = ', "original": 3, "trained_length": "x", "layer_types": 4}'
    folder = damaged_model(rope_patch__json=content.replace("}", more))
    line = export_line(folder)
    assert f"{folder / 'rope_patch.json'} is damaged" in line
    assert fact in line


def test_a_deeply_nested_report_is_refused(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("[" * 100_000)
    assert f"{path} is not JSON" in error_line("report", path)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hacked",)


@pytest.mark.parametrize("content", [b"junkjunkjunk", b"", pickle.dumps(Hostile())])
def test_pickled_code_is_refused_and_never_runs(damaged_model, monkeypatch, tmp_path, content):
    folder = damaged_model(model__safetensors=None, pytorch_model__bin=content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\.bin file of weights is damaged, or holds code"):
        rope_patch.load(folder, "yarn", factor=4)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("files", "fact"),
    [
        ({"config__json": config(num_hidden_layers=3)}, r"lack 9 tensors .*model\.layers\.2"),
        ({"config__json": config(vocab_size=700)}, "not of the sizes in its config"),
        ({"config__json": config(hidden_act="none")}, "KeyError"),
        ({"generation_config__json": DEEP}, "RecursionError"),
        ({"model__safetensors": b"\2\0\0\0\0\0\0\0{}"}, "lack 21 tensors"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(damaged_model, files, fact):
    folder = damaged_model(**files)
    with pytest.raises(ValueError, match=fact) as refusal:
        rope_patch.load(folder, "yarn", factor=4)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize("content", ["{}", "junk", "[]", None])
def test_damaged_and_missing_tokenizers_are_refused(damaged_model, content):
    missing = {"tokenizer_config__json": None} if content is None else {}
    folder = damaged_model(tokenizer__json=content, **missing)
    line = error_line("search", folder, "--length", 512)
    assert str(folder) in line
    assert ("save_pretrained" if content is None else "damaged") in line


def test_a_model_of_speech_is_refused_with_advice(damaged_model):
    line = export_line(damaged_model(config__json='{"model_type": "qwen2_5_omni"}'))
    assert "'qwen2_5_omni'" in line
    assert "rope-patch diagnose" in line
    assert len(line) < 500


def test_demo_is_a_model_name_in_python_too(monkeypatch):
    monkeypatch.setattr("rope_patch.pretrained.demo.demo_folder", lambda: TINY)
    model = rope_patch.load("demo", "yarn", factor=2)
    assert rope_patch.current(model).length == 512
