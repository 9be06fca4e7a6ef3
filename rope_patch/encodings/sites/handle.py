"""The handle of a patched model that does not rotate."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_patch.encodings.sites.plan import EncodingFacts, EncodingPlan, make_encoding_plan
from rope_patch.encodings.sites.site import Site
from rope_patch.extension import Extension
from rope_patch.patching.dynamic.generation import (
    guard_batching,
    require_no_batching_manager,
    slots_refusal,
)
from rope_patch.patching.undo_log import ConfigOverride, UndoLog
from rope_patch.utils.errors import text_html

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("rope_patch")
_MARK = "_rope_patch_encoding"


class EncodingPatch:
    """Handle of a model whose tables of positions, slopes or buckets are extended.

    Works as a context manager: leaving the block undoes the patch, and applies again the one that
    it replaced.

    Attributes:
        extension: The request, with the lengths that were decided.
        method: The method's name.
        trained_length: Tokens of pretraining.
        length: Target length in tokens; None if the method follows the text.
        factor: length / trained_length, or None.
        original: The config's fields that changed, with their values before the patch.
    """

    def __init__(self, plan: EncodingPlan) -> None:
        stretch = plan.stretch
        self.extension = replace(plan.extension, trained_length=stretch.trained_length)
        self.method = stretch.method
        self.trained_length = stretch.trained_length
        self.length = stretch.length
        self.factor = None if stretch.length is None else stretch.factor
        self.original: dict[str, Any] = {}
        self._plan = plan
        self._undo_log = UndoLog()
        self._config_override = ConfigOverride()
        self._active = False
        self._previous: EncodingPatch | None = None

    @property
    def active(self) -> bool:
        """Return whether the patch is in effect."""
        return self._active

    @property
    def undo_log(self) -> UndoLog:
        """Return the log of the changes: what other code adds to it ends with the patch."""
        return self._undo_log

    @property
    def sites(self) -> list[Site]:
        """Return where positions enter, those that changed alone."""
        return self._plan.sites

    @property
    def model(self) -> PreTrainedModel:
        """Return the transformers model that is extended, within what was given."""
        return self._plan.model

    @property
    def facts(self) -> EncodingFacts:
        """Return facts of the sites that changed, as the model is now."""
        return self._plan.facts

    def tables(self) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
        """Yield each table's module and attribute, and its rows before the patch and now."""
        for site in self.sites:
            if (name := site.facts(self.model).table) is not None:
                original = self._undo_log.original(site.module, name)
                yield site.name, name, original, getattr(site.module, name)

    def undo(self) -> None:
        """Restore the unpatched model, bit for bit; do nothing if the patch is not active.

        A table's own Parameter is put back, so optimizers that hold it go on with it.
        """
        foreign = self._undo_log.undo() + self._config_override.undo()
        self._active = False
        if foreign:
            logger.warning(
                "%s: replaced after the model was patched, so undoing leaves it as it is",
                ", ".join(foreign),
            )

    def summary(self) -> str:
        """Return a few lines that describe what is in effect."""
        lines = [str(self) + ("" if self.active else " (undone)")]
        lines += [f"  {site.describe(self._plan.stretch)}" for site in self.sites]
        return "\n".join(lines)

    def apply(self) -> None:
        """Change the model; restore it if any step fails."""
        plan = self._plan
        try:
            fields = plan.config_fields
            config = plan.model.config
            self.original = {name: getattr(config, name) for name in fields}
            for site in plan.sites:
                site.apply(plan.model, plan.stretch, self._undo_log)
            reading = next((site for site in plan.sites if site.reads_slots), None)
            guard_batching(
                plan.model,
                self._undo_log,
                rotation=f"{[site.name for site in plan.sites]} {plan.stretch}",
                refusal=slots_refusal(reading.kind) if reading else None,
            )
            self._undo_log.set(plan.model, _MARK, self)
            if fields:
                self._config_override.apply(plan.outer, type(plan.model.config), fields)
            self._active = True
        except BaseException:
            self.undo()
            raise

    def __enter__(self) -> EncodingPatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
        if self._previous is not None:
            self._previous.apply()

    def __str__(self) -> str:
        length = "any length" if self.length is None else f"{self.length:,} tokens"
        return f"{self.method}, {self.trained_length:,} → {length}"

    def __repr__(self) -> str:
        return f"<EncodingPatch: {self}{'' if self.active else ' (undone)'}>"

    def _repr_html_(self) -> str:
        return text_html(self.summary() if self.active else repr(self))


def patch_encoding(model: nn.Module, extension: Extension) -> EncodingPatch:
    """Extend a model that does not rotate, in place; a patch that is in effect is replaced.

    Raises:
        ValueError: The request cannot be met, or would change nothing. The model is as before.
        TypeError: A value of the wrong type. The model is as before.
    """
    require_no_batching_manager(model)
    before = current_encoding(model)
    if before is not None:
        before.undo()
    try:
        handle = EncodingPatch(make_encoding_plan(model, extension))
        handle._previous = before
        handle.apply()
    except BaseException:
        if before is not None:
            before.apply()
        raise
    return handle


def current_encoding(model: nn.Module) -> EncodingPatch | None:
    """Return the handle of the encoding patch that is in effect on a model, or None."""
    for module in model.modules():
        if handle := vars(module).get(_MARK):
            return handle
    return None
