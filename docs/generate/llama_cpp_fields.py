"""Add llama.cpp to rope_patch/exporting/engine_fields.json, by reading its source.

`python docs/generate/llama_cpp_fields.py FOLDER`, with the unpacked source of llama-cpp-python
(`pip download --no-deps --no-binary llama-cpp-python llama-cpp-python`), which brings llama.cpp's.
Nothing is compiled or imported. Two parts are read:

- src/models has a file of C++ for each architecture of GGUF files. It rotates by calls of
  ggml_rope_ext and ggml_rope_multi, whose last seven arguments are the original length, theta, the
  scale, YaRN's extrapolation and attention factors, and its two betas. An argument is the context's
  (flags or file), the layer's, or a constant.
- conversion has a converter for each architecture of Hugging Face. It writes theta and a scaling
  where its set_gguf_parameters leads to the one of TextModel.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import engine_fields

NAME = "llama.cpp"

# Arguments that come from the context, and those that a layer picks: windows have their own.
_CONTEXT = ("freq_base", "freq_scale", "ext_factor", "attn_factor")
_LAYER = tuple((name, f"{name}_l", f"{name}_i") for name in _CONTEXT)
_PLAIN = ("freq_base", "1", "0", "1")  # of a window that no scaling reaches
# Calls inside vision or drafting parts of a file.
_OTHER_PARTS = {"deepseek2": ("ocr_rope_type",)}
# The windows' theta and scale are the file's where a file's loader copies both.
_COPIES = (
    "rope_freq_base_train_swa = hparams.rope_freq_base_train;",
    "rope_freq_scale_train_swa = hparams.rope_freq_scale_train;",
)
# Read in the converter: Phi-3's writes theta, and the stretches of a longrope. Mistral 3's hands
# the work to a class inside it, which leads to TextModel.
_WRITES_BY_ITSELF = ("Phi3MiniModel", "Mistral3Model")
# Latent attention takes the attention factor into its softmax scale, if the file has this key; the
# converter writes a tenth of it there.
_LATENT_MULTIPLIER = "rope_yarn_log_mul /= 0.1f"


class Graphs:
    """What each architecture of GGUF files hands to its rotations, by its name in files."""

    def __init__(self, root: Path) -> None:
        self.models = {
            path.stem: " ".join(_without_comments(path.read_text(encoding="utf-8")).split())
            for path in sorted((root / "src" / "models").glob("*.cpp"))
        }
        names = (root / "src" / "llama-arch.cpp").read_text(encoding="utf-8")
        self.names = dict(re.findall(r'\{\s*(LLM_ARCH_\w+),\s*"([^"(]+)"\s*\}', names))
        loader = (root / "src" / "llama-model.cpp").read_text(encoding="utf-8")
        header = (root / "src" / "models" / "models.h").read_text(encoding="utf-8")
        # A class without a graph of its own takes another's, or the one that it inherits.
        self.graphs: dict[str, str] = {}
        for model, base, body in re.findall(
            r"struct (llama_model_\w+) : public (llama_model_\w+) \{(.*?)\n\};", header, re.S
        ):
            taken = re.search(r"using graph = (llama_model_\w+)::", body)
            self.graphs[model] = taken.group(1) if taken else base
        self.kinds: dict[str, str | None] = {}
        self.stretched: list[str] = []
        self.latent: list[str] = []
        cases = re.findall(r"((?:case LLM_ARCH_\w+:\s*)+)return new (llama_model_\w+)\(", loader)
        for labels, model in cases:
            for label in re.findall(r"LLM_ARCH_\w+", labels):
                texts = list(self._texts(model))
                self.kinds[self.names[label]] = self._kind(texts)
                if self._is_stretched(texts):
                    self.stretched.append(self.names[label])
                if any(_LATENT_MULTIPLIER in text for _, text in texts):
                    self.latent.append(self.names[label])

    def _texts(self, model: str) -> Iterator[tuple[str, str]]:
        """Yield name and text of the files of a class, and of the class whose graph it takes."""
        own = [(n, t) for n, t in self.models.items() if re.search(rf"\b{model}::", t)]
        yield from own
        if not any("ggml_rope" in text for _, text in own) and model in self.graphs:
            yield from self._texts(self.graphs[model])

    def _calls(self, texts: list[tuple[str, str]]) -> Iterator[list[str]]:
        """Yield the arguments of each call that rotates."""
        for name, text in texts:
            for call in re.finditer(r"\bggml_rope(?:_\w+)?\s*\(", text):
                arguments = _arguments(text, call.end())
                is_other = any(word in arguments for word in _OTHER_PARTS.get(name, ()))
                if "ggml_rope_set_offset" not in call.group() and not is_other:
                    yield arguments

    def _kind(self, texts: list[tuple[str, str]]) -> str | None:
        """Return "scaling" if every rotation takes the context's; "full attention" if windows do
        not; None if nothing rotates, or by other numbers.
        """
        found = set()
        for arguments in self._calls(texts):
            numbers = tuple(re.sub(r"\.0f?$", "", word) for word in arguments[-6:-2])
            if len(arguments) < 12 or (numbers != _PLAIN and not _are_known(numbers)):
                return None
            is_copied = all(copy in texts[0][1] for copy in _COPIES)  # the loader is a class's own
            picks = numbers == _PLAIN or (numbers[:2] != _CONTEXT[:2] and not is_copied)
            found.add("full attention" if picks else "scaling")
        if not found:
            return None
        return "full attention" if "full attention" in found else "scaling"

    def _is_stretched(self, texts: list[tuple[str, str]]) -> bool:
        """Return whether every rotation is handed the stretches of each pair in the file."""
        calls = list(self._calls(texts))
        is_loaded = any("LLM_TENSOR_ROPE_FREQS" in text for _, text in texts)
        return (
            bool(calls)
            and is_loaded
            and all(len(call) > 10 and call[3] not in ("nullptr", "NULL") for call in calls)
        )


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)


def _are_known(numbers: tuple[str, ...]) -> bool:
    return all(word in known for word, known in zip(numbers, _LAYER, strict=True))


def _arguments(text: str, start: int) -> list[str]:
    """Return the arguments of a call, whose parenthesis ends at `start`."""
    arguments, depth = [""], 1
    for character in text[start:]:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            break
        if character == "," and depth == 1:
            arguments.append("")
        else:
            arguments[-1] += character
    return [argument.strip() for argument in arguments]


class Converters:
    """The converter's classes: which file architecture they write, and whether with a rotation."""

    def __init__(self, root: Path) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.registered: dict[str, list[str]] = {}
        for path in sorted((root / "conversion").glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
                    for name in _registered(node):
                        self.registered.setdefault(name, []).append(node.name)
        self._constants = root / "gguf-py" / "gguf" / "constants.py"

    @cached_property
    def names(self) -> dict[str, str]:
        """Return the names in files of the members of gguf.MODEL_ARCH."""
        text = self._constants.read_text(encoding="utf-8")
        return dict(re.findall(r"^    MODEL_ARCH\.(\w+):\s*\"([^\"]+)\",", text, re.M))

    def text_class(self, architecture: str) -> str | None:
        """Return the class that converts the text model of an architecture of Hugging Face."""
        for name in self.registered.get(architecture, ()):
            if "TextModel" in self._line(name):
                return name
        return None

    def file_architecture(self, name: str) -> str | None:
        """Return what the files that a class writes call their architecture."""
        for each in self._line(name):
            for node in self.classes[each].body if each in self.classes else ():
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "model_arch":
                    return self.names.get(ast.unparse(node.value).rpartition(".")[2])
        return None

    def writes(self, name: str) -> bool:
        """Return whether a class writes theta and a scaling of the config."""
        return name in _WRITES_BY_ITSELF or self._leads_to_text_model(self._line(name))

    def _leads_to_text_model(self, line: list[str]) -> bool:
        for index, each in enumerate(line):
            if each == "TextModel":
                return True
            for node in self.classes[each].body if each in self.classes else ():
                if isinstance(node, ast.FunctionDef) and node.name == "set_gguf_parameters":
                    text = ast.unparse(node)
                    named = re.findall(r"\b([A-Z]\w+)\.set_gguf_parameters\(self\)", text)
                    lines = [self._line(other) for other in named]
                    if re.search(r"super\([^)]*\)\.set_gguf_parameters\(", text):
                        lines.append(line[index + 1 :])
                    return any(map(self._leads_to_text_model, lines))
        return False

    def _line(self, name: str) -> list[str]:
        """Return a class and those that it inherits from, in the order of a search."""
        bases = self.classes[name].bases if name in self.classes else []
        inherited = [self._line(ast.unparse(base).rpartition(".")[2]) for base in bases]
        return list(dict.fromkeys([name, *(each for line in inherited for each in line)]))


def _registered(node: ast.ClassDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(".register"):
            yield from (ast.literal_eval(argument) for argument in decorator.args)


def source_version(folder: Path) -> str:
    """Return the version of llama.cpp, and of the package whose source brings it."""
    lines = (folder / "vendor" / "llama.cpp" / "CMakeLists.txt").read_text(encoding="utf-8")
    numbers = re.findall(r"set\(LLAMA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", lines)
    package = (folder / "PKG-INFO").read_text(encoding="utf-8")
    (version,) = re.findall(r"^Version: (\S+)", package, re.M)
    return f"{'.'.join(numbers)} (llama-cpp-python {version})"


def read_llama_cpp(folder: Path) -> dict[str, object]:
    """Return the version of llama.cpp and what it reads, by transformers' model types.

    Under "graphs" and the like are names of architectures in GGUF files.
    """
    root = folder / "vendor" / "llama.cpp"
    graphs, converters = Graphs(root), Converters(root)

    def read(_: str, architecture: str) -> str | None:
        name = converters.text_class(architecture)
        kind = None if name is None else graphs.kinds.get(converters.file_architecture(name) or "")
        if kind == "scaling" and not converters.writes(name):
            return "flags"
        return kind if kind is None or converters.writes(name) else None

    def name(_: str, architecture: str) -> str | None:
        found = converters.text_class(architecture)
        return None if found is None else converters.file_architecture(found)

    reads = engine_fields.read_model_types(read, has_inner_models=False)
    names = engine_fields.read_model_types(name, has_inner_models=False)
    kinds = ("scaling", "flags", "full attention")
    return {
        "version": source_version(folder),
        **{kind: sorted(m for m, found in reads.items() if found == kind) for kind in kinds},
        "graphs": {
            kind: sorted(name for name, found in graphs.kinds.items() if found == kind)
            for kind in ("scaling", "full attention")
        }
        | {"stretches": sorted(graphs.stretched), "latent multiplier": sorted(graphs.latent)},
        "architectures": {m: names[m] for m in sorted(names) if reads.get(m) in kinds},
    }


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    table = json.loads(engine_fields.PAGE.read_text(encoding="utf-8"))
    table[NAME] = read_llama_cpp(parser.parse_args().folder)
    engine_fields.PAGE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
