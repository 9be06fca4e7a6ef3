"""Other copies of a policy in reinforcement learning: the rollout engine's and the reference."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from rope_patch.encodings.sites.handle import EncodingPatch
from rope_patch.patching.handle import Patch
from rope_patch.pretrained.sidecar import matches_sidecar, read_sidecar
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")

_ADVICE = (
    "write a folder with the rotation in its config, with rope_patch.patch_checkpoint(model, "
    "folder, method, ...), and give the trainer that folder as its model"
)


def require_same_rollouts(args: Any, model: nn.Module, handle: Patch | EncodingPatch) -> None:
    """Raise if TRL would start vLLM on a checkpoint without the policy's rotation.

    TRL loads vLLM's model from the folder or name that the policy was loaded from, and then sends
    it the weights alone.

    Raises:
        ValueError: That folder's config does not have the rotation.
    """
    if not getattr(args, "use_vllm", False) or getattr(args, "vllm_mode", None) != "colocate":
        return
    source = _source(model)
    if not _has_rotation(source, handle):
        raise Refused(
            f"the rollout engine would load {source!r}, whose config has not the rotation of the "
            f"policy ({handle}), and sample from another model than is trained: {_ADVICE}"
        )


def warn_about_reference(args: Any, model: nn.Module, handle: Patch | EncodingPatch) -> None:
    """Warn if TRL's reference model is loaded from a checkpoint without the policy's rotation.

    A PEFT policy is its own reference, with the adapter disabled.
    """
    if not getattr(args, "beta", 0) or not hasattr(args, "num_generations"):
        return
    source = _source(model)
    if not hasattr(model, "peft_config") and not _has_rotation(source, handle):
        logger.warning(
            "the reference model of beta=%s is loaded from %r and is not patched: beyond the "
            "trained length, the policy is held to what the unpatched model says. To patch it, "
            "too: rope_patch.patch(trainer.ref_model, ...); or %s",
            args.beta,
            source,
            _ADVICE,
        )


def _source(model: nn.Module) -> str:
    """Return the folder or the name that a model was loaded from."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def _has_rotation(source: str, handle: Patch | EncodingPatch) -> bool:
    """Return whether a folder's config states the rotation of a patch."""
    sidecar = read_sidecar(source) if source else None
    if sidecar is None or not sidecar.get("native"):
        return False
    return isinstance(handle, Patch) and matches_sidecar(handle, sidecar)
