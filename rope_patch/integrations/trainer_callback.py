"""`RopePatchCallback`: a patch that survives whatever transformers' Trainer does to a model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.extension import Extension
from rope_patch.integrations.rollout import require_same_rollouts, warn_about_reference
from rope_patch.integrations.rotation_check import (
    describe,
    require_acting,
    require_recorded_rotation,
    require_requested,
)
from rope_patch.integrations.row_guard import install_row_guard, require_short_dataset
from rope_patch.integrations.save_hook import copy_sidecar, install_save_hooks
from rope_patch.patching import patch
from rope_patch.patching.active import current
from rope_patch.patching.encodings.handle import EncodingPatch
from rope_patch.patching.handle import Patch
from rope_patch.patching.replacement.extension import rotation_refusal
from rope_patch.patching.replacement.handle import current_encode
from rope_patch.pretrained.sidecar import (
    SIDECAR,
    extension_from_sidecar,
    make_sidecar,
    read_sidecar,
)
from rope_patch.pretrained.trained_rotation import mark_trained, mark_trained_as
from rope_patch.transformers_api.training import (
    ExportableState,
    TrainerCallback,
    require_overridable,
)
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")

_RECORD = "rotation"
CALLED_BACK = ("on_init_end", "on_train_begin", "on_step_end", "on_save", "on_push_begin")


class RopePatchCallback(TrainerCallback, ExportableState):
    """Callback for transformers' `Trainer`, and for those built on it, such as TRL's.

    `Trainer(model, args, callbacks=[RopePatchCallback("yarn", factor=4)])` trains a patched model:

    - The model is patched when the trainer is made, or when training begins. Without a method, it
      must be patched already, or come from a folder with a sidecar (`rope_patch.patch_checkpoint`,
      `rope_patch.save`), whose patch it then gets.
    - When training begins, and at each checkpoint, the patch must still act in the model that PEFT
      and accelerate have wrapped.
    - Every checkpoint and the final `save_model` hold the rotation as `rope_patch.save` writes it:
      in the config and in `rope_patch.json`, beside an adapter, too.
    - They record that the model was trained so: another patch, of whatever loads them, continues
      the trained rotation (docs/methods.md).
    - A run resumes only from checkpoints of the same rotation.
    - Rows that are longer than the target length are refused.

    Attributes:
        extension: The request; None to train the model as it is patched.
        handle: The patch in effect; None before there is one.
    """

    def __init__(self, method: str | Extension | None = None, **arguments: Any) -> None:
        """Set the request.

        Args:
            method: A name from `rope_patch.list_methods()`, or a whole request, an `Extension`;
                None for a model that is patched already.
            **arguments: As of `rope_patch.patch`: `factor` or `length`, ..., and the method's
                options.

        Raises:
            ValueError: There are arguments and no method, or the method is unknown.
        """
        if method is None and arguments:
            raise Refused(
                f"{', '.join(arguments)} goes with a method: name it too, as in "
                "RopePatchCallback('yarn', factor=4), or leave all out for a model that is patched"
            )
        require_overridable(TrainerCallback, type(self), *CALLED_BACK)
        self.extension = None if method is None else Extension.of(method, **arguments)
        self.handle: Patch | EncodingPatch | None = None

    def state(self) -> dict[str, Any]:
        """Return what transformers stores in a checkpoint's `trainer_state.json`."""
        extension = self.extension
        arguments = (
            {} if extension is None else {"method": extension.method, **extension.arguments()}
        )
        handle = self.handle
        trained = isinstance(handle, Patch) and handle.is_trained
        record = None if handle is None else make_sidecar(handle, False, trained)
        return {"args": arguments, "attributes": {}, _RECORD: record}

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Patch the model before accelerate wraps it."""
        if model is None:
            return
        self._find_patch(model)
        if self.handle is not None:
            require_same_rollouts(args, model, self.handle)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Check the wrapped model, the checkpoint that it resumes from and the rows."""
        had_patch = self.handle is not None
        self._find_patch(model, is_training=True)
        if self.handle is None:
            raise _no_patch(model, had_patch)
        handle = self.handle
        if isinstance(handle, Patch):
            require_acting(model, handle)
        if state.global_step > 0:
            self._require_same_run(model, state)
            mark_trained(model)
        install_save_hooks(model, handle)
        if isinstance(handle, Patch):
            install_row_guard(model, handle)
            loader = kwargs.get("train_dataloader")
            require_short_dataset(getattr(loader, "dataset", None), handle)
        require_same_rollouts(args, model, handle)
        warn_about_reference(args, model, handle)
        _raise_tokenizer_length(kwargs.get("processing_class"), handle)
        logger.info("training %s: %s", type(model).__name__, describe(handle))

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Record that the model is trained under its rotation, from the first step on."""
        if isinstance(self.handle, Patch) and not self.handle.is_trained:
            mark_trained(model)

    def on_save(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Check that the model still rotates as its checkpoint says."""
        if current(model) is None:
            raise _no_patch(model, had_patch=True)
        if isinstance(self.handle, Patch):
            require_acting(model, self.handle)

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the sidecar where the Trainer copies a checkpoint's other files to be uploaded."""
        if args.should_save and args.output_dir and Path(args.output_dir).is_dir():
            copy_sidecar(Path(args.output_dir), Path(args.output_dir))

    def _find_patch(self, model: nn.Module, *, is_training: bool = False) -> None:
        """Take the model's patch, or patch it as requested or as its folder records."""
        handle = current(model)
        if handle is not None:
            if self.extension is not None:
                require_requested(model, handle, self.extension)
            self.handle = handle
            return
        self.handle = None
        if current_encode(model) is not None:
            raise Refused(
                "RopePatchCallback cannot save a model that rope_patch.encode changed: expected "
                "one with the encoding of its class; train it without the callback, and save it "
                "with rope_patch.save"
            )
        sidecar = None if self.extension else _recorded_patch(model)
        extension = extension_from_sidecar(sidecar) if sidecar else self.extension
        if extension is None:
            return
        if is_training and rotation_refusal(model) is not None:
            raise Refused(
                f"{type(model).__name__} must be patched before its optimizer is made, as its "
                "positions are weights: give the callback to the trainer's callbacks=, or call "
                "rope_patch.patch first"
            )
        self.handle = patch(model, extension)
        mark_trained_as(model, sidecar or {})

    def _require_same_run(self, model: nn.Module, state: Any) -> None:
        """Raise unless the checkpoint of a resumed run has the model's rotation."""
        assert self.handle is not None
        stored: Any = (state.stateful_callbacks or {}).get(type(self).__name__)
        record = stored.get(_RECORD) if isinstance(stored, dict) else None
        checkpoint = f"the checkpoint at step {state.global_step}"
        if record is None:
            raise Refused(
                f"{checkpoint} records no rotation, so it was trained without RopePatchCallback: "
                "expected one of this callback's; load its folder as the model of a new run"
            )
        require_recorded_rotation(model, self.handle, record, checkpoint)


def _recorded_patch(model: nn.Module) -> dict[str, Any] | None:
    """Return the sidecar in a model's folder, if there is one."""
    config: Any = getattr(model, "config", None)
    folder = getattr(config, "_name_or_path", None)
    return read_sidecar(folder) if folder else None


def _no_patch(model: nn.Module, had_patch: bool) -> Refused:
    """Return the error for a model without a patch."""
    name = type(model).__name__
    if had_patch:
        return Refused(
            f"{name} has lost its patch: it was patched when the trainer was made, and something "
            "loaded or built it anew; name the method, RopePatchCallback('yarn', factor=4), to "
            "have it patched again when training begins"
        )
    return Refused(
        f"{name} is not patched: expected a model that rope_patch.patch or rope_patch.load "
        f"returned, or a folder with {SIDECAR}; or name the method, as in "
        "RopePatchCallback('yarn', factor=4)"
    )


def _raise_tokenizer_length(tokenizer: Any, handle: Patch | EncodingPatch) -> None:
    """Raise a tokenizer's `model_max_length` to the length of a patch, so that it is saved so.

    Engines serve the smaller of the tokenizer's and the model's.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    length = getattr(tokenizer, "model_max_length", None)
    if handle.length is not None and isinstance(length, int | float) and length < handle.length:
        tokenizer.model_max_length = handle.length
