"""Checkpoints for the tests of exports, each written once."""

import pytest
from tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Return a function that returns a checkpoint's folder."""
    parent = tmp_path_factory.mktemp("checkpoints")

    def folder(name):
        if not (parent / name).exists():
            write_checkpoint(name, parent / name)
        return parent / name

    return folder
