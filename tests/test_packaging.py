"""Wheel and sdist have everything that the commands need, and nothing else."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes

import pytest
from helpers.packages import ROOT, build, copy, files

TINY = str(ROOT / "tests" / "assets" / "tiny-llama")
CODE = ("rope_patch/", "eval/", "recipes/")
NOT_NEEDED = ("eval/results/", "recipes/experiments/")
BESIDE = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
WRITTEN = re.compile(r"PKG-INFO|setup\.cfg|rope_patch\.egg-info/.*")  # by the build itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy with a stale build/, its wheel, its sdist, and the wheel of that."""
    folder = tmp_path_factory.mktemp("packages")
    copy(folder / "source")
    stale = folder / "source" / "build" / "lib" / "rope_patch"
    stale.mkdir(parents=True)
    (stale / "stale.py").touch()
    build(folder / "source", folder / "direct", "--wheel")
    build(folder / "source", folder / "dist")
    return folder


def needed():
    """Return what the package needs of the checkout: its code and data."""
    return {p for p in files() if p.startswith(CODE) and not p.startswith(NOT_NEEDED)}


def wheel(folder):
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.parametrize("built", ["direct", "dist"])
def test_a_wheel_has_every_file_of_the_package(folder, built):
    with wheel(folder / built) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {re.sub("^(eval|recipes)/", r"rope_patch/\1/", path) for path in needed()}


def test_a_source_distribution_has_what_the_wheel_is_built_from(folder):
    (path,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        paths = [member.name.partition("/")[2] for member in archive if member.isfile()]
    assert {path for path in paths if not WRITTEN.fullmatch(path)} == needed() | BESIDE


def test_a_build_leaves_no_build_folder(folder):
    left = [path.name for path in (folder / "source" / "build").rglob("*") if path.is_file()]
    assert left == ["stale.py"]


def test_the_index_shows_the_readme_without_dead_links(folder):
    with wheel(folder / "direct") as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        page = message_from_bytes(archive.read(name)).get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert links
    assert all(link.startswith("https://") for link in links)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    words = re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", readme))  # the words of links stay
    assert len(re.findall(r"\w+", page)) > 0.9 * len(words)


def test_eval_works_from_a_wheel(folder, tmp_path):
    installed = tmp_path / "installed"
    with wheel(folder / "dist") as archive:
        archive.extractall(installed)
    empty = tmp_path / "empty"
    empty.mkdir()
    code = "import rope_patch; print(rope_patch.__file__); import rope_patch.cli as c; c.main()"
    words = ["--method", "none", "--lengths", "512", "--depths", "50", "--out", "out"]
    done = subprocess.run(
        [sys.executable, "-c", code, "eval", TINY, *words],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(installed / "rope_patch" / "__init__.py")
    assert (empty / "out" / "report.html").is_file()
