"""When a patch has to prove itself first, what is remembered of it, and what follows if it fails.

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
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch.patching.plan import PatchPlan
from rope_patch.patching.proof.checks import PatchFunction, kinds_of
from rope_patch.patching.proof.proof import FAILED, PASSED, KindProof, prove, silence
from rope_patch.patching.proof.tiny_model import models_within, tiny_config
from rope_patch.transformers_api.releases import (
    NEWEST_TESTED,
    is_newer_than_tested,
    transformers_version,
)
from rope_patch.utils.atomic_files import NotWritten, write_json
from rope_patch.utils.cache_folder import cache_folder
from rope_patch.utils.checksums import digest
from rope_patch.utils.errors import Refused, describe_error
from rope_patch.utils.provenance import now
from rope_patch.utils.versions import own_version

logger = logging.getLogger("rope_patch")

VARIABLE = "ROPE_PATCH_PROOF"

# Proofs of this process, passed or not, by the facts that they depend on.
_proofs: dict[str, KindProof] = {}
_warned: set[str] = set()  # classes that cannot be proven
_lock = threading.Lock()


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
                _proofs[key] = _recall(key, kind) or _prove(model, plan, kind, key, facts, patch)
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
    """Return a hash of the modules that a model's class and its bases are written in.

    Bases of torch and transformers are left out, because their versions are facts of their own.
    """
    modules = {base.__module__ for base in kind.__mro__}
    known = ("builtins", "torch", "transformers")
    names = {name for name in modules if name.partition(".")[0] not in known}
    sources = hashlib.sha256()
    for name in sorted({*names, kind.__module__}):
        try:
            sources.update(inspect.getsource(sys.modules[name]).encode())
        except (OSError, TypeError, KeyError):  # typed into an interpreter
            sources.update(f"{name} of process {os.getpid()}".encode())
    return sources.hexdigest()[:32]


def _prove(
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
