"""Read what vLLM's source defines, without running it: an installed one, or an unpacked folder."""

import ast
import functools
import importlib.util
import os
import re
from pathlib import Path

import pytest


def find_tree():
    """Return the tree that VLLM_SOURCE names, or the installed vLLM's; skip without either.

    VLLM_SOURCE is a folder of vLLM's Python files, such as an unpacked wheel.
    """
    named = os.environ.get("VLLM_SOURCE")
    if named:
        folder = Path(named)
        return SourceTree(folder / "vllm" if (folder / "vllm").is_dir() else folder)
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("no vLLM here: install it, or name a folder of its source in VLLM_SOURCE")
    return SourceTree(Path(found.origin).parent)


class SourceTree:
    """The modules below a folder that is the package `vllm`."""

    def __init__(self, folder):
        self.folder = folder
        self.module = functools.cache(self._module)

    @property
    def release(self):
        """Return the release's first two numbers, from the metadata beside the package."""
        for info in self.folder.parent.glob("vllm*.dist-info"):
            return tuple(int(number) for number in re.findall(r"\d+", info.name)[:2])
        raise AssertionError(f"no vllm*.dist-info beside {self.folder}: unpack it with the source")

    def _module(self, name):
        base = self.folder.joinpath(*name.split(".")[1:])
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        return ast.parse(path.read_text())

    def find(self, module, *names):
        """Return the definition that a module has, or imports, under nested names."""
        body = self.module(module).body
        node = _definition(body, names[0])
        if isinstance(node, ast.ImportFrom):
            parent = module.split(".") if node.level else []
            is_package = self.folder.joinpath(*module.split(".")[1:]).is_dir()
            parent = parent[: len(parent) - node.level + is_package] if node.level else parent
            target = ".".join([*parent, *([node.module] if node.module else [])])
            return self.find(target, *names)
        for name in names[1:]:
            assert node is not None, f"{module} has no {names}"
            node = _definition(node.body, name)
        assert node is not None, f"{module} has no {'.'.join(names)}"
        return node

    def parameters(self, module, *names):
        """Return the names of a function's parameters, without self."""
        arguments = self.find(module, *names).args
        named = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        return [*named[named[:1] == ["self"] :], *(each.arg for each in arguments.kwonlyargs)]

    def attributes(self, module, owner):
        """Return what instances of a class have: fields, methods, and what methods set on self."""
        body = self.find(module, owner)
        found = set()
        for node in body.body:
            if isinstance(node, ast.AnnAssign):
                found.add(node.target.id)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
        for node in ast.walk(body):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            found |= {
                each.attr
                for each in targets
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
            }
        return found

    def names_read(self, module, *names):
        """Return every name and attribute that a function's body reads."""
        return {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(self.find(module, *names))
            if isinstance(node, ast.Attribute | ast.Name)
        }

    def calls(self, name):
        """Return where a method of a name is called, and by which keywords."""
        found = {}
        for path in sorted(self.folder.rglob("*.py")):
            text = path.read_text(errors="replace")
            if f".{name}(" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == name
                ):
                    place = f"{path.relative_to(self.folder)}:{node.lineno}"
                    found[place] = [each.arg for each in node.keywords]
        return found

    def compared_strings(self, module, *names):
        """Return the texts that a function compares something with."""
        return {
            leaf.value
            for node in ast.walk(self.find(module, *names))
            if isinstance(node, ast.Compare)
            for side in (node.left, *node.comparators)
            for leaf in ast.walk(side)
            if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
        }


def _definition(body, name):
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [each.name for each in node.names]:
            return node
    return None
