"""Test checkpoints that are patched by their config alone."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers.encoding_models import encoding_model, token_logits
from helpers.tiny_models import OLD_TRANSFORMERS, logits, make_model

import rope_patch
from rope_patch import patch_checkpoint

ASSETS = Path(__file__).parents[1] / "assets"
REQUEST = {"factor": 4}


@pytest.fixture
def source(tmp_path):
    """Return a checkpoint of two shards with a tokenizer and files of other tools."""
    folder = tmp_path / "source"
    make_model("llama").save_pretrained(folder, max_shard_size="20KB")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS / "tiny-llama")
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder)
    (folder / "model.gguf").write_text("another form of the weights")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder


@pytest.fixture(params=["llama", "qwen3", "gemma3"])
def family(request):
    return request.param


@pytest.mark.parametrize(
    ("method", "native"),
    [("yarn", True), ("linear", True), ("clipped", True), ("mixed-yarn", False)],
)
def test_the_checkpoint_has_the_logits_of_the_patched_model(family, method, native, tmp_path):
    if OLD_TRANSFORMERS and (family, method) == ("gemma3", "yarn"):
        pytest.skip("transformers 5.0 reads no YaRN for Gemma 3")
    model = make_model(family)
    model.save_pretrained(tmp_path / "source")
    written = patch_checkpoint(tmp_path / "source", tmp_path / "new", method, **REQUEST)
    expected = rope_patch.patch(model, method, kernels="hf", **REQUEST)
    loaded = rope_patch.load(tmp_path / "new", kernels="hf")
    assert logits(loaded).equal(logits(model))
    assert written.native is native
    assert (written.length, written.problem) == (expected.length, None)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    if not native:
        expected.undo()
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-5)


def test_it_has_the_files_that_save_writes(source, tmp_path):
    """`save` reads and writes the weights; config and sidecar must say the same without."""
    patch_checkpoint(source, tmp_path / "new", "yarn", factor=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    rope_patch.patch(model, "yarn", factor=4)
    rope_patch.save(model, tmp_path / "saved")
    for name in ("config.json", "rope_patch.json"):
        ours, theirs = (
            json.loads((tmp_path / folder / name).read_text()) for folder in ("new", "saved")
        )
        assert ours == theirs


def test_weights_are_linked_and_the_rest_is_taken(source, tmp_path):
    written = patch_checkpoint(source, tmp_path / "new", "yarn", factor=4)
    shards = [path.name for path in source.glob("*.safetensors")]
    assert len(shards) > 1
    for name in shards:
        assert (source / name).samefile(tmp_path / "new" / name)
    assert {*shards, "tokenizer.json", "model.safetensors.index.json"} <= set(written.linked)
    assert written.copied == []
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {*written.linked, "config.json", "rope_patch.json"}
    assert not {"model.gguf", ".cache"} & names


def test_copies_are_files_of_their_own(source, tmp_path):
    written = patch_checkpoint(source, tmp_path / "new", "yarn", factor=4, copy=True)
    assert written.linked == []
    for name in written.copied:
        if name != "tokenizer_config.json":
            assert (source / name).read_bytes() == (tmp_path / "new" / name).read_bytes()
        assert not (source / name).samefile(tmp_path / "new" / name)


def test_files_are_copied_where_disks_have_no_links(source, tmp_path, monkeypatch):
    def link(*_, **__):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    written = patch_checkpoint(source, tmp_path / "new", "yarn", factor=4)
    assert written.linked == []
    assert rope_patch.load(tmp_path / "new") is not None


def test_the_tokenizer_reads_the_new_length_and_the_source_is_unchanged(source, tmp_path):
    before = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    written = patch_checkpoint(source, tmp_path / "new", "yarn", factor=4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer.model_max_length == written.length
    assert before == {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}


def test_save_writes_the_tokenizer_with_the_new_length(source, tmp_path):
    model = make_model("llama")
    handle = rope_patch.patch(model, "yarn", factor=4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    rope_patch.save(model, tmp_path / "saved", tokenizer=tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded("one two").input_ids == tokenizer("one two").input_ids
    assert (tokenizer.model_max_length, loaded.model_max_length) == (64, handle.length)


def test_a_saved_patch_is_patched_from_its_checkpoint(source, tmp_path):
    """The second patch replaces the first one instead of stretching its rotation again."""
    patch_checkpoint(source, tmp_path / "first", "linear", factor=2)
    patch_checkpoint(tmp_path / "first", tmp_path / "second", "yarn", factor=4)
    patch_checkpoint(source, tmp_path / "direct", "yarn", factor=4)
    second, direct = (rope_patch.load(tmp_path / name) for name in ("second", "direct"))
    assert logits(second).equal(logits(direct))


def test_folders_that_cannot_be_written_are_refused(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty: expected a new folder"):
        patch_checkpoint(source, tmp_path / "full", "yarn", factor=4)
    with pytest.raises(ValueError, match="in the checkpoint's own folder"):
        patch_checkpoint(source, source / "new", "yarn", factor=4)
    assert not (source / "new").exists()


def test_checkpoints_without_safetensors_are_refused(source, tmp_path):
    for path in source.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"no weights in safetensors.*rope_patch\.load"):
        patch_checkpoint(source, tmp_path / "new", "yarn", factor=4)


def test_an_incomplete_checkpoint_is_refused(source, tmp_path):
    next(source.glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="is incomplete: 1 of"):
        patch_checkpoint(source, tmp_path / "new", "yarn", factor=4)


def test_too_small_a_disk_is_said_before_anything_is_copied(source, tmp_path, monkeypatch):
    usage = SimpleNamespace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="make room"):
        patch_checkpoint(source, tmp_path / "new", "yarn", factor=4, copy=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_failure_leaves_nothing_behind(source, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.LlamaConfig, "save_pretrained", fail)
    with pytest.raises(KeyboardInterrupt):
        patch_checkpoint(source, tmp_path / "new", "yarn", factor=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_names_that_the_hub_does_not_know_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a folder nor a model that the Hub gives"):
        patch_checkpoint("nobody/nothing-at-all", tmp_path / "new", "yarn", factor=4)


@pytest.mark.parametrize(
    ("family", "method", "arguments", "native"),
    [
        ("GPT2LMHeadModel", "linear", {}, True),
        ("BloomForCausalLM", "ntk", {"trained_length": 40}, False),
        ("T5ForConditionalGeneration", "max-distance", {"trained_length": 512}, True),
    ],
)
def test_models_that_do_not_rotate_are_written_as_save_writes_them(
    family, method, arguments, native, tmp_path
):
    model = encoding_model(family)
    model.save_pretrained(tmp_path / "source")
    before = {p.name: p.read_bytes() for p in (tmp_path / "source").iterdir()}
    written = patch_checkpoint(tmp_path / "source", tmp_path / "new", method, factor=4, **arguments)
    rope_patch.patch(model, method, factor=4, **arguments)
    rope_patch.save(model, tmp_path / "saved")
    assert written.native is native
    assert ("model.safetensors" in written.linked) is (family != "GPT2LMHeadModel")
    for name in ("config.json", "rope_patch.json"):
        ours, theirs = (
            json.loads((tmp_path / folder / name).read_text()) for folder in ("new", "saved")
        )
        assert ours.items() >= {k: v for k, v in theirs.items() if k != "dtype"}.items()
    loaded, saved = rope_patch.load(tmp_path / "new"), rope_patch.load(tmp_path / "saved")
    assert token_logits(loaded, 60).equal(token_logits(saved, 60))
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "source").iterdir()}
