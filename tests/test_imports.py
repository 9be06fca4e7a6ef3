"""The package imports light, and its modules only what lies below them."""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import rope_patch
import rope_patch.eval

PACKAGE = Path(rope_patch.__file__).parent
HEAVY = [
    *("lm_eval", "peft", "datasets", "matplotlib", "triton", "jinja2", "gguf", "wonderwords"),
    "optuna",
]

# Help, lists, versions and wrong options, which take no seconds.
COMMANDS = ["methods", "diagnose", "eval", "compare", "report", "recommend", "search", "finetune"]
COMMANDS += ["export", "bench", "env", "tasks", "recipes"]
INSTANT = [
    *(["--help"], ["--version"], ["methods"], ["methods", "yarn"], ["methods", "--json"]),
    *([name, "--help"] for name in COMMANDS),
    *(["no-such-command"], ["eval", "--no-such-option"], ["eval"], ["search", "x", "--seed", "x"]),
    *(["eval", "x", "--method", "yarn", "--lengths", "many"], ["methods", "yran"]),
    *(["compare", "x", "--lengths", "many"], ["compare", "x", "--option", "x"]),
]
ORDERS = [
    "import rope_patch.methods",
    "import rope_patch.methods.yarn",
    "from rope_patch.methods import methods",
    "from rope_patch.methods.registry import get",
    "import rope_patch; import rope_patch.methods",
]

# What each part of the package may import of it; whatever is not named here stands on top.
CORE = {"geometry", "reading", "methods", "ops", "cache", "patching"}
BELOW = {
    "geometry": set(),
    "reading": {"geometry"},
    "methods": {"geometry"},
    "ops": set(),
    "cache": set(),
    "patching": CORE - {"patching"},
    "versions": set(),
    "progress": set(),
    "reason": set(),
    "disk": {"reason"},
    "device_map": set(),
    "drawing": set(),
    "registering": {"geometry", "methods", "reading"},
    "saving": CORE | {"versions", "registering"},
    "agreeing": CORE | {"saving"},
    "adapting": CORE | {"saving", "agreeing"},
    # The demo is made with what loads models, which it imports when it is made.
    "loading": CORE | {"saving", "registering", "agreeing", "adapting", "demo", "device_map"},
    "exporting": CORE | {"loading"},
    "diagnosing": CORE | {"adapting", "agreeing", "loading", "saving", "registering", "drawing"},
    # Whoever searches must measure, so the search stands above the evaluation.
    "searching": CORE
    | {"versions", "progress", "demo", "drawing", "saving", "loading", "exporting"}
    | {"diagnosing", "eval", "device_map"},
    "recommending": CORE | {"progress", "exporting", "searching", "eval"},
}
ON_TOP = {  # and who imports it
    "eval": {"searching", "recommending", "cli"},
    "recipes": {"cli"},
    "cli": {"__main__"},
}


def modules():
    """Every module of `rope_patch/` proper, by dotted name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def imports(path):
    """Dotted names of all that a file imports from this package, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "rope_patch")


def part(name):
    """The file or folder right under `rope_patch/` that a dotted name lies in."""
    return name.split(".")[1] if "." in name else ""


MODULES = dict(modules())


def test_the_modules_are_found():
    assert {part(name) for name in MODULES} >= BELOW.keys()
    assert "rope_patch.geometry.Geometry" in set(imports(MODULES["rope_patch.methods.base"]))
    assert "rope_patch.patching.check" in set(imports(MODULES["rope_patch.loading"]))


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) in BELOW])
def test_imports_point_down(name):
    own = part(name)
    reached = {part(imported) for imported in imports(MODULES[name])}
    assert reached <= BELOW[own] | {own, "reason", "disk"}  # errors, which all may raise


@pytest.mark.parametrize("name", MODULES)
def test_only_the_command_line_imports_what_is_on_top(name):
    for imported in {part(imported) for imported in imports(MODULES[name])} & ON_TOP.keys():
        assert part(name) in ON_TOP[imported] | {imported}


def test_the_evaluation_knows_nothing_of_the_search():
    for path in Path(rope_patch.eval.__path__[0]).rglob("*.py"):
        assert not {part(imported) for imported in imports(path)} & {"searching", "recommending"}


def loaded_by(statement):
    """Which heavy packages a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*({set(HEAVY)} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_stays_light():
    assert loaded_by("import json, ast, jinja2") == {"jinja2"}
    # transformers itself loads jinja2, for chat templates, and newer ones may load more.
    everything = "import rope_patch; [getattr(rope_patch, name) for name in rope_patch.__all__]"
    assert loaded_by(everything) <= loaded_by("import transformers")


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


def test_methods_is_a_function_in_every_order_of_imports():
    code = f"""
import sys
for statement in {ORDERS!r}:
    exec(statement)
    import rope_patch
    assert "yarn" in rope_patch.methods(), statement
    from rope_patch import methods
    from rope_patch.methods.yarn import YaRN
    assert methods is rope_patch.methods
    assert sys.modules["rope_patch.methods"].registered()["yarn"] is YaRN
    for name in [name for name in sys.modules if name.split(".")[0] == "rope_patch"]:
        del sys.modules[name]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in rope_patch.__all__:
        assert getattr(rope_patch, name) is not None
        assert name in dir(rope_patch)
    assert not hasattr(rope_patch, "no_such_name")
    assert rope_patch.__version__ == metadata.version("rope-patch")
