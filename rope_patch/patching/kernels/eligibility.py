"""Which of a model's rotations can be ours, and why not where they cannot."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rope_patch.ops import KERNELS, triton_problem
from rope_patch.patching.architecture.attention_source import APPLY, own_function, usage
from rope_patch.patching.architecture.layout import (
    holds_halves,
    is_interleaved,
    repeats_neighbours,
    several_positions,
)
from rope_patch.patching.architecture.rotary_modules import Rotary, find_owner
from rope_patch.patching.kernels.attention_forward import (
    forward_slot,
    has_foreign_forward,
    install,
    shared_norm_form,
)
from rope_patch.patching.kernels.position_passthrough import HandingOver
from rope_patch.patching.undo_log import Swaps


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotary module and those that rotate by what it hands out.

    Attributes:
        rotary: The module.
        attentions: Those whose rotation can be ours; none where some cannot.
        interleaved: See `rope_patch.ops.rope`.
        halved: Whether tables have to be halved to have one number a pair, because pairs are
            neighbours and the numbers that stand together in the table are not (GLM).
        problem: Why the rotation stays transformers' own, or None.
        handing_problem: Why it starts from cos and sin all the same, not from positions, or None.
    """

    rotary: Rotary
    attentions: list[nn.Module] = field(default_factory=list)
    interleaved: bool = False
    halved: bool = False
    problem: str | None = None
    handing_problem: str | None = None

    @property
    def hands_over(self) -> bool:
        """Whether positions can travel in the place of cos and sin."""
        return self.problem is None and self.handing_problem is None


def find_rotation(model: nn.Module, rotary: Rotary, config: Any, kept_tokens: int = 0) -> Rotation:
    """Looks at everything that is beside or below a rotary module in the model.

    Args:
        model: The model.
        rotary: One of its rotary modules.
        config: The text config.
        kept_tokens: How many first positions have a rotation of their own; see `Method`.
    """
    owner = find_owner(model, rotary)
    modules = [m for m in owner.modules() if m is not rotary.module]
    attentions = [m for m in modules if usage(type(m)).rotates]
    apply = getattr(sys.modules[type(rotary.module).__module__], APPLY, None)
    kinds = {type(m) for m in modules}
    foreign = [type(m).__name__ for m in attentions if has_foreign_forward(m)]
    problems = [problem for kind in kinds if (problem := usage(kind).problem)]
    if not attentions:
        problems.append(f"{type(owner).__name__} does not call {APPLY}")
    elif any(own_function(type(m)).__globals__[APPLY] is not apply for m in attentions):
        problems.append(f"{type(owner).__name__} rotates by several functions")
    elif foreign:
        problems.append(f"the forward of {foreign[0]} was replaced")
    if problems:
        return Rotation(rotary, problem=sorted(problems)[0])
    try:
        interleaved = is_interleaved(rotary, config)
    except ValueError as error:
        return Rotation(rotary, problem=str(error).split(", and other ways")[0])
    if holds_halves(rotary, config):
        name = type(rotary.module).__name__
        return Rotation(rotary, problem=f"{name} hands out one number for each pair")
    handing_problem = None
    if several_positions(rotary.module, config):
        handing_problem = f"{type(config).__name__} gives a token several positions (M-RoPE)"
    elif kept_tokens:  # positions and one set of turns do not say it
        handing_problem = "start_tokens have a rotation of their own"
    halved = interleaved and not repeats_neighbours(rotary, config)
    return Rotation(rotary, attentions, interleaved, halved, handing_problem=handing_problem)


def require_kernels(kernels: str, rotations: list[Rotation]) -> None:
    """Raises a `ValueError` where kernels were named that cannot be."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, got {kernels!r}")
    if kernels in ("auto", "hf"):
        return
    if kernels == "triton" and (problem := triton_problem()):
        raise ValueError(
            f'kernels="triton" was asked for, but {problem[0].lower()}{problem[1:]}: install it '
            "(pip install 'rope-patch[kernels]'), or leave kernels at \"auto\""
        )
    for rotation in rotations:
        if problem := rotation.problem or rotation.handing_problem:
            raise ValueError(
                f'kernels="{kernels}" cannot rotate this model: {problem}; leave kernels at "auto"'
            )


@dataclass(frozen=True)
class Rotating:
    """Who rotates a patched model, to be told.

    Attributes:
        kernels: See `patch`.
        problem: Why it is transformers' own code, where it is not asked for.
        handing_problem: Why it starts from cos and sin.
        normed: Whether the norms of queries and keys go with it.
    """

    kernels: str
    problem: str | None
    handing_problem: str | None
    normed: bool

    def __str__(self) -> str:
        if self.kernels == "hf" or self.problem:
            return "transformers' own rotation" + (f" ({self.problem})" if self.problem else "")
        who = {"reference": "rotation in plain torch", "triton": "rotation in Triton"}
        told = who.get(self.kernels, "rotation in Triton on a GPU, in plain torch on a CPU")
        without = triton_problem() if torch.cuda.is_available() else None
        if self.kernels == "auto" and (missing := self.handing_problem or without):
            return f"rotation in plain torch on a CPU, transformers' own elsewhere ({missing})"
        return f"{told}, norms of queries and keys with it" if self.normed else told


def who_rotates(kernels: str, rotations: list[Rotation]) -> Rotating:
    """Sums a model's rotations up."""
    return Rotating(
        kernels,
        next((r.problem for r in rotations if r.problem), None),
        next((r.handing_problem for r in rotations if r.handing_problem), None),
        any(shared_norm_form(attention) for r in rotations for attention in r.attentions),
    )


def put_ours(rotation: Rotation, kernels: str, swaps: Swaps) -> None:
    """Makes a model's rotation ours."""
    for attention in rotation.attentions:
        install(attention, kernels, rotation.interleaved, rotation.halved, swaps)
    if rotation.hands_over:
        module: Any = rotation.rotary.module
        slot = forward_slot(module)
        own = getattr(module, slot)
        swaps.set(module, slot, HandingOver(module, rotation.rotary.prefixes, own, kernels))
