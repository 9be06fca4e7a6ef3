"""A stand-in for a next release: transformers' Llama with other names for its arguments.

The source of the modeling file is rewritten and imported as a module of its own: the parameters of
all forwards, the variables of that name, and the keywords of calls among the modules.
"""

import ast
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.models.llama import modeling_llama

_numbers = itertools.count()
# Calls of the modules to each other, by the last name: all else belongs to other files.
_OWN_CALLS = {"model", "decoder_layer", "self_attn"}


class _Rename(ast.NodeTransformer):
    def __init__(self, names: dict[str, str], *, annotated: bool) -> None:
        self.names, self.annotated = names, annotated

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        # The wrapper around a rotary module's forward belongs to another file.
        return node if node.name.endswith("RotaryEmbedding") else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        # One would translate old names, the other miss the new ones in the documentation.
        gone = ("deprecate_kwarg", "auto_docstring")
        kept = [d for d in node.decorator_list if not ast.unparse(d).startswith(gone)]
        node.decorator_list = kept
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> Any:
        if node.arg in self.names:
            node.arg = self.names[node.arg]
            node.annotation = node.annotation if self.annotated else None
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        node = self.generic_visit(node)
        for keyword in node.keywords:
            if called in _OWN_CALLS and keyword.arg in self.names:
                keyword.arg = self.names[keyword.arg]
        return node


def renamed_llama(names: dict[str, str], folder: Path, *, annotated: bool = True) -> ModuleType:
    """Return transformers' modeling file of Llama with other names.

    Args:
        names: Old names to new ones.
        folder: Where its source is written, which is read when a model is patched.
        annotated: Whether renamed arguments keep their annotations.
    """
    tree = ast.parse(Path(modeling_llama.__file__).read_text(encoding="utf-8"))
    tree = _Rename(names, annotated=annotated).visit(tree)
    path = folder / f"modeling_next_{next(_numbers)}.py"
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    name = f"transformers.models.llama.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
