"""Test that wheel and sdist have every file that the commands need, and no other."""

import re
import tarfile
import zipfile
from email import message_from_bytes

import pytest
from helpers.packages import ROOT, build, copy, files

CODE = ("rope_patch/", "eval/", "recipes/")
NOT_NEEDED = ("eval/results/", "recipes/experiments/")
BESIDE = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|rope_patch\.egg-info/.*")  # by the build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a copy with a stale build/; build its wheel, its sdist, and a wheel from the sdist."""
    folder = tmp_path_factory.mktemp("packages")
    copy(folder / "source")
    stale = folder / "source" / "build" / "lib" / "rope_patch"
    stale.mkdir(parents=True)
    (stale / "stale.py").touch()
    build(folder / "source", folder / "direct", "--wheel")
    build(folder / "source", folder / "dist")
    return folder


def package_files():
    """Return the checkout's files that belong into the package: code and data."""
    return {p for p in files() if p.startswith(CODE) and not p.startswith(NOT_NEEDED)}


def wheel(folder):
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.parametrize("source", ["direct", "dist"])
def test_wheel_has_every_file_of_the_package(folder, source):
    with wheel(folder / source) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {re.sub("^(eval|recipes)/", r"rope_patch/\1/", path) for path in package_files()}
    assert names == expected


def test_sdist_has_every_file_the_wheel_is_built_from(folder):
    (path,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        paths = [member.name.partition("/")[2] for member in archive if member.isfile()]
    assert {path for path in paths if not GENERATED.fullmatch(path)} == package_files() | BESIDE


def test_build_leaves_no_build_folder(folder):
    remaining = [path.name for path in (folder / "source" / "build").rglob("*") if path.is_file()]
    assert remaining == ["stale.py"]


def test_package_page_shows_the_readme_without_dead_links(folder):
    with wheel(folder / "direct") as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        page = message_from_bytes(archive.read(name)).get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert links
    assert all(link.startswith("https://") for link in links)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    words = re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", readme))  # keeps the links' words
    assert len(re.findall(r"\w+", page)) > 0.9 * len(words)
