"""Prove methods on a tiny model of a class, at the class's first use.

On a transformers newer than the newest tested one, the first patch of a model class with a kind of
methods is proven before it changes anything. A proof that was passed is remembered in the user's
cache folder, by all that it depends on: the versions of transformers, torch and rope_patch, the
source of the model's class, and the config of the tiny model. One that failed refuses the patch.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch.extension import Extension
from rope_patch.patching.plan import PatchPlan
from rope_patch.patching.proof.checks import (
    ESSENTIAL,
    NOT_ASKED,
    OK,
    Check,
    PatchFunction,
    Subject,
    kinds_of,
    make_request,
    run_checks,
)
from rope_patch.patching.proof.tiny_model import (
    CannotShrink,
    models_within,
    tiny_config,
    tiny_model,
)
from rope_patch.patching.torch_state import torch_defaults
from rope_patch.transformers_api.models import (
    NEWEST_TESTED,
    is_newer_than_tested,
    transformers_version,
)
from rope_patch.utils.atomic_files import NotWritten, write_json
from rope_patch.utils.cache_folder import cache_folder
from rope_patch.utils.checksums import digest
from rope_patch.utils.errors import Refused, describe_error, escape_markdown, markdown_prose
from rope_patch.utils.installation import own_version
from rope_patch.utils.provenance import now

logger = logging.getLogger("rope_patch")

VARIABLE = "ROPE_PATCH_PROOF"

PASSED, FAILED, REFUSED, NOT_PROVEN = "passed", "failed", "refused", "not proven"

# Proofs of this process, passed or not, by the facts that they depend on.
_proofs: dict[str, KindProof] = {}
_warned: set[str] = set()  # classes that cannot be proven
_lock = threading.Lock()  # of `_proofs`
_one_at_a_time = threading.Lock()  # one proof, in one thread


def require_proof(model: nn.Module, plan: PatchPlan, patch: PatchFunction) -> None:
    """Raise if a patch is wrong on a transformers that was not tested; prove it at its first use.

    Args:
        model: The model, which stays as it is.
        plan: The plan of the patch.
        patch: The function that patches a tiny model, without asking for a proof.

    Raises:
        Refused: The proof failed, or the environment variable has an unknown value.
    """
    if not _is_wanted():
        return
    facts = _facts(model, plan)
    for kind in kinds_of(plan):
        key = digest(json.dumps({**facts, "kind": kind}, sort_keys=True), 32)
        with _lock:  # the second of two threads waits, and finds the proof of the first one
            if key not in _proofs:
                _proofs[key] = _recall(key, kind) or _prove_class(
                    model, plan, kind, key, facts, patch
                )
            proof = _proofs[key]
        if proof.verdict == FAILED:
            raise Refused(_refusal(type(model).__name__, proof))
        if proof.verdict != PASSED:
            _warn_once(facts["class"], proof)


def _is_wanted() -> bool:
    """Return whether to prove: by the variable, else on releases that were not tested."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise Refused(
            f"{VARIABLE} must be 1 (prove each kind of methods at its first use) or 0 (never), got "
            f"{value!r}; unset, releases of transformers after {NEWEST_TESTED} are proven"
        )
    return value == "1" if value else is_newer_than_tested()


def _facts(model: nn.Module, plan: PatchPlan) -> dict[str, str]:
    """Return all that a proof depends on, besides the kind of methods."""
    kind = type(next(iter(models_within(model)), model))
    try:
        with silence():
            tiny = tiny_config(plan.config)
        config = json.dumps(tiny.to_dict(), sort_keys=True, default=str)
    except Exception as error:  # the proof says so, too
        config = describe_error(error)
    return {
        "transformers": transformers_version(),
        "torch": torch.__version__,
        "rope_patch": own_version(),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "source": _source_hash(kind),
        "config": digest(config, 32),
    }


def _source_hash(kind: type) -> str:
    """Return a hash of the modules that a model's class and its bases are written in."""
    modules = {base.__module__ for base in kind.__mro__}
    # Bases of torch and transformers are left out, because their versions are facts of their own.
    known = ("builtins", "torch", "transformers")
    names = {name for name in modules if name.partition(".")[0] not in known}
    sources = hashlib.sha256()
    for name in sorted({*names, kind.__module__}):
        try:
            sources.update(inspect.getsource(sys.modules[name]).encode())
        except (OSError, TypeError, KeyError):  # typed into an interpreter
            sources.update(f"{name} of process {os.getpid()}".encode())
    return sources.hexdigest()[:32]


def _prove_class(
    model: nn.Module,
    plan: PatchPlan,
    kind: str,
    key: str,
    facts: dict[str, str],
    patch: PatchFunction,
) -> KindProof:
    (proof,) = prove(model, plan, [kind], patch).kinds
    if proof.verdict == PASSED:
        record: dict[str, Any] = {**facts, "kind": kind, "seconds": proof.seconds, "time": now()}
        try:
            _file(key).parent.mkdir(parents=True, exist_ok=True)
            write_json(_file(key), record)
        except (OSError, NotWritten) as error:  # the next process proves again
            logger.debug("the proof of %s is not remembered: %s", kind, describe_error(error))
        logger.info("proved %s methods on a tiny %s", kind, facts["class"].rpartition(".")[2])
    return proof


def _recall(key: str, kind: str) -> KindProof | None:
    """Return a proof that an earlier process passed."""
    with contextlib.suppress(OSError):  # a folder that may not be read
        if _file(key).is_file():
            return KindProof(kind, PASSED)
    return None


def _file(key: str) -> Path:
    return cache_folder() / "proofs" / f"{key}.json"


def _refusal(model_class: str, proof: KindProof) -> str:
    failures = proof.failures or [proof.problem]
    return (
        f"a tiny {model_class} failed the proof of {proof.kind} methods on transformers "
        f"{transformers_version()}: {'; '.join(failures)}. The newest transformers that this "
        f"rope_patch was tested with is {NEWEST_TESTED}: pip install "
        f"'transformers<={NEWEST_TESTED}', or set {VARIABLE}=0 to go on at your own risk. "
        "`rope-patch env --check MODEL` prints the whole proof for a bug report"
    )


def _warn_once(model_class: str, proof: KindProof) -> None:
    """Say once of a class that there is no proof of it."""
    if model_class in _warned:
        return
    _warned.add(model_class)
    logger.warning(
        "%s could not be proven with %s methods on transformers %s, and the newest one that this "
        "rope_patch was tested with is %s: %s. Compare cached decoding with one pass before you "
        "rely on it; %s=0 ends this message",
        model_class.rpartition(".")[2],
        proof.kind,
        transformers_version(),
        NEWEST_TESTED,
        proof.problem,
        VARIABLE,
    )


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


def prove(
    model: nn.Module,
    plan: PatchPlan,
    kinds: Sequence[str],
    patch: PatchFunction,
    request: Extension | None = None,
) -> Proof:
    """Prove kinds of methods on a tiny model of a model's class; the model itself is only read.

    The proof runs in a thread of its own. There, no mode of the caller is active (gradients,
    inference, autocast, default device, dispatch modes), and nothing that it logs or warns of
    reaches the user.

    Args:
        model: The model.
        plan: A plan for it, which names its unpatched config and the layers to extend.
        kinds: See `checks.KINDS`.
        patch: The function that patches the tiny model, without asking for a proof of its own.
        request: A request to prove instead of those that stand for the kinds.
    """
    with (
        _one_at_a_time,
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="rope_patch-proof") as pool,
    ):
        return pool.submit(_prove, model, plan, kinds, patch, request).result()


def _prove(
    model: nn.Module,
    plan: PatchPlan,
    kinds: Sequence[str],
    patch: PatchFunction,
    request: Extension | None,
) -> Proof:
    with torch_defaults(), silence():
        proofs, name = [], type(model).__name__
        for kind in kinds:
            start = time.perf_counter()
            try:
                # A new one for each kind: a patch that fails may leave the last one changed.
                tiny = Subject(tiny_model(model, plan.config))
                name = type(tiny.model).__name__
                proof = _prove_kind(kind, tiny, _shallow(model, plan), patch, request)
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
    kind: str,
    tiny: Subject,
    shallow: Callable[[], Subject | None],
    patch: PatchFunction,
    request: Extension | None,
) -> KindProof:
    checks: list[Check] = []
    try:
        request = request or make_request(tiny, kind, patch)
        checks.extend(run_checks(tiny, shallow, request, patch))
    except Refused as refusal:
        return KindProof(kind, REFUSED, problem=describe_error(refusal))
    except CannotShrink:
        raise
    except Exception as error:  # our hooks raise, or what they run
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
