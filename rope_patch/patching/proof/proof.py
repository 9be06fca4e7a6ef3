"""The proof of a model class: what holds for each kind of methods, and how it is found out.

A proof runs in a thread of its own. There, no mode of the caller is active (gradients, inference,
autocast, default device, dispatch modes), and nothing that it logs or warns of reaches the user.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from rope_patch.patching.defaults import torch_defaults
from rope_patch.patching.plan import PatchPlan
from rope_patch.patching.proof.checks import (
    ESSENTIAL,
    NOT_ASKED,
    OK,
    Check,
    PatchFunction,
    Subject,
    run_checks,
)
from rope_patch.patching.proof.tiny_model import CannotShrink, tiny_model
from rope_patch.utils.errors import Refused, describe_error
from rope_patch.utils.escaping import escape_markdown, markdown_prose

PASSED, FAILED, REFUSED, NOT_PROVEN = "passed", "failed", "refused", "not proven"

_lock = threading.Lock()  # one proof at a time


@dataclass(frozen=True)
class KindProof:
    """What a proof says of one kind of methods.

    Attributes:
        kind: The kind; see `checks.KINDS`.
        verdict: "passed", "failed", "refused" (the tiny model cannot be patched so), or "not
            proven" (there is no tiny model, or it has no cache that can be compared).
        checks: The properties.
        problem: Why the patch was refused, or could not be proven.
        seconds: How long it took.
    """

    kind: str
    verdict: str
    checks: tuple[Check, ...] = ()
    problem: str = ""
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """Return what is wrong, one property an entry."""
        wrong = [check for check in self.checks if check.verdict not in (OK, NOT_ASKED)]
        return [f"{check.name}: {check.problem}" for check in wrong]


@dataclass(frozen=True)
class Proof:
    """The proof of a model class.

    Attributes:
        model_class: The class that is proven: the model's, or its text decoder's.
        kinds: What it says of each kind of methods.
    """

    model_class: str
    kinds: tuple[KindProof, ...]

    @property
    def is_ok(self) -> bool:
        """Return whether some kind passed and none failed."""
        verdicts = {kind.verdict for kind in self.kinds}
        return PASSED in verdicts and not verdicts & {FAILED, NOT_PROVEN}

    @property
    def refused(self) -> list[str]:
        """Return the kinds that the class refuses, with a reason."""
        return [kind.kind for kind in self.kinds if kind.verdict == REFUSED]

    def as_dict(self) -> dict[str, Any]:
        """Return the proof as JSON values."""
        return {"ok": self.is_ok, **asdict(self)}

    def as_text(self) -> str:
        """Return a table in Markdown with a column for each kind, and what is wrong below it."""
        names = list(dict.fromkeys(check.name for kind in self.kinds for check in kind.checks))
        lines = [
            f"{escape_markdown(self.model_class)}, a tiny model of random weights",
            "",
            "| | " + " | ".join(kind.kind for kind in self.kinds) + " |",
            "|:--|" + "--:|" * len(self.kinds),
        ]
        for name in names:
            lines.append(f"| {name} | " + " | ".join(_cell(k, name) for k in self.kinds) + " |")
        verdicts = " | ".join(kind.verdict for kind in self.kinds)
        lines += [f"| **verdict** | {verdicts} |", ""]
        kinds_of_note: dict[str, list[str]] = {}
        for kind in self.kinds:
            notes = [f"{check.name}: {check.problem}" for check in kind.checks if check.problem]
            for note in [kind.problem, *notes] if kind.problem else notes:
                kinds_of_note.setdefault(note, []).append(kind.kind)
        lines += [
            f"- {', '.join(kinds)}: {markdown_prose(note)}" for note, kinds in kinds_of_note.items()
        ]
        return "\n".join(lines).rstrip()


def _cell(kind: KindProof, name: str) -> str:
    check = next((check for check in kind.checks if check.name == name), None)
    if check is None:
        return ""
    error = "" if check.error is None else f"{check.error:.0e}"
    return error if check.verdict == OK and error else f"{check.verdict} {error}".rstrip()


def prove(model: nn.Module, plan: PatchPlan, kinds: Sequence[str], patch: PatchFunction) -> Proof:
    """Prove kinds of methods on a tiny model of a model's class; the model itself is only read.

    Args:
        model: The model.
        plan: A plan for it, which names its unpatched config and the layers to extend.
        kinds: See `checks.KINDS`.
        patch: The function that patches the tiny model, without asking for a proof of its own.
    """
    with _lock, ThreadPoolExecutor(max_workers=1, thread_name_prefix="rope_patch-proof") as pool:
        return pool.submit(_prove, model, plan, kinds, patch).result()


def _prove(model: nn.Module, plan: PatchPlan, kinds: Sequence[str], patch: PatchFunction) -> Proof:
    with torch_defaults(), silence():
        proofs, name = [], type(model).__name__
        for kind in kinds:
            start = time.perf_counter()
            try:
                # A new one for each kind: a patch that fails may leave the last one changed.
                tiny = Subject(tiny_model(model, plan.config))
                name = type(tiny.model).__name__
                proof = _prove_kind(kind, tiny, _shallow(model, plan), patch)
            except CannotShrink as error:
                proof = KindProof(kind, NOT_PROVEN, problem=str(error))
            proofs.append(
                KindProof(**{**vars(proof), "seconds": round(time.perf_counter() - start, 3)})
            )
        return Proof(name, tuple(proofs))


def _shallow(model: nn.Module, plan: PatchPlan) -> Callable[[], Subject | None]:
    """Return a function that makes the tiny model whose extended layer comes last, if any."""

    def make() -> Subject | None:
        with contextlib.suppress(CannotShrink):
            return Subject(tiny_model(model, plan.config, last=plan.geometries))
        return None

    return make


def _prove_kind(
    kind: str, tiny: Subject, shallow: Callable[[], Subject | None], patch: PatchFunction
) -> KindProof:
    checks: list[Check] = []
    try:
        checks.extend(run_checks(tiny, shallow, kind, patch))
    except Refused as refusal:
        return KindProof(kind, REFUSED, problem=describe_error(refusal))
    except CannotShrink:
        raise
    except Exception as error:  # of our hooks, or of what they run
        return KindProof(kind, FAILED, tuple(checks), f"the patch raises {describe_error(error)}")
    if any(check.verdict not in (OK, NOT_ASKED) for check in checks):
        return KindProof(kind, FAILED, tuple(checks))
    missing = next((check for check in checks if check.name == ESSENTIAL), None)
    if missing is not None and missing.verdict == NOT_ASKED:
        problem = f"whether {missing.name} cannot be told: {missing.problem}"
        return KindProof(kind, NOT_PROVEN, tuple(checks), problem)
    return KindProof(kind, PASSED, tuple(checks))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what this thread logs and warns of; other threads' messages pass."""
    thread = threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {h for each in loggers if isinstance(each, logging.Logger) for h in each.handlers}
    if logging.lastResort is not None:
        handlers.add(logging.lastResort)
    for handler in handlers:
        handler.addFilter(is_other)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_other)
