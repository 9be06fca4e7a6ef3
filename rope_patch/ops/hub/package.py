"""Build the package for the hub: the kernels' modules, their metadata, a card and the licence.

The hub loads a package under a name of its own choice, and several versions of it in one process.
So imports become relative, and custom operators get a namespace of their own. Comments and layout
stay: a module's text is changed only where an import or an operator's name stands.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from rope_patch.utils.atomic_files import explain_write_errors, require_new_folder
from rope_patch.utils.errors import Refused
from rope_patch.utils.installation import own_version

NAME = "rope-patch"

# Version of the package's interface; another version lies in another branch of the hub.
INTERFACE_VERSION = 1

# A folder for each backend; the modules are the same.
BACKENDS = ("cpu", "cuda")

_ENTRY_POINT = "rope_patch.ops.hub.entry_point"


def build_package(folder: str | os.PathLike[str]) -> Path:
    """Write a package that the `kernels` library loads, and that needs no rope_patch.

    Args:
        folder: A new or empty folder: the root of a repository of the hub.

    Returns:
        The folder.

    Raises:
        Refused: The folder is not empty, or a module imports what the hub does not allow.
        NotWritten: The folder cannot be written.
    """
    folder = Path(folder)
    require_new_folder(folder, "the kernels' package")
    files = _make_files()
    with explain_write_errors(folder, "the kernels' package"):
        for path, text in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
    return folder


def _make_files() -> dict[PurePosixPath, str]:
    sources = collect_sources(_ENTRY_POINT)
    digest = hashlib.sha256(json.dumps([[str(p), t] for p, t in sources.items()]).encode())
    files = {PurePosixPath("README.md"): _make_card(), PurePosixPath("LICENSE"): _read_licence()}
    for backend in BACKENDS:
        folder = PurePosixPath("build", f"torch-{backend}")
        # Unique for these sources, because a process can hold several versions of the package.
        name = f"_{NAME.replace('-', '_')}_{backend}_{digest.hexdigest()[:8]}"
        for path, text in sources.items():
            is_module = path.suffix == ".py"
            files[folder / path] = make_standalone(path, text, name) if is_module else text
        files[folder / "metadata.json"] = _make_metadata(name, backend)
    return files


def _make_metadata(unique_name: str, backend: str) -> str:
    fields = {
        "name": NAME,
        "id": unique_name,
        "version": INTERFACE_VERSION,
        "license": "apache-2.0",
        "python-depends": [],  # besides torch and Triton, which come unlisted
        "backend": {"type": backend},
    }
    return json.dumps(fields, indent=2) + "\n"


def _make_card() -> str:
    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return text.replace("{{ version }}", own_version())


def _read_licence() -> str:
    checkout = Path(__file__).parents[3] / "LICENSE"
    if checkout.is_file():
        return checkout.read_text(encoding="utf-8")
    text = metadata.distribution("rope-patch").read_text("licenses/LICENSE")
    if text is None:
        raise FileNotFoundError("the licence of rope-patch is missing from its installation")
    return text


_ROOT = "rope_patch"
_FOLDER = Path(__file__).parents[2]

# What the hub allows besides a package's own modules.
_ALLOWED = frozenset(("torch", "triton")) | sys.stdlib_module_names


class _Edit(NamedTuple):
    """Replacement of a regular expression in the text of a node."""

    node: ast.AST
    pattern: str
    replacement: str


def collect_sources(entry_point: str) -> dict[PurePosixPath, str]:
    """Return the texts of a module, which becomes the package itself, and of all that it imports.

    Args:
        entry_point: The full name of the module.

    Returns:
        Texts by their paths in the package, with absolute imports of rope_patch still in them; so
        do tables beside modules, under their names.

    Raises:
        Refused: A module imports what the hub does not allow.
    """
    texts = {PurePosixPath("__init__.py"): _path(entry_point).read_text(encoding="utf-8")}
    waiting = [PurePosixPath("__init__.py")]
    while waiting:
        path = waiting.pop()
        for name in _imported_modules(path, texts[path]):
            source = _path(name)
            target = PurePosixPath(source.relative_to(_FOLDER).as_posix())
            if target not in texts:
                texts[target] = source.read_text(encoding="utf-8")
                waiting.append(target)
                table = source.with_suffix(".json")  # what a module reads bears its name
                if table.is_file():
                    texts[target.with_suffix(".json")] = table.read_text(encoding="utf-8")
    return dict(sorted(texts.items()))


def make_standalone(path: PurePosixPath, text: str, namespace: str) -> str:
    """Return a module's text with relative imports and operators in a namespace of their own.

    Args:
        path: Where the module lies in the package.
        text: Its text.
        namespace: The namespace of the package's custom operators.
    """
    content = text.encode()
    edits = sorted(_edits(path, ast.parse(text), namespace), key=lambda edit: _position(edit.node))
    # From the end to the start, so that positions before an edit stay true.
    for node, pattern, replacement in reversed(edits):
        start, end = _offsets(text, node)
        old = content[start:end].decode()
        new, count = re.subn(pattern, replacement, old)
        if count != 1:
            raise Refused(f"{path}, line {_position(node)[0]}: cannot rewrite {old!r}")
        content = content[:start] + new.encode() + content[end:]
    return content.decode()


def _path(name: str) -> Path:
    folder = _FOLDER.joinpath(*name.split(".")[1:])
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _is_module(name: str) -> bool:
    return _path(name).is_file()


# -- imports ---------------------------------------------------------------------------------------


def _imported_modules(path: PurePosixPath, text: str) -> Iterator[str]:
    """Yield the modules of rope_patch that a module imports, and the packages they are in."""
    for node in ast.walk(ast.parse(text)):
        for name in _names_of(path, node):
            yield name
            parts = name.split(".")
            yield from (".".join(parts[:n]) for n in range(2, len(parts)))


def _names_of(path: PurePosixPath, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            _require_allowed(path, node, alias.name)
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            raise Refused(f"{path}, line {node.lineno}: relative imports are not followed")
        module = node.module or ""
        if not _is_ours(module):
            _require_allowed(path, node, module)
            return
        submodules = [f"{module}.{a.name}" for a in node.names if _is_module(f"{module}.{a.name}")]
        yield from submodules
        if len(submodules) < len(node.names):
            if module == _ROOT:
                raise Refused(
                    f"{path}, line {node.lineno}: imports a name of rope_patch itself; import it "
                    "from the module that defines it"
                )
            yield module
    elif prefix := _dynamic_prefix(node):
        folder = _path(prefix).parent
        yield from (f"{prefix}.{file.stem}" for file in folder.glob("*.py") if file.stem[0] != "_")


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == _ROOT


def _require_allowed(path: PurePosixPath, node: ast.AST, module: str) -> None:
    if module.split(".")[0] not in _ALLOWED:
        line = _position(node)[0]
        raise Refused(
            f"{path}, line {line}: imports {module}; a package of the hub imports torch, triton, "
            "the standard library and names from its own modules"
        )


def _dynamic_prefix(node: ast.AST) -> str | None:
    """Return the package of `importlib.import_module(f"package.{name}")`, if it is ours."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "importlib.import_module":
        return None
    first = node.args[0]
    if isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
        prefix = str(first.values[0].value)
        if _is_ours(prefix) and prefix.endswith(".") and len(first.values) == 2:
            return prefix[:-1]
    return None


def _relative_name(path: PurePosixPath, module: str) -> str:
    """Return `module` as a module at `path` must name it in `from ... import`."""
    here, there = path.parent.parts, tuple(module.split(".")[1:])
    common = 0
    while common < min(len(here), len(there)) and here[common] == there[common]:
        common += 1
    return "." * (len(here) - common + 1) + ".".join(there[common:])


# -- edits -----------------------------------------------------------------------------------------


def _edits(path: PurePosixPath, tree: ast.Module, namespace: str) -> Iterator[_Edit]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            name = _relative_name(path, node.module or "")
            yield _Edit(node, rf"\Afrom\s+{re.escape(node.module or '')}\b", f"from {name}")
        elif prefix := _dynamic_prefix(node):
            assert isinstance(node, ast.Call)
            name = _relative_name(path, prefix)
            name = name if name.endswith(".") else f"{name}."
            pattern = rf"(?s)\A(f.){re.escape(prefix)}\.(.*)\Z"
            yield _Edit(node.args[0], pattern, rf"\g<1>{name}\g<2>, package=__package__")
        elif isinstance(node, ast.Constant) and str(node.value).startswith(f"{_ROOT}::"):
            yield _Edit(node, f"{_ROOT}::", f"{namespace}::")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"torch.ops.{_ROOT}":
            yield _Edit(node, rf"{_ROOT}\Z", namespace)


def _position(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _offsets(text: str, node: Any) -> tuple[int, int]:
    """Return the bytes at which a node starts and ends."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return (
        starts[node.lineno - 1] + node.col_offset,
        starts[node.end_lineno - 1] + node.end_col_offset,
    )
