"""The wheel carries everything that the commands need."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "tests" / "assets" / "tiny-llama")


@pytest.mark.slow
def test_eval_works_from_a_wheel(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        names = archive.namelist()
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {"rope_patch/recipes/configs/yarn_64k.yaml", "rope_patch/recipes/README.md"} <= {*names}
    evaluation, left_out = ROOT / "eval", {"results", "README.md", "__pycache__"}
    found = [p.relative_to(evaluation) for p in evaluation.rglob("*") if p.is_file()]
    needed = {p.as_posix() for p in found if not left_out & {p.parts[0], p.parent.name}}
    assert {f"rope_patch/eval/{name}" for name in needed} <= {*names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rope_patch"}
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from rope_patch.cli import main; main()", "eval", TINY),
            *("--method", "none", "--lengths", "512", "--depths", "50", "--out", "out"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").is_file()
