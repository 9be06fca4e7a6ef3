"""Test `rope-patch export`, and the folders for llama.cpp's converter that it writes."""

import json
import logging
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from checkpoints import CHECKPOINTS
from roundtrip import override_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app
from rope_patch.exporting import Export, write_folder

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"


def run(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


# -- the command -----------------------------------------------------------------------------------


def test_output_is_quoted_for_a_shell(tmp_path):
    CHECKPOINTS["Llama-3.1"].save_pretrained(tmp_path)
    arguments = (tmp_path, "--engine", "vllm", "--method", "yarn", "--length", "32768")
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
    config = override_config(AutoConfig.from_pretrained(tmp_path), overrides)
    assert config.rope_parameters["rope_type"] == "yarn"


def test_a_plain_model_is_said_to_change_nothing():
    note = "nothing changes"
    assert note in run(TINY, "--engine", "vllm").stdout
    assert note not in run(TINY, "--engine", "vllm", "--method", "ntk", "--factor", "2").stdout
    assert note not in str(rope_patch.export(CHECKPOINTS["Llama-3.1"], "vllm"))  # its own scaling


def test_saved_patch_needs_no_method(tmp_path):
    tiny = tiny_model("llama")
    handle = rope_patch.patch(tiny, "ntk", factor=4.0)
    rope_patch.save(tiny, tmp_path)
    exported = json.loads(run(tmp_path, "--engine", "mlx", "--json").stdout)["config"]
    assert exported["rope_theta"] == tiny.config.rope_parameters["rope_theta"] > 1e4
    assert exported["max_position_embeddings"] == handle.length
    # Another method starts from the model before it was patched.
    result = run(tmp_path, "--engine", "mlx", "--method", "linear", "--factor", "2", "--json")
    exported = json.loads(result.stdout)["config"]
    assert exported["rope_theta"] == handle.original["rope_parameters"]["rope_theta"]
    assert exported["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_saved_patch_without_a_config_form_is_refused(tmp_path):
    tiny = tiny_model("llama")
    rope_patch.patch(tiny, "dynamic-yarn")
    rope_patch.save(tiny, tmp_path / "saved")
    for words in ((), ("--factor", "4")):
        result = run(tmp_path / "saved", "--engine", "vllm", *words)
        assert isinstance(result.exception, ValueError)  # a line on stderr: tests/cli/test_cli.py
        assert "dynamic-yarn" in str(result.exception)


def test_engines_and_searches_are_checked_before_a_model_is_looked_for(tmp_path):
    for words, message in [
        (("--engine", "vlm", "--method", "yarn", "--factor", "2"), "did you mean 'vllm'"),
        (("--engine", "vllm", "--found", "nosuch"), "nosuch"),
    ]:
        result = run(tmp_path / "no-such-model", *words)
        assert isinstance(result.exception, ValueError), result.output
        assert message in str(result.exception)


@pytest.mark.parametrize("method", ["yarn", "longrope"])
def test_folders_are_written_and_logged(tmp_path, caplog, method):
    """Test `--write`; tests/searching/result/test_search_result.py covers search results."""
    words = [TINY, "--engine", "llama.cpp", "--method", method, "--factor", "4"]
    if method == "longrope":
        words += ["--option", "attention_factor=1.25"]
        for name in ("long", "short"):
            words += ["--option", f"{name}_factor={STRETCHES}"]
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        result = run(*words, "--write", tmp_path / "made")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "made" / "config.json").is_file()
    assert f"for llama.cpp's converter: {tmp_path / 'made'}" in caplog.messages
    if method == "longrope":
        assert "attn_factor=float:1.25" in result.stdout
        tensor = read_parts(tmp_path / "made")[1]["rope.freqs.weight"]
        assert torch.equal(tensor, torch.tensor(STRETCHES))


# -- folders ---------------------------------------------------------------------------------------

STRETCHES = [1.0 + i**2 / 50 for i in range(16)]


def read_tiny():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def export():
    model = read_tiny()
    rope_patch.patch(
        model,
        "longrope",
        factor=4.0,
        kernels="hf",
        attention_factor=1.25,
        long_factor=STRETCHES,
        short_factor=STRETCHES,
    )
    return rope_patch.export(model, "llama.cpp")


@pytest.fixture
def source(tmp_path):
    return Path(shutil.copytree(TINY, tmp_path / "source"))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_parts(folder):
    """Return the tensors the converter reads, restated from conversion/base.py:index_tensors."""
    index = folder / "model.safetensors.index.json"
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.name.startswith("model") and path.name.endswith(".safetensors")
    )
    weight_map = set()
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    tensors = {}
    for name in names:
        tensors |= load_file(folder / name)
    assert not weight_map or weight_map.keys() == tensors.keys(), (
        "Mismatch between weight map and model parts"
    )
    return names, tensors


@pytest.mark.parametrize("sharded", [False, True])
def test_folder_has_the_files_of_the_converter(export, source, tmp_path, sharded):
    if sharded:
        (source / "model.safetensors").unlink()
        read_tiny().save_pretrained(source, max_shard_size="200KB")
    (source / "rope_patch.json").write_text("{}")
    before = contents(source)
    folder = write_folder(export, source, tmp_path / "deep" / "made")
    names, tensors = read_parts(folder)
    assert len(names) > 2 if sharded else names[0] == "model.safetensors"
    assert "rope" in names[-1]  # the converter guesses the dtype from the first file
    stretches = tensors.pop("rope.freqs.weight")
    assert torch.equal(stretches, torch.tensor(STRETCHES))
    _, expected = read_parts(source)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    for name in names[:-1]:
        assert (folder / name).is_symlink()
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 1024
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    assert not (folder / "rope_patch.json").exists()
    assert contents(source) == before
    assert list((tmp_path / "deep").iterdir()) == [folder]


def test_files_are_copied_if_links_fail(export, source, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("not here")

    monkeypatch.setattr("os.symlink", fail)
    linked = write_folder(export, source, tmp_path / "hard")
    assert (linked / "model.safetensors").samefile(source / "model.safetensors")
    monkeypatch.setattr("os.link", fail)
    copied = write_folder(export, source, tmp_path / "copied")
    assert not (copied / "model.safetensors").samefile(source / "model.safetensors")
    assert contents(copied) == contents(linked)


def test_transformers_4_fields_are_removed(export, source, tmp_path):
    """Use Llama 3.1's config.json, whose stretches the converter would write a second time."""
    path = source / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_parameters"]
    fields |= {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    path.write_text(json.dumps(fields))
    folder = write_folder(export, source, tmp_path / "made")
    config = json.loads((folder / "config.json").read_text())
    assert "rope_scaling" not in config
    assert config["rope_theta"] == 10000.0
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_type"] == "default"


def test_folder_without_tensors(source, tmp_path):
    model = read_tiny()
    rope_patch.patch(model, "yarn", factor=4.0, kernels="hf")
    folder = write_folder(rope_patch.export(model, "llama.cpp"), source, tmp_path / "made")
    assert read_parts(folder)[0] == ["model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"


def expect_refusal(fact, export, source, folder):
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(rope_patch.Refused, match=fact):
        write_folder(export, source, folder)
    assert sorted(folder.parent.rglob("*")) == before


def test_non_empty_folders_are_refused(export, source, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for place in (folder, folder / "notes.txt", source):
        expect_refusal("not empty", export, source, place)
    (folder / "notes.txt").unlink()
    assert (write_folder(export, source, folder) / "config.json").is_file()


def test_unreadable_sources_are_refused(export, source, tmp_path):
    expect_refusal("is not a folder", export, tmp_path / "none", tmp_path / "made")
    save_file({"rope.freqs.weight": torch.ones(16)}, source / "model-2.safetensors")
    expect_refusal("rope.freqs.weight already", export, source, tmp_path / "made")
    (source / "model-2.safetensors").unlink()
    (source / "config.json").write_text("{")
    expect_refusal("damaged", export, source, tmp_path / "made")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").touch()
    expect_refusal("save_pretrained", export, source, tmp_path / "made")


def test_exports_that_need_no_folder_are_refused(source, tmp_path):
    model = read_tiny()
    rope_patch.patch(model, "yarn", factor=4.0, kernels="hf")
    expect_refusal("for vllm", rope_patch.export(model, "vllm"), source, tmp_path / "made")
    empty = Export("llama.cpp", arguments=["-c", "1024"])
    expect_refusal("nothing to convert anew", empty, source, tmp_path / "made")
