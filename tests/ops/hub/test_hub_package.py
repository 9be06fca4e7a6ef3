"""Test the kernels' package for the hub: it works alone, and beside rope_patch."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath
from unittest import mock

import pytest
import torch
from standalone_kernels import SHAPES, load
from torch._subclasses import FakeTensorMode

from rope_patch import Refused, ops
from rope_patch.ops.hub.package import collect_sources, make_standalone

SCRIPT = Path(__file__).with_name("standalone_kernels.py")


BACKENDS = ("cpu", "cuda")


def build_package(folder):
    """Run the command in this process."""
    with mock.patch.object(sys, "argv", ["hub", str(folder)]):
        runpy.run_module("rope_patch.ops.hub", run_name="__main__")
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return build_package(tmp_path_factory.mktemp("hub") / "package")


def modules(package):
    return sorted(package.glob("build/*/**/*.py"))


# -- the folder ------------------------------------------------------------------------------------


def test_has_what_the_library_reads(package):
    assert {p.name for p in (package / "build").iterdir()} == {f"torch-{b}" for b in BACKENDS}
    assert "Apache License" in (package / "LICENSE").read_text(encoding="utf-8")
    assert (
        (package / "README.md").read_text(encoding="utf-8").startswith("---\nlicense: apache-2.0\n")
    )
    for backend in BACKENDS:
        fields = json.loads((package / "build" / f"torch-{backend}" / "metadata.json").read_text())
        assert fields["backend"] == {"type": backend}
        assert re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", fields["name"])
        assert fields["id"].isidentifier()


def test_imports_nothing_but_torch_triton_and_the_standard_library(package):
    roots = set()
    for path in modules(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots.add(node.module.split(".")[0])
    assert {"torch", "triton"} <= roots
    assert roots - {"torch", "triton"} <= sys.stdlib_module_names


def test_is_the_same_every_time(package, tmp_path):
    again = build_package(tmp_path)
    for path in filter(Path.is_file, again.rglob("*")):
        assert path.read_bytes() == (package / path.relative_to(again)).read_bytes()


def test_command_refuses_a_folder_with_files(tmp_path, capsys):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(SystemExit) as exit:
        build_package(tmp_path)
    assert exit.value.code == 1
    assert capsys.readouterr().err.startswith(f"Error: {tmp_path} is not empty")
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


# -- results ---------------------------------------------------------------------------------------


# rope_patch's own kernels are tested in all shapes.
QUICK = ["halves", "partial-neighbours", "one-tensor"]


@pytest.fixture(scope="module")
def run_alone(package):
    """Return a function that returns the errors of shapes.

    They are of a process that has the package of a GPU and no rope_patch.
    """

    @cache
    def run(*shapes):
        command = [sys.executable, str(SCRIPT), str(package / "build" / "torch-cuda"), *shapes]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


@pytest.mark.parametrize("kernels", ["triton", "auto"])
@pytest.mark.parametrize(
    "shape", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in SHAPES]
)
def test_agrees_with_float64(run_alone, shape, kernels):
    shapes = [x for x in SHAPES if (x in QUICK) == (shape in QUICK)]
    found = run_alone(*shapes)[f"{shape} {kernels}"]
    norms = set() if shape == "one-tensor" else {"norm-each", "norm-together"}
    assert found.keys() == {"rope", *norms}
    assert max(error for case in found.values() for error in case.values()) < 1e-6


def test_compiled_graphs_agree_with_float64(run_alone):
    errors = run_alone(*(x for x in SHAPES if x in QUICK))
    assert max(errors["compiled triton"]["rope"].values()) < 1e-6


def test_two_versions_and_rope_patch_share_a_process(package):
    pytest.importorskip("triton")
    loaded = [load(package / "build" / f"torch-{backend}") for backend in BACKENDS]
    q = torch.randn(1, 3, 2, 8)
    for module in [ops, *loaded]:
        assert module.triton_unavailable_reason() is None  # imports the kernels
        packed = module.pack_frequencies(torch.ones(4))
        assert torch.equal(module.rope(q, None, torch.arange(3), packed)[0], rotated(q))
    for namespace in ["rope_patch", *(module.__name__ for module in loaded)]:
        with FakeTensorMode():
            x, packed = torch.empty(1, 3, 2, 8), torch.empty(5, dtype=torch.int64)
            settings = (None, False, 2, False)
            op = getattr(torch.ops, namespace).rope
            assert op(x, None, torch.arange(3), packed, *settings)[0].shape == x.shape


def rotated(q):
    return ops.rope(q, None, torch.arange(3), ops.pack_frequencies(torch.ones(4)))[0]


# -- rewriting -------------------------------------------------------------------------------------


def test_rewrites_names_and_nothing_else():
    text = '''"""Angles – see `rope_patch.ops.rope`."""
from rope_patch.ops.kernels.tile import (
    rotate,  # ü
)
from rope_patch.ops.angles import cos_sin; from rope_patch.utils import errors  # both

name = "é"; module = importlib.import_module(f"rope_patch.ops.kernels.{name}")
@torch.library.custom_op("rope_patch::rope", mutates_args=())
def rope(q):
    return [torch.ops.rope_patch.rope(q), logging.getLogger("rope_patch")]
'''
    expected = '''"""Angles – see `rope_patch.ops.rope`."""
from .tile import (
    rotate,  # ü
)
from ..angles import cos_sin; from ...utils import errors  # both

name = "é"; module = importlib.import_module(f".{name}", package=__package__)
@torch.library.custom_op("_unique::rope", mutates_args=())
def rope(q):
    return [torch.ops._unique.rope(q), logging.getLogger("rope_patch")]
'''
    path = PurePosixPath("ops/kernels/module.py")
    assert make_standalone(path, text, namespace="_unique") == expected


def test_refuses_modules_that_need_more():
    with pytest.raises(Refused, match=r"line \d+: imports (transformers|packaging)"):
        collect_sources("rope_patch.patching.plan")
