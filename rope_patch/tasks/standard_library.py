"""Code retrieval: functions of Python's own standard library, and a question about one line.

Benchmarks of code in long contexts, such as RepoQA (arXiv:2406.06025) and LongCodeBench
(arXiv:2505.07897), take repositories; the standard library is one that every machine has. RepoQA
asks for a function by a description of it; here a line of it is quoted. Models have read the
library in training: the control, whose text lacks the function, shows what they know by heart.

Texts depend on the version of Python, which each sample's row gives as `python`.
"""

from __future__ import annotations

import ast
import platform
import random
import re
import sysconfig
import textwrap
import warnings
from bisect import bisect
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rope_patch.tasks import samples, scoring

# Tokens that an answer may take, even where a character is a token.
NAME_ROOM = 40
LINE_ROOM = 96

_TEXT = (
    "Below are functions of Python's standard library. I will ask about one of their lines "
    "afterwards.\n```python\n{code}\n```\nOne of the functions above contains this line:\n{line}\n"
)
NAME_PROMPT = f"{_TEXT}Which function is it? Answer with the name of the function."
LINE_PROMPT = f"{_TEXT}Which line comes next in that function? Answer with that line alone."
NAME_PREFIX = "Function name:"
LINE_PREFIX = "Next line:"

NO_LINE = ("", "```", "```python")  # lines that are no answer

_LEAST_FILES = 50  # files; fewer are no standard library
_LONGEST_NAME, _LONGEST_LINE = 32, 80  # characters
_SIZES = range(5, 31)  # lines that a function in question may have
_LONGEST_FUNCTION = 80  # lines of the longest function that is read
# fmt: off
_EXCLUDED = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}
# fmt: on


class _Function(NamedTuple):
    name: str
    lines: list[str]  # a comment with its file first, and a blank line last
    statements: list[int]  # numbers of the lines that are a statement each


class _Question(NamedTuple):
    function: _Function
    line: str
    following: str
    depth: int


def function_name(**metadata: Any) -> dict[str, Any]:
    """Build rp_code: which function has a line; the arguments are those of `samples.build`.

    Prompts grow by lines; where the text ends, a function may be cut.
    """
    return samples.build(_ask_for_name, "rp_code", NAME_ROOM, **metadata)


def next_line(**metadata: Any) -> dict[str, Any]:
    """Build rp_code_next: which line follows another; arguments as of `samples.build`."""
    return samples.build(_ask_for_line, "rp_code_next", LINE_ROOM, **metadata)


def _ask_for_name(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one text: each asks for another function."""
    code = _Code(text)
    return [
        samples.SampleDraft(
            prompt=partial(code.prompt, NAME_PROMPT, question.line),
            prefix=NAME_PREFIX,
            answers=[question.function.name],
            target=question.function.name,
            depth=question.depth,
            chance=code.chance_of_function,
            target_chance=code.chance_of_function,
            columns={"python": platform.python_version()},
        )
        for question in code.questions
    ]


def _ask_for_line(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one text: each asks for a line of another function."""
    code = _Code(text)
    return [
        samples.SampleDraft(
            prompt=partial(code.prompt, LINE_PROMPT, question.line),
            prefix=LINE_PREFIX,
            answers=[question.following],
            target=question.following,
            depth=question.depth,
            chance=code.chance_of_line,
            target_chance=code.chance_of_line,
            columns={"python": platform.python_version()},
        )
        for question in code.questions
    ]


class _Code:
    """The functions of one text: those that are asked for, among others."""

    def __init__(self, text: samples.TextContext) -> None:
        sources = read_sources(sysconfig.get_path("stdlib"))
        candidates = list(islice(_draw_questions(text.rng, sources), len(text.depths)))
        if len(candidates) < len(text.depths):
            raise ValueError(
                f"rp_code asks about one function of a file, and {len(candidates)} of the standard "
                f"library's files have one, got per_text {len(text.depths)}: take fewer"
            )
        self.questions = [  # one for each sample
            _Question(*candidate, depth)
            for candidate, depth in zip(candidates, text.depths, strict=True)
        ]
        functions = [question.function for question in self.questions]
        self._insertions = sorted(self.questions, key=lambda q: q.depth) if text.planted else []
        self._others = _draw_functions(text.rng, sources, functions)
        self._lines: list[str] = []
        self._starts = [0]

    def lines(self, n: int) -> list[str]:
        """Return n lines of other functions, and those that are asked for at their depths."""
        while len(self._lines) < n and (function := next(self._others, None)):
            self._lines += function.lines
            self._starts.append(len(self._lines))
        lines = self._lines[:n]
        starts = [*self._starts[: bisect(self._starts, n - 1)], len(lines)]
        for question in reversed(self._insertions):  # from the back: no place moves
            place = question.depth * len(lines) / 100
            at = min(starts, key=lambda start: abs(start - place))
            lines[at:at] = question.function.lines
        return lines

    def prompt(self, form: str, line: str, n: int) -> str:
        """Return a prompt whose text has n lines of other functions."""
        return form.format(code="\n".join(self.lines(n)).rstrip(), line=line)

    def chance_of_function(self, n: int) -> float:
        """Return the score of naming a random function of the text."""
        return 1 / (len(self._insertions) + max(bisect(self._starts, n - 1), 1))

    def chance_of_line(self, n: int) -> float:
        """Return the score of giving a random line of the text."""
        return 1 / max(len(self.lines(n)), 1)


@lru_cache(maxsize=2)
def read_sources(folder: str) -> dict[str, str]:
    """Return the source files of the standard library: their names and texts.

    Without tests, packages that were installed beside it, and tables.

    Raises:
        ValueError: The library's sources are not there.
    """
    root, sources = Path(folder), {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        generated = any(part.startswith(("config-", "_sysconfigdata")) for part in name.parts)
        if not generated and not _EXCLUDED.intersection(name.parts):
            try:
                sources[name.as_posix()] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
    if len(sources) < _LEAST_FILES:
        raise ValueError(
            f"rp_code is made of the sources of Python's standard library, and {folder} has "
            f"{len(sources)} of its files: take a Python that is installed with them, as from "
            "python.org, a distribution's full package, conda or uv"
        )
    return sources


@lru_cache(maxsize=1024)
def _functions(name: str, source: str) -> tuple[_Function, ...]:
    """Return the functions of a file, and the methods of its classes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in strings give warnings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    lines, functions = source.split("\n"), []  # ast counts no other ends of lines
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        head = f"# {name}, class {node.name}" if isinstance(node, ast.ClassDef) else f"# {name}"
        for function in inner:
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            first = min([function, *function.decorator_list], key=lambda n: n.lineno).lineno
            end = function.end_lineno or first
            if end - first >= _LONGEST_FUNCTION:
                continue
            body = textwrap.dedent("\n".join(lines[first - 1 : end])).split("\n")
            statements = [number - first + 1 for number in _single_lines(function)]
            functions.append(_Function(function.name, [head, *body, ""], statements))
    return tuple(functions)


def _single_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[int]:
    """Return the numbers of a function's lines that are a statement each, without its docstring."""
    statements = [node for top in function.body for node in ast.walk(top)]
    numbers = [
        node.lineno
        for node in statements
        if isinstance(node, ast.stmt)
        and node.lineno == node.end_lineno
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    return sorted({number for number in numbers if numbers.count(number) == 1})


def _draw_questions(
    rng: random.Random, sources: dict[str, str]
) -> Iterator[tuple[_Function, str, str]]:
    """Yield functions of different files, each with a line that is unique, and the next line."""
    names = list(sources)
    rng.shuffle(names)
    for name in names:
        functions = list(_functions(name, sources[name]))
        rng.shuffle(functions)
        for function in functions:
            if question := _find_line(rng, function, sources):
                yield function, *question
                break


def _find_line(
    rng: random.Random, function: _Function, sources: dict[str, str]
) -> tuple[str, str] | None:
    """Return a line of a function that is unique in all sources, and the next; None without."""
    name = function.name
    if name.startswith("__") or len(name) > _LONGEST_NAME or len(function.lines) - 2 not in _SIZES:
        return None
    for number in rng.sample(function.statements, len(function.statements)):
        line, following = (function.lines[i].strip() for i in (number, number + 1))
        if (
            number + 1 in function.statements
            and 20 <= len(line) <= _LONGEST_LINE
            and 8 <= len(following) <= _LONGEST_LINE
            and "`" not in line + following
            and name.strip("_") not in line  # gives the name away neither in whole nor in part
            and sum(source.count(line) for source in sources.values()) == 1
        ):
            return line, following
    return None


def _draw_functions(
    rng: random.Random, sources: dict[str, str], excluded: list[_Function]
) -> Iterator[_Function]:
    """Yield the functions of random files, in their order there."""
    names = list(sources)
    rng.shuffle(names)
    exclusions = {(function.lines[0], function.name) for function in excluded}
    for name in names:
        for function in _functions(name, sources[name]):
            if (function.lines[0], function.name) not in exclusions:
                yield function


def same_name(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 1 if the first word of the text is the function's name, marks around it aside."""
    words = str(results[0]).split()
    name = words[0].strip("`'\"*.,:;").removesuffix("()") if words else ""
    return scoring.all_answers(doc, results) | {"score": float(name == doc["target"])}


def same_line(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 1 if the first line of the text is the answer, blanks and marks of code aside."""
    lines = [line.strip() for line in str(results[0]).split("\n")]
    answer = next((line for line in lines if line not in NO_LINE), "")
    if quotation := re.match("`([^`]+)`", answer):
        answer = quotation[1].strip()
    return scoring.all_answers(doc, results) | {"score": float(answer == doc["target"])}
