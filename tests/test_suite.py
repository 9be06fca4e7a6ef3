"""Test what the tests lean on: public names and fronts of rooms, and few internal modules.

An internal module that tests import cannot be renamed or split without them. `rope_patch` and its
packages of one level (`rope_patch.evaluation`), the fronts, stand for what others may lean on.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from helpers.changed import front_names

from rope_patch.utils.lazy_exports import export_lazily

ROOT = Path(__file__).parents[1]
# Lower it with the number; the few that stay are kernels, statistics and formulas.
MOST_INTERNAL_MODULES = 60


def imported_names(path):
    """Return what a file imports of rope_patch, wherever in it, with dots."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def internal_module(name):
    """Return the module that an imported name is, or stands in; None if it is a front, or foreign.

    Nothing is imported: files tell modules from other names.
    """
    parts = name.split(".")
    if parts[0] != "rope_patch":
        return None
    while len(parts) > 1:
        path = ROOT.joinpath(*parts)
        if path.with_suffix(".py").is_file():
            return ".".join(parts)
        if (path / "__init__.py").is_file():
            return ".".join(parts) if len(parts) > 2 else None
        parts.pop()
    return None


def internal_modules():
    """Return the internal modules that tests import, with the files that do.

    Files in tests/regressions name modules to change them, which is no import.
    """
    found = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "regressions" not in path.parts:
            for module in filter(None, map(internal_module, imported_names(path))):
                found[module].add(path.relative_to(ROOT).as_posix())
    return found


def test_tests_import_few_internal_modules():
    modules = internal_modules()
    most = sorted(modules.items(), key=lambda pair: (-len(pair[1]), pair[0]))[:20]
    listed = "\n".join(f"{module}: {len(files)} files" for module, files in most)
    assert len(modules) <= MOST_INTERNAL_MODULES, (
        f"tests import {len(modules)} internal modules: expected at most {MOST_INTERNAL_MODULES}. "
        "Test by public names, or give a name on its room's front "
        "(rope_patch/utils/lazy_exports.py). "
        f"Imported most:\n{listed}"
    )


def test_fronts_and_public_names_are_not_internal():
    for name in (
        "rope_patch.patch",
        "rope_patch.evaluation",
        "rope_patch.patching.restore",
        "torch",
    ):
        assert internal_module(name) is None, name
    for name in ("rope_patch.geometry", "rope_patch.geometry.Geometry"):
        assert internal_module(name) == "rope_patch.geometry"
    for name in ("rope_patch.serving.vllm", "rope_patch.serving.vllm.no_such_name"):
        assert internal_module(name) == "rope_patch.serving.vllm"


def defined_names(path):
    """Return the names that a module defines or imports at its top, and those of its front."""
    source = path.read_text(encoding="utf-8")
    names = {name for words in front_names(source).values() for name in words}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            each = (name for target in node.targets for name in ast.walk(target))
            names.update(name.id for name in each if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names.update(each.asname or each.name for each in node.names)
    return names


def test_fronts_give_what_their_modules_define():
    """Read the source, because some modules import what is not installed here."""
    fronts = 0
    for init in (ROOT / "rope_patch").rglob("__init__.py"):
        table = front_names(init.read_text(encoding="utf-8"))
        fronts += bool(table)
        for module, words in table.items():
            path = init.parent.joinpath(*module.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert set(words) <= defined_names(path), path
            for word in words:  # else importing the submodule would replace the name
                assert not (init.parent / word).exists(), word
                assert not (init.parent / f"{word}.py").exists(), word
    assert fronts > 15


def test_a_front_gives_a_name_once(monkeypatch):
    room = ModuleType("room")
    monkeypatch.setitem(sys.modules, "room", room)
    room.__all__, room.own = ["own"], 1
    for names in ({"a": "x", "b": "x"}, {"a": "own"}):
        with pytest.raises(ValueError, match="expected one"):
            export_lazily("room", names)
    export_lazily("room", {"a": "x"})
    assert room.__all__ == ["own", "x"]
    assert {"own", "x"} <= set(dir(room))
    with pytest.raises(AttributeError, match="no_such"):
        _ = room.no_such


# What a new release is not tried with as a whole, because it takes long: rooms above the patch,
# whose main files are in EXTRAS, kernels (`make test-triton`), and what needs no transformers.
NOT_IN_GROUPS = {
    *("benchmarks", "cli", "distributed", "engines", "evaluation", "experiments"),
    *("exporting", "extending", "gpu", "lab", "machine_code", "ops", "pictures", "recommending"),
    *("runs", "searching", "served", "statistics", "tasks", "training", "utils"),
    *("verifying", "installed", "oldest"),
    *("assets", "behaviour", "compatibility", "helpers", "regressions"),
}


def test_each_folder_of_tests_is_tried_on_a_new_release_or_said_not_to_be():
    """A folder that moved out of a group left 2,400 cases unrun on the newest release."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^GROUPS := \$\(addprefix tests/,(.*)\)$", makefile, re.MULTILINE)
    folders = {
        each.name
        for each in (ROOT / "tests").iterdir()
        if each.is_dir() and each.name[0] not in "._"
    }
    assert set(line.split()) | NOT_IN_GROUPS == folders
    assert not set(line.split()) & NOT_IN_GROUPS
