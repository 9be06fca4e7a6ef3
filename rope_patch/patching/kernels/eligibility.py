"""Which of a model's rotations this package's kernels can compute, and why not the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rope_patch.ops import KERNELS, triton_unavailable_reason
from rope_patch.patching.architecture.attention_source import (
    inspect_forward,
    undecorated_forward,
)
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.kernels.attention_forward import (
    PositionPassthrough,
    forward_attribute,
    has_foreign_forward,
    install_attention_forward,
    shared_norm_spec,
)
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.models import APPLY_ROTATION
from rope_patch.utils.errors import Refused
from rope_patch.utils.installation import install_hint


@dataclass(frozen=True, eq=False)
class RotationSite:
    """A rotary module and the attentions that rotate by its output.

    Attributes:
        rotary: The module.
        attentions: The attentions whose rotation can be ours; empty if one cannot.
        interleaved: See `rope_patch.ops.rope`.
        halve_tables: Whether to use only the first half of cos and sin: pairs are neighbours, but
            the tables repeat as a whole (GLM).
        problem: Why transformers' own rotation stays, or None.
        passthrough_problem: Why the rotation starts from cos and sin, not from positions, or None.
    """

    rotary: RotaryModule
    attentions: list[nn.Module] = field(default_factory=list)
    interleaved: bool = False
    halve_tables: bool = False
    problem: str | None = None
    passthrough_problem: str | None = None

    @property
    def uses_passthrough(self) -> bool:
        """Return whether positions can be passed in the place of cos and sin."""
        return self.problem is None and self.passthrough_problem is None


def inspect_site(traits: RotaryTraits, start_tokens: int = 0) -> RotationSite:
    """Inspect a rotary module and all modules beside and below it.

    Args:
        traits: Facts about one of the model's rotary modules.
        start_tokens: Number of start tokens; see `Method`.
    """
    rotary, owner = traits.rotary, traits.owner
    modules = [m for m in owner.modules() if m is not rotary.module]
    attentions = [m for m in modules if inspect_forward(type(m)).rotates]
    apply = getattr(sys.modules[type(rotary.module).__module__], APPLY_ROTATION, None)
    kinds = {type(m) for m in modules}
    foreign = [type(m).__name__ for m in attentions if has_foreign_forward(m)]
    problems = [problem for kind in kinds if (problem := inspect_forward(kind).problem)]
    if not attentions:
        problems.append(f"{type(owner).__name__} does not call {APPLY_ROTATION}")
    elif any(
        undecorated_forward(type(m)).__globals__[APPLY_ROTATION] is not apply for m in attentions
    ):
        problems.append(f"{type(owner).__name__} rotates by several functions")
    elif foreign:
        problems.append(f"the forward of {foreign[0]} was replaced")
    if problems:
        return RotationSite(rotary, problem=sorted(problems)[0])
    try:
        interleaved = traits.is_interleaved
    except Refused as error:
        return RotationSite(rotary, problem=str(error).split(", and other ways")[0])
    if traits.has_half_tables:
        return RotationSite(rotary, problem=f"{traits.name} hands out one number for each pair")
    passthrough_problem = None
    if traits.is_mrope:
        passthrough_problem = (
            f"{type(traits.config).__name__} gives a token several positions (M-RoPE)"
        )
    elif start_tokens:  # positions and one set of frequencies cannot express them
        passthrough_problem = "start_tokens have a rotation of their own"
    halve_tables = interleaved and not traits.repeats_interleaved
    return RotationSite(
        rotary, attentions, interleaved, halve_tables, passthrough_problem=passthrough_problem
    )


def require_kernels(kernels: str, sites: list[RotationSite]) -> None:
    """Raise a `ValueError` if the requested kernels are unknown or cannot rotate the model."""
    if kernels not in KERNELS:
        raise Refused(f"kernels must be one of {', '.join(KERNELS)}, got {kernels!r}")
    if kernels in ("auto", "hf"):
        return
    if kernels == "triton" and (problem := triton_unavailable_reason()):
        raise Refused(
            f'kernels="triton" was asked for, but {problem[0].lower()}{problem[1:]}: install it '
            f'({install_hint("kernels")}), or leave kernels at "auto"'
        )
    for rotation in sites:
        if problem := rotation.problem or rotation.passthrough_problem:
            raise Refused(
                f'kernels="{kernels}" cannot rotate this model: {problem}; leave kernels at "auto"'
            )


@dataclass(frozen=True)
class KernelSummary:
    """Which code rotates a patched model, as text.

    Attributes:
        kernels: See `patch`.
        problem: Why transformers' own code rotates, if not requested.
        passthrough_problem: Why the rotation starts from cos and sin, or None.
        fuses_norms: Whether the rotation also applies the norms of queries and keys.
    """

    kernels: str
    problem: str | None
    passthrough_problem: str | None
    fuses_norms: bool

    def __str__(self) -> str:
        if self.kernels == "hf" or self.problem:
            return "transformers' own rotation" + (f" ({self.problem})" if self.problem else "")
        backend = {"reference": "rotation in plain torch", "triton": "rotation in Triton"}
        where = backend.get(self.kernels, "rotation in Triton on a GPU, in plain torch on a CPU")
        without = triton_unavailable_reason() if torch.cuda.is_available() else None
        if self.kernels == "auto" and (missing := self.passthrough_problem or without):
            return f"rotation in plain torch on a CPU, transformers' own elsewhere ({missing})"
        return f"{where}, norms of queries and keys with it" if self.fuses_norms else where


def summarize_kernels(
    kernels: str, sites: list[RotationSite], *, has_position_map: bool = False
) -> KernelSummary:
    """Return the summary of a model's rotation sites."""
    bits = "short texts keep their bits under a position map" if has_position_map else None
    return KernelSummary(
        kernels,
        next((r.problem for r in sites if r.problem), None),
        next((r.passthrough_problem for r in sites if r.passthrough_problem), bits),
        any(shared_norm_spec(attention) for r in sites for attention in r.attentions),
    )


def install_kernels(
    site: RotationSite,
    kernels: str,
    undo_log: UndoLog,
    *,
    keeps_bits: Callable[[], bool] | None = None,
    has_position_map: bool = False,
) -> None:
    """Install this package's rotation at a site.

    Args:
        site: The site.
        kernels: See `rope_patch.patch`.
        undo_log: Log of the changes.
        keeps_bits: Returns whether a row of the present forward has the plain model's rotation,
            whose bits it keeps with "auto".
        has_position_map: Whether all texts rotate as in the plain model, and short ones keep its
            bits with "auto".
    """
    for attention in site.attentions:
        install_attention_forward(attention, kernels, site.interleaved, site.halve_tables, undo_log)
    if site.uses_passthrough and not (has_position_map and kernels == "auto"):
        module: Any = site.rotary.module
        slot = forward_attribute(module)
        own = getattr(module, slot)
        passthrough = PositionPassthrough(module, site.rotary.prefixes, own, kernels, keeps_bits)
        undo_log.set(module, slot, passthrough)
