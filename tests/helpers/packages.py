"""Build wheels and sdists in a copy of this checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files():
    """Return every file of the checkout that git does not ignore, relative to its root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in output.split("\0") if path and (ROOT / path).is_file()]


def copy(folder):
    """Copy the checkout's files, without the leftovers of earlier builds."""
    for path in files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)


def build(source, out, *kinds):
    """Build packages into `out`, offline.

    Without `kinds`: an sdist, and a wheel from it.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *kinds]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
