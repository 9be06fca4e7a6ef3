"""Write rope_patch/exporting/engine_fields.json: what engines' model files read of a rotation.

`python docs/generate/engine_fields.py vllm=FOLDER sglang=FOLDER mlx=FOLDER mlx-vlm=FOLDER`, each
the folder that holds the engine's unpacked wheel (`pip download --no-deps`). Engines are not
imported: their files are parsed, and the arguments of each call that builds a rotation are traced
back to the config through assignments, attributes, constructors and functions. An argument that
cannot be traced counts as one that does not come from the config.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

PAGE = Path(__file__).parents[2] / "rope_patch" / "exporting" / "engine_fields.json"

_FIELDS = ("rope_scaling", "rope_parameters")
# What remains of a scaling after these keys is no scaling.
_OTHER_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


@dataclass(frozen=True)
class Engine:
    """Where an engine's model files are, and what builds rotations there.

    Attributes:
        distribution: Name of its wheel.
        packages: Packages of the model files; other modules are not entered.
        builders: Functions that build a rotation, with the places of the arguments for the scaling
            and for theta; None for an argument that they do not have.
        theta_names: Attributes of a config that hold the theta which the export writes.
        runs_transformers: Whether an architecture without a model file runs in transformers' model.
        heirs_of: A class; what inherits it builds a rotation, too, by the same arguments.
    """

    distribution: str
    packages: tuple[str, ...]
    builders: dict[str, tuple[int | None, int | None]]
    theta_names: tuple[str, ...] = ()
    runs_transformers: bool = False
    heirs_of: str | None = None


ENGINES = {
    "vllm": Engine(
        "vllm",
        ("vllm.model_executor.models", "vllm.models"),
        {"get_rope": (3, None)},
        runs_transformers=True,
    ),
    "sglang": Engine(
        "sglang",
        ("sglang.srt.models",),
        dict.fromkeys(("get_rope", "get_rope_wrapper", "get_rope_cpu"), (5, 3)),
        runs_transformers=True,
    ),
    "mlx": Engine(
        "mlx_lm",
        ("mlx_lm.models",),
        {"initialize_rope": (3, 1), "RoPE": (None, 2)},
        ("rope_theta",),
    ),
    "mlx-vlm": Engine(
        "mlx_vlm",
        ("mlx_vlm.models",),
        {
            "initialize_rope": (3, 1),
            "RoPE": (None, 2),
            "MRoPERotaryEmbedding": (None, 2),
            "DeepseekV4RoPE": (2, 1),
        },
        ("rope_theta", "compress_rope_theta"),
        heirs_of="MRoPERotaryEmbedding",
    ),
}
KINDS = ("scaling", "theta", "transformers")
# Read in the files, where no tracing arrives: in SGLang, Gemma 3's full attention takes
# transformers' own functions, a text-only Qwen3.5 the attention of qwen3_5.py, and GLM-5 that of
# deepseek_v2.py. mlx-lm and mlx-vlm build Phi-3's rotation by a class of its own, and the windows
# of Gemma 3 by a theta of their own, as DeepSeek-V4's. MiMo has remote code.
_GEMMA3 = ("gemma3", "gemma3_text", "shieldgemma2")
_QWEN3_5 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_BY_HAND = {
    "sglang": dict.fromkeys((*_GEMMA3, *_QWEN3_5, "glm_moe_dsa"), "scaling"),
    "mlx": dict.fromkeys(("gemma3", "gemma3_text", "phi3", "mimo"), "scaling"),
    "mlx-vlm": dict.fromkeys(("gemma3", "gemma3_text", "phi3", "mimo", "deepseek_v4"), "scaling"),
}
_SCALING_ARGUMENTS = ("rope_scaling", "rope_parameters", "scaling_config")
_THETA_ARGUMENTS = ("base", "rope_theta")
_OTHER_MODALITIES = re.compile(r"(?i:vision|visual|audio|image|projector|resampler)|V[iI][tT]")
# Where the classes that build rotations are defined.
_LIBRARIES = ("mlx_lm.models.rope_utils", "mlx_vlm.models.rope_utils")


@dataclass(frozen=True)
class Place:
    """Where an expression is: its module, class (None outside of classes) and function."""

    file: str
    owner: ast.ClassDef | None
    function: ast.FunctionDef | None


class Package:
    """The model files of one engine."""

    def __init__(self, name: str, root: Path) -> None:
        self.engine, self.root = ENGINES[name], root
        self.tree, self.names = cache(self._tree), cache(self._names)
        (metadata,) = root.glob(f"{self.engine.distribution}-*.dist-info")
        self.version = metadata.name.removesuffix(".dist-info").rpartition("-")[2]
        self.entries = getattr(self, f"_{name.replace('-', '_')}_entries")()
        self.builders = dict(self.engine.builders)
        if (base := self.engine.heirs_of) is not None:
            self.builders |= dict.fromkeys(self._heirs_of(base), self.builders[base])

    def _tree(self, module: str) -> ast.Module | None:
        """Return the parsed file of a module among the model files; None for any other."""
        if not module.startswith(self.engine.packages) or module in _LIBRARIES:
            return None
        path = self.root / module.replace(".", "/")
        for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def _names(self, module: str) -> dict[str, tuple[str, str] | ast.AST]:
        """Return what a module names: its own definitions, and (module, name) of others'."""
        found: dict[str, tuple[str, str] | ast.AST] = {}
        tree = self.tree(module)
        is_package = (self.root / module.replace(".", "/") / "__init__.py").is_file()
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    up = node.level - is_package
                    parent = module.split(".")[: -up or None]
                    source = ".".join([*parent, *filter(None, [source])])
                found |= {n.asname or n.name: (source, n.name) for n in node.names}
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = node  # such as a dict of layer classes
        return found

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module and the definition of a name; None if it is no model file's."""
        seen = set()
        while (module, name) not in seen:
            seen.add((module, name))
            entry = self.names(module).get(name)
            if not isinstance(entry, tuple):
                return None if entry is None else (module, entry)
            module, name = entry
        return None

    def _sglang_entries(self) -> dict[str, tuple[str, str]]:
        """Return module and class of every architecture: each file's `EntryClass`."""
        entries = {}
        (package,) = self.engine.packages
        for path in (self.root / package.replace(".", "/")).glob("*.py"):
            module = f"{package}.{path.stem}"
            classes = self.names(module).get("EntryClass")
            for node in ast.walk(classes) if isinstance(classes, ast.Assign) else ():
                if isinstance(node, ast.Name) and node.id != "EntryClass":
                    entries[node.id] = (module, node.id)
        return entries

    def _vllm_entries(self) -> dict[str, tuple[str, str]]:
        """Return module and class of every architecture: the dicts of registry.py."""
        package = self.engine.packages[0]
        entries: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree(f"{package}.registry")):
            for key, value in (
                zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
            ):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    module, name = (_constant(element) for element in value.elts)
                    full = module if module.startswith("vllm.") else f"{package}.{module}"
                    entries.setdefault(key.value, (full, name))
        return entries

    def _mlx_entries(self) -> dict[str, tuple[str, str]]:
        """Return module and class of every model type: each file's `Model`, and renamed ones."""
        return self._with_renamed(path.stem for path in self._model_files("*.py"))

    def _mlx_vlm_entries(self) -> dict[str, tuple[str, str]]:
        """Return module and class of every model type: each folder's `Model`, and renamed ones."""
        return self._with_renamed(path.parent.name for path in self._model_files("*/__init__.py"))

    def _model_files(self, pattern: str) -> Iterator[Path]:
        (package,) = self.engine.packages
        return (self.root / package.replace(".", "/")).glob(pattern)

    def _with_renamed(self, model_types: Iterable[str]) -> dict[str, tuple[str, str]]:
        (package,) = self.engine.packages
        entries = {name: (f"{package}.{name}", "Model") for name in model_types}
        utils = self.root / package.partition(".")[0] / "utils.py"
        (renamed,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(utils.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign)
            and getattr(node.targets[0], "id", None) == "MODEL_REMAPPING"
        )
        return entries | {old: entries[new] for old, new in renamed.items() if new in entries}

    def _heirs_of(self, name: str) -> Iterator[str]:
        """Yield the classes of model files that inherit a class directly."""
        for path in self._model_files("*/*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                bases = node.bases if isinstance(node, ast.ClassDef) else ()
                if any(getattr(base, "id", None) == name for base in bases):
                    yield node.name

    def reachable(self, file: str, name: str) -> dict[tuple[str, str], ast.AST]:
        """Return all classes and functions that a class leads to by name."""
        seen: dict[tuple[str, str], ast.AST] = {}
        waiting = [self.find(file, name)]
        while waiting:
            entry = waiting.pop()
            if entry is None:
                continue
            key = (entry[0], getattr(entry[1], "name", None) or ast.dump(entry[1].targets[0]))
            if key in seen:
                continue
            seen[key] = entry[1]
            for node in ast.walk(entry[1]):
                if isinstance(node, ast.Name):
                    waiting.append(self.find(entry[0], node.id))
                elif isinstance(node, ast.Constant) and node.value in self.entries:
                    # vLLM names the inner model of a composite one.
                    waiting.append(self.find(*self.entries[node.value]))
        return seen


class Reading:
    """What the model of one architecture hands to its rotations."""

    def __init__(self, package: Package, file: str, name: str) -> None:
        self.package = package
        self.reached = package.reachable(file, name)
        # A class that is picked by a variable is not reached by name: take the whole file.
        for other, node in package.names(file).items():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and any(
                isinstance(call, ast.Call) and _called(call) in package.builders
                for call in ast.walk(node)
            ):
                self.reached |= package.reachable(file, other)

    def calls(self) -> Iterator[tuple[Place, ast.Call]]:
        """Yield every call in what is reached, with its place."""
        for (file, _), node in self.reached.items():
            owner = node if isinstance(node, ast.ClassDef) else None
            functions = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
            for function in functions:
                for call in ast.walk(function):
                    if isinstance(call, ast.Call):
                        yield Place(file, owner, function), call

    def names_rope_parameters(self) -> bool:
        """Return whether the text model's files name transformers 5's `rope_parameters`."""
        texts = (
            node
            for node in self.reached.values()
            if not _OTHER_MODALITIES.search(getattr(node, "name", ""))
        )
        return any(
            "rope_parameters" in (getattr(each, "id", None), getattr(each, "attr", None))
            for node in texts
            for each in ast.walk(node)
        )

    def rotations(self) -> list[tuple[str, int, bool, bool]]:
        """Return module, line, and whether scaling and theta arrive, of every built rotation."""
        found = set()
        builders = self.package.builders
        for place, call in self.calls():
            owner = place.owner.name if place.owner else place.function.name
            if _called(call) not in builders or _OTHER_MODALITIES.search(owner):
                continue
            at_scaling, at_theta = builders[_called(call)]
            scaling = self._arrives(call, place, _SCALING_ARGUMENTS, at_scaling, "scaling")
            # Where scaling and theta are one argument, theta is one of its keys.
            names, index = (
                (_SCALING_ARGUMENTS, at_scaling)
                if at_theta is None
                else (_THETA_ARGUMENTS, at_theta)
            )
            theta = self._arrives(call, place, names, index, "theta")
            found.add((place.file, call.lineno, scaling, theta))
        return sorted(found)

    def _arrives(
        self, call: ast.Call, place: Place, names: tuple[str, ...], index: int | None, what: str
    ) -> bool:
        self.what = what
        argument = None if index is None else _argument(call, names, index)
        return argument is not None and self.carries(argument, place, frozenset())

    def carries(self, node: ast.AST, place: Place, seen: frozenset) -> bool:
        """Return whether an expression holds the config's scaling, or its theta."""
        key = (
            place.file,
            getattr(node, "lineno", 0),
            getattr(node, "col_offset", 0),
            ast.dump(node),
        )
        if key in seen:
            return False
        seen |= {key}

        def inner(child: ast.AST) -> bool:
            return self.carries(child, place, seen)

        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return self._attribute(node.attr, place, seen)
            return node.attr in self._fields()
        if isinstance(node, ast.Name):
            return self._name(node.id, place, seen)
        if isinstance(node, ast.Subscript):
            return self._is_kept(_constant(node.slice)) and inner(node.value)
        if isinstance(node, ast.Call):
            name, arguments = _called(node), [*node.args, *(k.value for k in node.keywords)]
            if name == "getattr" and len(node.args) > 1:
                return _constant(node.args[1]) in self._fields()
            if name == "get_rope_config":
                return True
            if name in ("get", "pop") and isinstance(node.func, ast.Attribute):
                key_name = _constant(node.args[0]) if node.args else None
                if key_name in self._fields():
                    return True
                return self._is_kept(key_name) and inner(node.func.value)
            if isinstance(node.func, ast.Attribute) and inner(node.func.value):
                return True
            return any(inner(argument) for argument in arguments)
        if isinstance(node, ast.IfExp):
            return inner(node.body) or inner(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(inner, node.values))
        if isinstance(node, ast.BinOp):
            return inner(node.left) or inner(node.right)
        if isinstance(node, ast.Dict):
            return any(map(inner, node.values))
        if isinstance(node, ast.DictComp):
            return any(inner(g.iter) for g in node.generators)
        if isinstance(node, ast.NamedExpr | ast.Starred | ast.keyword):
            return inner(node.value)
        return False

    def _fields(self) -> tuple[str, ...]:
        return _FIELDS + (self.package.engine.theta_names if self.what == "theta" else ())

    def _is_kept(self, key: object) -> bool:
        return self.what == "theta" or key not in _OTHER_KEYS

    def _name(self, name: str, place: Place, seen: frozenset) -> bool:
        function = place.function
        if function is None:
            return False
        for node in ast.walk(function):
            for target, value in _assignments(node):
                if getattr(target, "id", None) == name and self.carries(value, place, seen):
                    return True
                for index, element in enumerate(getattr(target, "elts", ())):
                    if getattr(element, "id", None) == name and self._unpacked(
                        value, index, place, seen
                    ):
                        return True
        parameters = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
        if name not in parameters:
            return False
        index = parameters.index(name)
        method = place.owner is not None and bool(parameters) and parameters[0] == "self"
        callees = {function.name}
        if function.name == "__init__" and place.owner is not None:
            callees = {place.owner.name} | self._heirs(place.owner.name)
        for caller, call in self.calls():
            if not self._calls(caller, call, place, callees):
                continue
            argument = _argument(call, (name,), index - (1 if method else 0))
            if argument is not None and self.carries(argument, caller, seen):
                return True
        return False

    def _calls(self, caller: Place, call: ast.Call, place: Place, callees: set[str]) -> bool:
        """Return whether a call runs the function of a place, maybe under an imported name."""
        called = _called(call)
        if called == "__init__":  # super().__init__
            return self._inherits(caller.owner, place.owner)
        found = self.package.find(caller.file, called)
        return (getattr(found[1], "name", None) if found else called) in callees

    def _unpacked(self, value: ast.AST, index: int, place: Place, seen: frozenset) -> bool:
        """Return whether one element of an unpacked value holds the scaling."""
        if isinstance(value, ast.Call) and _called(value) == "get_rope_config":
            return index == ("theta", "scaling").index(self.what)
        if isinstance(value, ast.Tuple) and index < len(value.elts):
            return self.carries(value.elts[index], place, seen)
        found = (
            self.package.find(place.file, _called(value)) if isinstance(value, ast.Call) else None
        )
        if found and isinstance(found[1], ast.FunctionDef):
            inside = Place(found[0], None, found[1])
            return any(
                self._unpacked(node.value, index, inside, seen)
                for node in ast.walk(found[1])
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
            )
        return self.carries(value, place, seen)

    def _attribute(self, attribute: str, place: Place, seen: frozenset) -> bool:
        """Return whether an attribute of `self` holds what is traced."""
        for file, owner in self._line_of(place):
            for function in [n for n in ast.walk(owner) if isinstance(n, ast.FunctionDef)]:
                inside = Place(file, owner, function)
                for node in ast.walk(function):
                    for target, value in _assignments(node):
                        if getattr(target, "attr", None) == attribute and self.carries(
                            value, inside, seen
                        ):
                            return True
                        for index, element in enumerate(getattr(target, "elts", ())):
                            if getattr(element, "attr", None) == attribute and self._unpacked(
                                value, index, inside, seen
                            ):
                                return True
        return False

    def _line_of(self, place: Place) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class and those it inherits from, as far as they are in the package."""
        waiting = [(place.file, place.owner)]
        while waiting:
            file, owner = waiting.pop()
            if isinstance(owner, ast.ClassDef):
                yield file, owner
                for base in owner.bases:
                    name = getattr(base, "id", None)
                    entry = self.package.find(file, name) if name else None
                    if entry is not None:
                        waiting.append(entry)

    def _heirs(self, name: str) -> set[str]:
        return {
            node.name
            for (file, _), node in self.reached.items()
            if isinstance(node, ast.ClassDef)
            and any(c.name == name for _, c in self._line_of(Place(file, node, None)))
        }

    def _inherits(self, heir: ast.ClassDef | None, owner: ast.ClassDef | None) -> bool:
        return heir is not None and owner is not None and heir.name in self._heirs(owner.name)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For):
        yield node.target, node.iter


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def _constant(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _argument(call: ast.Call, names: tuple[str, ...], index: int) -> ast.AST | None:
    for keyword in call.keywords:
        if keyword.arg in names:
            return keyword.value
    return call.args[index] if 0 <= index < len(call.args) else None


def read_architecture(package: Package, name: str) -> str | None:
    """Return "scaling", "theta", "transformers", or None if the model file reads neither so.

    Args:
        package: The engine's model files.
        name: Its name of the architecture.
    """
    entry = package.entries.get(name)
    if entry is None or entry[0].endswith(".transformers"):
        return "transformers" if package.engine.runs_transformers else None
    arrives = {(scaling, theta) for _, _, scaling, theta in Reading(package, *entry).rotations()}
    known = {(True, True): "scaling", (False, True): "theta"}
    return known.get(next(iter(arrives))) if len(arrives) == 1 else None


def read_engine(name: str, root: Path) -> dict[str, object]:
    """Return the version of an engine and what it reads, by transformers' model types."""
    package, is_mlx = Package(name, root), name.startswith("mlx")
    reads = read_model_types(
        lambda model_type, class_name: read_architecture(
            package, model_type if is_mlx else class_name
        )
    )
    reads |= _BY_HAND.get(name, {})
    kinds = dict.fromkeys(kind for kind in KINDS if kind in reads.values())
    table: dict[str, object] = {
        "version": package.version,
        **{kind: sorted(m for m, read in reads.items() if read == kind) for kind in kinds},
    }
    if is_mlx:  # their files name transformers 4's fields or transformers 5's, or both
        table["rope_parameters"] = sorted(
            model_type
            for model_type in {*CONFIG_MAPPING, *reads} & package.entries.keys()
            if Reading(package, *package.entries[model_type]).names_rope_parameters()
        )
    return table


def read_model_types(
    read: Callable[[str, str], str | None], has_inner_models: bool = True
) -> dict[str, str | None]:
    """Return what is read of every model type whose architectures agree.

    Args:
        read: Takes a model type and the name of one of its classes in transformers.
        has_inner_models: Whether the engine picks the inner model of a composite by its config.
    """
    causal, composite = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    rows: dict[str, set[str | None]] = {}
    for model_type, classes in [*causal.items(), *composite.items()]:
        if _text_type(model_type) is None:
            continue
        for class_name in [classes] if isinstance(classes, str) else classes:
            rows.setdefault(model_type, set()).add(read(model_type, class_name))
    for model_type in composite.keys() & rows.keys():
        text_type = _text_type(model_type)
        if has_inner_models and rows[model_type] == {None} and text_type in rows:
            rows[model_type] = rows[text_type]
        rows.setdefault(text_type, rows[model_type])
    return {model_type: next(iter(found)) for model_type, found in rows.items() if len(found) == 1}


@cache
def _text_type(model_type: str) -> str | None:
    """Return the decoder's model type; None without a rotation, or if no default config exists."""
    try:
        text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    except StrictDataclassError:
        return None
    return text.model_type if hasattr(text, "rope_parameters") else None


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", metavar="ENGINE=FOLDER")
    table = json.loads(PAGE.read_text(encoding="utf-8")) if PAGE.is_file() else {}
    for word in parser.parse_args().engines:
        name, _, folder = word.partition("=")
        table[name] = read_engine(name, Path(folder))
    PAGE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
