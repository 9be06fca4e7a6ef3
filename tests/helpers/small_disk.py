"""Mount small disks, for tests of full ones."""

import math
import subprocess

import pytest


@pytest.fixture
def disk(tmp_path):
    """Return `disk(megabytes)`, which mounts or resizes a small disk and returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def make(megabytes, read_only=False):
        nonlocal mounted
        options = f"size={math.ceil(1024 * megabytes)}k" + (",remount" if mounted else "")
        options += ",ro" if read_only else ",rw"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no mount command here")
        if result.returncode:
            pytest.skip(f"no disk can be mounted here: {result.stderr.strip()}")
        mounted = True
        return folder

    yield make
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)
