"""Test the code of docs/contributing.md as its reader does: by --plugin, and as a package."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers.commands import run_in_new_process, run_in_this_process

import rope_patch

tomllib = pytest.importorskip("tomllib", reason="a part of Python from 3.11 on")

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "tests" / "assets" / "tiny-llama")
PAGE = (ROOT / "docs" / "contributing.md").read_text()
FILES = dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, flags=re.DOTALL))
ENTRY_POINTS = re.search(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)[1]
SMALL = ["--lengths", "352", "--samples", "2", "--tasks", "rp_niah_single_2_ll"]
SLOW = [1.0] * 8 + [2.0] * 8  # the stretches of tiny-llama's 16 pairs, at factor 2


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Install the page's package, and return the variables with which processes find it."""
    site = tmp_path_factory.mktemp("site")
    (site / "my_package").mkdir()
    (site / "my_package" / "__init__.py").touch()
    for name, text in FILES.items():
        (site / "my_package" / name).write_text(text)
    information = site / "my_package-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.2\n")
    groups = tomllib.loads(ENTRY_POINTS)["project"]["entry-points"]
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines))
    return {"PYTHONPATH": str(site)}


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
    assert "unknown method 'slow-half'" in unknown.stderr


def test_a_saved_folder_needs_no_package(environment, tmp_path, caplog):
    folder = tmp_path / "saved"
    words = ["--method", "slow-half", "--factor", "2", "--to", folder]
    saved = run_in_new_process("patch", TINY, *words, **environment)
    assert saved.returncode == 0, saved.stderr
    handle = rope_patch.current(rope_patch.load(folder))
    stretched = rope_patch.frequencies("default", head_dim=32, theta=1e4, trained_length=256)
    expected = stretched.inv_freq / torch.tensor(SLOW, dtype=torch.float64)
    torch.testing.assert_close(handle.frequencies[None].inv_freq, expected, rtol=1e-12, atol=0)
    assert "my-package 1.2 is not loaded here" in caplog.text
    sidecar = json.loads((folder / "rope_patch.json").read_text())
    assert sidecar["outside"]["package"] == "my-package"
    assert sidecar["native"]
