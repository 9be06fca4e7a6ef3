"""Test that imports are light and free of circles; pyproject.toml has the layers."""

import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import grimp
import pytest
from helpers.changed import front_names

import rope_patch

PACKAGE = Path(rope_patch.__file__).parent
HEAVY = [
    *("lm_eval", "peft", "datasets", "matplotlib", "triton", "jinja2", "gguf", "wonderwords"),
    "optuna",
]

# Commands that answer at once: help, lists, versions and wrong options.
COMMANDS = ["methods", "diagnose", "eval", "compare", "report", "recommend", "search", "finetune"]
COMMANDS += ["export", "extend", "bench", "env", "tasks", "recipes"]
INSTANT = [
    *(["--help"], ["--version"], ["methods"], ["methods", "yarn"], ["methods", "--json"]),
    *([name, "--help"] for name in COMMANDS),
    *(["no-such-command"], ["eval", "--no-such-option"], ["eval"], ["search", "x", "--seed", "x"]),
    *(["eval", "x", "--method", "yarn", "--lengths", "many"], ["methods", "yran"]),
    *(["compare", "x", "--lengths", "many"], ["compare", "x", "--option", "x"]),
    *(["recipes"], ["recipes", "yarn_64k"]),
    *(["patchh"], ["compare", "x", "--lenght", "4"], ["compare", "x", "--method", "yran"]),
    *([name, "x", "--method", "yran"] for name in ("eval", "diagnose", "bench")),
    ["patch", "x", "--method", "yran", "--to", "y"],
    ["export", "x", "--engine", "vllm", "--method", "yran"],
    ["verify", "http://localhost:9", "--against", "x", "--method", "yran"],
    ["eval", "x", "--method", "yarn", "--tasks", "rp_niahh"],
    *(["tasks", "rp_niahh"], ["tasks", "rp_vt"], ["diagnose", "x", "--length", "4y"]),
]
ORDERS = [
    "import rope_patch.methods",
    "import rope_patch.methods.yarn",
    "from rope_patch.methods import list_methods",
    "from rope_patch.methods.registry import get_method",
    "import rope_patch; import rope_patch.methods",
]


def test_imports_have_no_circle():
    """Count imports inside functions, under TYPE_CHECKING, and those that fronts make by name."""
    graph = grimp.build_graph("rope_patch", exclude_type_checking_imports=False)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    for path in PACKAGE.rglob("__init__.py"):
        package = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        fronted = front_names(path.read_text(encoding="utf-8"))
        imports[package] |= {f"{package}.{module}" for module in fronted}
    assert "rope_patch.geometry" in imports["rope_patch.methods.base"]
    assert "rope_patch.patching.positions" in imports["rope_patch.patching"]
    TopologicalSorter(imports).prepare()  # raises for a circle, and names it


def test_import_loads_no_heavy_package():
    """Compare with transformers, which loads jinja2, and its own callbacks, which load more."""
    names = [name for name in rope_patch.__all__ if name != "RopePatchCallback"]
    code = f"""
import sys
def loaded():
    return {set(HEAVY)!r} & sys.modules.keys()
import transformers
theirs = loaded()
import rope_patch
for name in {names!r}:
    getattr(rope_patch, name)
print(*loaded() - theirs)
from transformers import TrainerCallback
theirs = loaded()
rope_patch.RopePatchCallback
print(*loaded() - theirs)
import matplotlib
print(*loaded() - theirs)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["", "", "matplotlib"]


def test_help_and_wrong_options_import_neither_torch_nor_transformers():
    code = f"""
import contextlib, io, sys
from rope_patch.cli import main
for words in {INSTANT!r}:
    sys.argv = ["rope-patch", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit:
            pass
    assert out.getvalue(), words
    heavy = {{"torch", "transformers", "numpy", "lm_eval"}} & sys.modules.keys()
    assert not heavy, (words, heavy)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tasks_are_listed_without_torch():
    """Rendering chat templates takes transformers, and no tensor."""
    code = """
import sys
import rope_patch.cli
assert "typer" not in sys.modules, "Ctrl-C is handled once this is imported"
sys.argv = ["rope-patch", "tasks"]
try:
    rope_patch.cli.main()
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "rp_niah" in result.stdout


def test_methods_is_the_package_after_any_import_order():
    code = f"""
import sys
for statement in {ORDERS!r}:
    exec(statement)
    import rope_patch
    from rope_patch import methods
    from rope_patch.methods.yarn import YaRN
    assert methods is rope_patch.methods is sys.modules["rope_patch.methods"]
    assert methods.registered_methods()["yarn"] is YaRN
    for name in [name for name in sys.modules if name.split(".")[0] == "rope_patch"]:
        del sys.modules[name]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_deprecated_names_warn_with_the_new_ones():
    with pytest.warns(DeprecationWarning, match=r"rope_patch\.list_methods"):
        assert rope_patch.methods() == rope_patch.list_methods()
    with pytest.warns(DeprecationWarning, match=r"rope_patch\.SearchResult"):
        assert rope_patch.Found is rope_patch.SearchResult
    for old, new in (
        ("register", "register_rope_types"),
        ("unregister", "unregister_rope_types"),
    ):
        with pytest.warns(DeprecationWarning, match=rf"rope_patch\.{new}"):
            assert getattr(rope_patch, old) is getattr(rope_patch, new)
    with pytest.warns(DeprecationWarning, match=r"rope_patch\.ops\.pack_frequencies"):
        assert rope_patch.ops.make_turns is rope_patch.ops.pack_frequencies


def test_public_names_exist():
    for name in rope_patch.__all__:
        assert getattr(rope_patch, name) is not None
        assert name in dir(rope_patch)
    assert not hasattr(rope_patch, "no_such_name")
    assert rope_patch.__version__ == metadata.version("rope-patch")
