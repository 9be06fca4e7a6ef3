"""`patch` and `unpatch` for users, and `check`, which plans without applying."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from rope_patch.encodings import active
from rope_patch.encodings.replacement.encoding import encoded_extension, rotation_refusal
from rope_patch.encodings.sites.handle import EncodingPatch, patch_encoding
from rope_patch.encodings.sites.plan import EncodingPlan, make_encoding_plan
from rope_patch.encodings.sites.probe import UnknownEncoding
from rope_patch.extension import Extension
from rope_patch.methods.registry import get_method
from rope_patch.patching.dynamic.generation import require_no_batching_manager
from rope_patch.patching.handle import Patch, current
from rope_patch.patching.plan import PatchPlan, make_plan
from rope_patch.patching.proof.checks import KINDS, OK
from rope_patch.patching.proof.first_use import FAILED, KindProof, Proof, require_proof
from rope_patch.patching.proof.first_use import prove as prove_kinds
from rope_patch.patching.proof.tiny_model import VOCABULARY
from rope_patch.patching.torch_state import torch_defaults
from rope_patch.rope_config import read_geometries
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")

# The model of `check_method`: heads of 16, trained on 64 tokens.
_TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
}

P = ParamSpec("P")
R = TypeVar("R")


def _require_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of a model and a method, so that a third positional argument raises."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > 2:
            raise TypeError(
                f"{function.__name__}() takes a model and a method, and all else by name, got "
                f"{args[2]!r}: write factor={args[2]!r}, or length=... in tokens"
            )
        return function(*args, **kwargs)

    return called


@_require_keywords
def patch(
    model: nn.Module,
    method: str | Extension,
    *,
    factor: float | str | None = None,
    length: int | str | None = None,
    trained_length: int | str | None = None,
    layer_types: list[str] | None = None,
    kernels: str = "auto",
    start: str = "auto",
    anyway: bool = False,
    **options: Any,
) -> Patch | EncodingPatch:
    """Extend a live model's context, in place.

    A model that is patched already gets the new patch instead; undoing still returns to the
    original. With `with`, leaving the block puts the replaced patch back.

    Args:
        model: A transformers decoder with RoPE, or anything around one (PEFT, accelerate, compile).
            Models that add a table of positions or a bias by distance are extended, too: see
            docs/other-encodings.md for their methods.
        method: A name from `rope_patch.list_methods()`; or a whole request, an `Extension`, with
            no other arguments.
        factor: Target length / trained length, which is what the model reads now, a scaling that
            was trained in included. Exactly one of `factor` and `length`; dynamic methods and
            `nope` need neither.
        length: Target length in tokens; for dynamic methods the largest one expected. Texts are
            taken, too: `4x`, `32k` (`rope_patch.units`).
        trained_length: Tokens of pretraining, if the config states them wrongly. For a model that
            was saved with a patch: the length before or under the patch, which names the rotation
            to start from.
        layer_types: Which layers to change, where a model has several types; all but the
            sliding-window ones unless given.
        kernels: Which code applies the rotation. "auto": Triton's kernels on a GPU, plain torch on
            a CPU, and transformers' own code in compiled graphs, which Inductor makes as fast, and
            for architectures that rotate in a way of their own. "reference" and "triton" demand
            plain torch and Triton, "hf" is transformers' own code throughout.
        start: The frequencies to stretch, if the checkpoint's own config scales its rotation.
            "unscaled": the frequencies and the length before that; "running": the frequencies that
            the model runs with, and its full length. "auto" replaces `linear` and `dynamic`, and a
            `yarn` that was put on (see `rope_patch.trained_yarn`). It builds on the others
            (`llama3`, `longrope`, a trained `yarn`, ...). YaRN on YaRN is one YaRN from the
            config's original length. Requests that end below the length under the config's YaRN
            need "unscaled". A model that rope_patch trained starts from the trained rotation, and
            one that it only saved, from the checkpoint (docs/methods.md); "unscaled" goes back to
            the checkpoint in both cases.
        anyway: Whether a length beyond 64 times the trained one is meant, which is refused else.
        **options: The method's options.

    Returns:
        The handle, with `.undo()`.

    Raises:
        ValueError: A request that cannot be met or would change nothing. The model is as before.
        TypeError: A value of the wrong type. The model is as before.
    """
    extension = Extension.of(
        method,
        factor=factor,
        length=length,
        trained_length=trained_length,
        layer_types=layer_types,
        kernels=kernels,
        start=start,
        anyway=anyway,
        **options,
    )
    if isinstance(model, nn.Module):
        extension = encoded_extension(model, extension)
        if (refusal := rotation_refusal(model)) is not None:
            return _patch_encoding(model, extension, refusal)
    return patch_rotation(model, extension)


def patch_rotation(model: nn.Module, method: str | Extension, **arguments: Any) -> Patch:
    """Extend a model that rotates: `patch` for code that needs the rotation's handle."""
    handle = _apply(model, check(model, method, **arguments))
    if logger.isEnabledFor(logging.INFO):
        logger.info("patched %s: %s", type(model).__name__, handle.summary().replace("\n ", ";"))
    return handle


def _apply(model: nn.Module, plan: PatchPlan) -> Patch:
    """Replace the patch that is in effect, if any, by a plan's."""
    handle = Patch(plan)
    if active_patch := current(model):
        active_patch._deactivate()
        handle._previous = active_patch
        if not active_patch._entered:  # it ends no block, so it has nothing to restore
            active_patch._previous = None
    try:
        handle._apply(model, plan)
    except BaseException:
        if active_patch:
            active_patch._restore(model)
        raise
    return handle


@torch_defaults()
def _patch_encoding(model: nn.Module, extension: Extension, refusal: Refused) -> EncodingPatch:
    with _explained(refusal):
        handle = patch_encoding(model, extension)
    logger.info("patched %s: %s", type(model).__name__, handle.summary().replace("\n ", ";"))
    return handle


@torch_defaults()
def check_encoding(model: nn.Module, extension: Extension) -> EncodingPlan | None:
    """Return the plan for a model that does not rotate; None for one that does.

    Raises:
        ValueError: The request cannot be met, or would change nothing.
    """
    refusal = rotation_refusal(model)
    if refusal is None:
        return None
    with _explained(refusal):
        return make_encoding_plan(model, extension)


@contextmanager
def _explained(refusal: Refused) -> Iterator[None]:
    """Say why a model is not taken as one that rotates, where its encoding is unknown."""
    try:
        yield
    except UnknownEncoding as error:
        raise refusal from error


def check(model: nn.Module, method: str | Extension, **arguments: Any) -> PatchPlan:
    """Raise whatever `patch` would raise for the same arguments; change nothing.

    On a release of transformers that was not tested, that takes a proof at the first use.
    """
    plan = _plan(model, Extension.of(method, **arguments))
    require_proof(model, plan, _patch_unproven)
    return plan


def prove(model: nn.Module, kinds: Sequence[str] = KINDS) -> Proof:
    """Return the proof of kinds of methods on a tiny model of a model's class.

    Args:
        model: The model, which stays as it is; one on the meta device will do.
        kinds: See `rope_patch.patching.proof.checks.KINDS`.

    Raises:
        Refused: No static method can extend the model.
    """
    plan = _plan(model, Extension("linear", factor=4))
    return prove_kinds(model, plan, kinds, _patch_unproven)


def check_method(method: str | Extension, **arguments: Any) -> Proof:
    """Check a method or position map from outside, on a tiny random Llama.

    First the rules of its own: finite numbers, lengths that hold what `valid_until` promises, and
    for a map positions within reach, none of a later key. Then what every patch must keep to:
    later tokens change no earlier logits, cached steps, chunks and padded rows equal one pass,
    short texts keep their bits, undoing restores the bits. Takes seconds and downloads nothing.

    Args:
        method: A registered name, or a whole request, an `Extension`.
        **arguments: As for `patch`: `factor` (4 unless given, where one is needed), `length` and
            the method's options. The tiny model was trained on 64 tokens.

    Returns:
        The proof: `.is_ok`, and `.as_text()`, which names what fails, with what was expected and
        what came.

    Raises:
        ValueError: The method does not exist, or refuses the arguments.
    """
    # Here, because `patch` needs none of them.
    from transformers import LlamaConfig, LlamaForCausalLM

    from rope_patch.patching.proof.method_rules import FINITE, check_rules

    extension = Extension.of(method, **arguments)
    is_unsized = extension.factor is None and extension.length is None
    if is_unsized and not get_method(extension.method).is_dynamic:
        extension = replace(extension, factor=4)
    config = LlamaConfig(**_TINY_LLAMA)
    (geometry,) = read_geometries(config, None, extension.start).values()
    resolved, _ = extension.resolve(geometry.trained_length)
    rules = tuple(check_rules(resolved, geometry))
    wrong = [rule.name for rule in rules if rule.verdict != OK]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    problem = ""
    if wrong and FINITE not in wrong:
        try:
            _plan(model, extension)
        except Refused as refusal:
            problem = f"cannot be applied: {refusal}"
    if FINITE in wrong or problem:
        kind = KindProof(str(resolved), FAILED, rules, problem)
        return Proof(type(model).__name__, (kind,))
    proof = prove_kinds(model, _plan(model, extension), [str(resolved)], _patch_unproven, extension)
    (kind,) = proof.kinds
    verdict = FAILED if wrong else kind.verdict
    return replace(proof, kinds=(replace(kind, verdict=verdict, checks=rules + kind.checks),))


def _patch_unproven(model: nn.Module, extension: Extension) -> Patch:
    return _apply(model, _plan(model, extension))


@torch_defaults()
def _plan(model: nn.Module, extension: Extension) -> PatchPlan:
    active_patch = current(model)
    require_no_batching_manager(model)
    model_config = active_patch.model_config(model) if active_patch else None
    return make_plan(model, model_config, extension)


def unpatch(model: nn.Module) -> None:
    """Undo the patch that is in effect on a model.

    Raises:
        ValueError: There is none.
    """
    handle = active.current(model)
    if handle is None:
        raise Refused(f"{type(model).__name__} is not patched: there is nothing to undo")
    handle.undo()
