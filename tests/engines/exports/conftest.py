"""Checkpoints for the tests of exports, each written once."""

import json
import shutil

import pytest
from family_checkpoints import FAMILY_CONFIGS, PUBLISHED_FIELDS
from tiny_checkpoints import configs, write_checkpoint


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Return a function that returns a checkpoint's folder."""
    parent = tmp_path_factory.mktemp("checkpoints")

    def folder(name):
        path = parent / name.replace(", ", "-").replace(" ", "-")
        if not path.exists():
            write_checkpoint(
                FAMILY_CONFIGS[name]() if name in FAMILY_CONFIGS else configs()[name], path
            )
            config = json.loads((path / "config.json").read_text())
            config |= PUBLISHED_FIELDS.get(name, {})
            (path / "config.json").write_text(json.dumps(config))
        return path

    return folder


@pytest.fixture
def convertible(folder_of, tmp_path):
    """Return a function that returns a checkpoint's folder with what converters read of words."""

    def copy(checkpoint):
        folder = tmp_path / "convertible"
        shutil.copytree(folder_of(checkpoint), folder)
        words = {
            f"<{i}>": i
            for i in range(json.loads((folder / "config.json").read_text())["vocab_size"])
        }
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"type": "BPE", "vocab": words}, "added_tokens": []})
        )
        return folder

    return copy
