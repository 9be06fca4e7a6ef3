"""Test the code of docs/contributing.md as its reader does: by --plugin, and as a package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import run_in_new_process, run_in_this_process

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "tests" / "assets" / "tiny-llama")
PAGE = (ROOT / "docs" / "contributing.md").read_text()
FILES = dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, flags=re.DOTALL))
ENTRY_POINTS = re.search(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)[1]
BUILD = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "my-package"
version = "1.2"

[tool.setuptools]
packages = ["my_package"]

"""
SMALL = ["--lengths", "352", "--samples", "2", "--tasks", "rp_niah_single_2_ll"]
SLOW = [1.0] * 8 + [2.0] * 8  # the stretches of tiny-llama's 16 pairs, at factor 2


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Install the page's package, and return the variables with which processes find it."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    for name, text in FILES.items():
        (folder / "my_package" / name).write_text(text)
    (folder / "pyproject.toml").write_text(BUILD + ENTRY_POINTS)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site"]
    result = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return {"PYTHONPATH": str(folder / "site")}


def test_a_method_takes_twelve_lines():
    code = [line for line in FILES["my_method.py"].splitlines() if line.strip()]
    assert len(code) <= 12


@pytest.mark.usefixtures("own_registry")
def test_a_file_is_measured_and_measured_again_after_a_change(tmp_path):
    path = tmp_path / "my_method.py"
    path.write_text(FILES["my_method.py"])

    def compare():
        words = ["--method", "slow-half", "--factor", "2", *SMALL, "--profile", "quick"]
        options = [*words, "--plugin", path, "--out", tmp_path / "out", "--json"]
        result = run_in_this_process("compare", TINY, *options)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def scores(results):
        return {
            method["label"]: method["frequencies"]["all"]["inv_freq"]
            for method in results["methods"]
            if method["method"]
        }, results["retrieval"]

    first = compare()
    assert [method["label"] for method in first["methods"]] == ["none", "slow-half ×2"]
    again = compare()
    assert again["run"]["continued"]
    assert scores(again) == scores(first)
    path.write_text(FILES["my_method.py"].replace("/= self.factor", "/= 3 * self.factor"))
    changed = compare()
    assert scores(changed)[0] != scores(first)[0]
    assert scores(changed)[1] != scores(first)[1]


def test_an_installed_package_gives_the_method_and_the_engine(environment):
    words = ["--method", "slow-half", "--factor", "2", "--json"]
    listed = run_in_new_process("methods", "slow-half", **environment)
    assert "share (default: 0.5)" in listed.stdout
    exported = run_in_new_process("export", TINY, "--engine", "my-engine", *words, **environment)
    assert exported.returncode == 0, exported.stderr
    assert "the package my-package 1.2" in exported.stderr
    parameters = json.loads(exported.stdout)["config"]["rope_parameters"]
    assert parameters["long_factor"] == parameters["short_factor"] == pytest.approx(SLOW)
    unknown = run_in_new_process("export", TINY, "--engine", "my-engine", *words)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "unknown engine 'my-engine'" in unknown.stderr


def test_a_saved_folder_needs_no_package(environment, tmp_path):
    save = f"""
import rope_patch
model = rope_patch.load({TINY!r}, "slow-half", factor=2)
rope_patch.save(model, "saved")
print(rope_patch.current(model).frequencies[None].inv_freq.tolist())
"""
    load = """
import rope_patch
model = rope_patch.load("saved")
print(rope_patch.current(model).frequencies[None].inv_freq.tolist())
"""

    def run(code, **variables):
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        )

    saved, loaded = run(save, **environment), run(load)
    assert saved.stdout == loaded.stdout
    assert "of the package my-package 1.2 is not loaded here" in loaded.stderr
    sidecar = json.loads((tmp_path / "saved" / "rope_patch.json").read_text())
    assert sidecar["outside"]["package"] == "my-package"
    assert sidecar["native"]
