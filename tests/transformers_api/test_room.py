"""Test that what the package leans on in transformers is asked in one folder."""

import ast
import pkgutil
from pathlib import Path

import transformers

import rope_patch

PACKAGE = Path(rope_patch.__file__).parent
ROOM = PACKAGE / "transformers_api"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if ROOM not in path.parents]
# Beside names of transformers' top level: its loggers, which it documents as public.
PUBLIC = {("transformers.utils", "logging")}
SUBMODULES = {info.name for info in pkgutil.iter_modules(transformers.__path__)}
# What is spelled there alone.
NAMES = (
    *("past_key_values", "ROPE_INIT_FUNCTIONS", "ALL_ATTENTION_FUNCTIONS", "_attn_implementation"),
    *("_get_candidate_generator", "init_continuous_batching", "_prepare_cache_for_generation"),
    "_update_model_kwargs_for_generation",
)


def private_imports(tree):
    """Yield the imports of transformers' submodules, as they are written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
            yield from (
                ast.unparse(node) for a in node.names if (node.module, a.name) not in PUBLIC
            )
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("transformers."):
                    yield ast.unparse(node)
        if (
            isinstance(node, ast.Attribute)
            and getattr(node.value, "id", None) == "transformers"
            and node.attr in SUBMODULES
        ):
            yield ast.unparse(node)


def names_used(tree):
    """Return the names, attributes and strings of code, docstrings left out."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        ):
            yield node.value


def test_only_the_room_leans_on_internals():
    offences = {}
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if uses := [*private_imports(tree), *set(names_used(tree)) & set(NAMES)]:
            offences[str(path.relative_to(PACKAGE))] = uses
    assert not offences


def test_the_search_sees_what_it_looks_for():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOM.glob("*.py")]
    assert any(list(private_imports(tree)) for tree in trees)
    assert set(NAMES) <= {name for tree in trees for name in names_used(tree)}
