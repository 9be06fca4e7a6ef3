"""Test folders for llama.cpp's converter: new files, and links to all others."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app
from rope_patch.exporting import write_folder

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
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


class TestRefused:
    def expect(self, match, export, source, folder):
        before = sorted(folder.parent.rglob("*"))
        with pytest.raises(ValueError, match=match):
            write_folder(export, source, folder)
        assert sorted(folder.parent.rglob("*")) == before

    def test_non_empty_folders(self, export, source, tmp_path):
        folder = tmp_path / "made"
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        self.expect("not empty", export, source, folder)
        self.expect("not empty", export, source, folder / "notes.txt")
        self.expect("not empty", export, source, source)
        (folder / "notes.txt").unlink()
        assert (write_folder(export, source, folder) / "config.json").is_file()

    def test_unreadable_sources(self, export, source, tmp_path):
        self.expect("is not a folder", export, tmp_path / "none", tmp_path / "made")
        save_file({"rope.freqs.weight": torch.ones(16)}, source / "model-2.safetensors")
        self.expect("rope.freqs.weight already", export, source, tmp_path / "made")
        for path in source.glob("model*"):
            path.unlink()
        (source / "pytorch_model.bin").touch()
        self.expect("save_pretrained", export, source, tmp_path / "made")

    def test_damaged_config(self, export, source, tmp_path):
        (source / "config.json").write_text("{")
        self.expect("is damaged", export, source, tmp_path / "made")

    def test_exports_that_need_no_folder(self, source, tmp_path):
        model = read_tiny()
        rope_patch.patch(model, "yarn", factor=4.0, kernels="hf")
        self.expect("for vllm", rope_patch.export(model, "vllm"), source, tmp_path / "made")
        empty = rope_patch.exporting.Export("llama.cpp", arguments=["-c", "1024"])
        self.expect("nothing to convert anew", empty, source, tmp_path / "made")


def test_export_command_writes_a_folder(tmp_path):
    """Test `--write`; tests/searching/result/test_search_result.py covers search results."""
    words = ["export", str(TINY), "--engine", "llama.cpp", "--method", "longrope", "--factor", "4"]
    words += ["--option", "attention_factor=1.25", "--write", str(tmp_path / "made")]
    for name in ("long", "short"):
        words += ["--option", f"{name}_factor={STRETCHES}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "attn_factor=float:1.25" in result.stdout
    assert torch.equal(
        read_parts(tmp_path / "made")[1]["rope.freqs.weight"], torch.tensor(STRETCHES)
    )
