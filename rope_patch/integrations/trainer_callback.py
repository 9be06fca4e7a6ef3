"""Keep a patch through whatever transformers' Trainer does to a model: `RopePatchCallback`.

It checks that the model still rotates as patched, and that rows fit the patched length
(`RowGuard`), and has every `save_pretrained` write the rotation (`SaveHook`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch.encodings.active import current
from rope_patch.encodings.replacement.encoding import rotation_refusal
from rope_patch.encodings.replacement.entry_point import current_encode
from rope_patch.encodings.sites.handle import EncodingPatch
from rope_patch.entry_points import check, patch
from rope_patch.extension import Extension
from rope_patch.integrations.rollout import require_same_rollouts, warn_about_reference
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.handle import Patch
from rope_patch.patching.length_warning import outgrown_length
from rope_patch.patching.restoration import lost_patched_buffers
from rope_patch.patching.stamp import innermost_decoders
from rope_patch.pretrained.adapters import is_same_encoding
from rope_patch.pretrained.encoding_checkpoint import is_encoding_sidecar
from rope_patch.pretrained.saving import ADAPTER_CONFIG, record_adapters, record_patch
from rope_patch.pretrained.sidecar import (
    SIDECAR,
    describe_patch,
    extension_from_sidecar,
    make_sidecar,
    mark_trained,
    mark_trained_as,
    matches_sidecar,
    read_sidecar,
    rotate_alike,
)
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
    """Raise the `model_max_length` that a tokenizer saves to the length of a patch."""
    # Engines serve the smaller of the tokenizer's and the model's length.
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    length = getattr(tokenizer, "model_max_length", None)
    if handle.length is not None and isinstance(length, int | float) and length < handle.length:
        tokenizer.model_max_length = handle.length


def require_acting(model: nn.Module, handle: Patch) -> None:
    """Raise unless a patch acts in all of a model: its modules, frequencies and config.

    Args:
        model: The model, in whatever wrappers.
        handle: The patch in effect.

    Raises:
        ValueError: A rotary module is not the patched one, holds other frequencies, or the config
            states another rotation; says what to do.
    """
    rotaries = find_rotaries(model)
    replaced = [r for r in rotaries if vars(r.module).get("_rope_patch") is not handle]
    if replaced:
        raise Refused(
            f"{len(replaced)} of {len(rotaries)} rotary modules were replaced after the model was "
            f"patched with {handle}, and rotate as unpatched: patch the model after whatever "
            "builds its modules, or name the method in RopePatchCallback"
        )
    lost = [f"{type(rotary.module).__name__}.{name}" for rotary, name in _lost(model, handle)]
    if lost:
        raise Refused(
            f"{', '.join(lost)} no longer holds the frequencies of {handle}: something moved, "
            "cast or reinitialised them after the model was patched; rope_patch.restore(model) "
            "sets them again"
        )
    config: Any = getattr(model, "config", None)
    patched_config: Any = rotaries[0].module.config
    text = config.get_text_config(decoder=True) if config is not None else patched_config
    stated, patched = text.rope_parameters, patched_config.rope_parameters
    if stated != patched:
        raise Refused(
            f"the model's config was replaced after it was patched with {handle}, so that a saved "
            f"model would rotate otherwise: expected rope_parameters {patched}, got {stated}; "
            "change the config before the model is patched"
        )


def _lost(model: nn.Module, handle: Patch) -> list[Any]:
    # Frequencies of a model on meta have no values to compare.
    return [
        (rotary, name)
        for rotary, name in lost_patched_buffers(model, handle)
        if not getattr(rotary.module, name).is_meta
    ]


def require_requested(
    model: nn.Module, handle: Patch | EncodingPatch, extension: Extension
) -> None:
    """Raise unless a model is patched as requested.

    Raises:
        ValueError: It is patched otherwise; names both.
    """
    if isinstance(handle, EncodingPatch):
        wanted = {**extension.arguments(), "method": extension.method}
        got = {**handle.extension.to_dict(), **handle.extension.options}
        same = all(got.get(name) == value for name, value in wanted.items())
        asked = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    else:
        requested = Patch(check(model, extension))
        same, asked = rotate_alike(requested, handle), describe_patch(requested)
    if not same:
        raise Refused(
            f"RopePatchCallback is to train with {asked}, and the model is patched with "
            f"{describe(handle)}: rope_patch.unpatch(model) first, or leave the callback's method "
            "out to train it as it is"
        )


def require_recorded_rotation(
    model: nn.Module, handle: Patch | EncodingPatch, sidecar: dict[str, Any], checkpoint: str
) -> None:
    """Raise unless a model rotates as a checkpoint's did.

    Args:
        model: The model that resumes.
        handle: Its patch.
        sidecar: What the checkpoint records of its patch.
        checkpoint: The checkpoint, for the message.

    Raises:
        ValueError: It rotates otherwise, or cannot rotate so.
    """
    resume = f"{checkpoint} cannot be resumed: it was trained with"
    advice = (
        "resume with the checkpoint's own rotation, or load its folder as the model of a new run"
    )
    recorded = f"{sidecar['method']}, {sidecar['target_length'] or 'any'} tokens"
    if isinstance(handle, EncodingPatch) or is_encoding_sidecar(sidecar):
        same = (
            isinstance(handle, EncodingPatch)
            and is_encoding_sidecar(sidecar)
            and is_same_encoding(handle, sidecar)
        )
    else:
        try:
            trained = Patch(check(model, extension_from_sidecar(sidecar)))
        except (Refused, TypeError) as error:
            raise Refused(
                f"{resume} {recorded}, which this model cannot be: {error}; {advice}"
            ) from error
        recorded = describe_patch(trained)
        same = matches_sidecar(trained, sidecar) and rotate_alike(trained, handle)
    if not same:
        raise Refused(
            f"{resume} {recorded}, and the model is patched with {describe(handle)}; {advice}"
        )


def describe(handle: Patch | EncodingPatch) -> str:
    """Describe a patch in one line."""
    return describe_patch(handle) if isinstance(handle, Patch) else str(handle)


_ROWS_AT_ONCE = 1000  # rows of a dataset whose lengths are read at once


class RowGuard:
    """Pre-hook of decoders that refuses rows beyond the patched length in training.

    Packed rows count by their documents, if their positions start anew with each.

    Attributes:
        length: The patched length in tokens.
        rotation: The patch, for the message.
    """

    def __init__(self, length: int, rotation: str) -> None:
        self.length = length
        self.rotation = rotation

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not (decoder.training and torch.is_grad_enabled()):
            return
        longest = outgrown_length(decoder, args, kwargs, self.length)
        if longest is not None:
            raise _row_refusal(longest, self.length, self.rotation)


def install_row_guard(model: nn.Module, handle: Patch) -> None:
    """Have a model's decoders refuse training rows that are too long, until the patch ends."""
    if handle.longest_text is None:
        return
    guard = RowGuard(handle.longest_text, str(handle))
    for decoder in innermost_decoders(model, find_rotaries(model)):
        handle.undo_log.hook(decoder, before=guard)


def require_short_dataset(dataset: Any, handle: Patch) -> None:
    """Raise if a dataset of tokenized rows holds a row beyond the patched length.

    Reads lengths alone, and only of a `datasets.Dataset`. Streams, untokenized rows, and rows with
    positions of their own are left to the guard at each step.

    Raises:
        ValueError: It does.
    """
    columns = set(getattr(dataset, "column_names", None) or ())
    if handle.longest_text is None or "position_ids" in columns or "input_ids" not in columns:
        return
    if not (hasattr(dataset, "with_format") and hasattr(dataset, "select_columns")):
        return
    # TRL lists the documents of each packed row.
    column = "seq_lengths" if "seq_lengths" in columns else "input_ids"
    longest = 0
    if hasattr(dataset, "__len__"):
        rows = dataset.select_columns([column]).with_format("arrow")
        for table in rows.iter(batch_size=_ROWS_AT_ONCE):
            longest = max(longest, _longest_row(table[column], lists=column == "seq_lengths"))
    if longest > handle.longest_text:
        raise _row_refusal(longest, handle.longest_text, str(handle))


def _longest_row(column: Any, *, lists: bool) -> int:
    """Return the longest row of a column of tokens, or the largest number of a column of lists."""
    import pyarrow.compute as compute

    numbers = compute.list_flatten(column) if lists else compute.list_value_length(column)
    return compute.max(numbers).as_py() or 0


def _row_refusal(longest: int, length: int, rotation: str) -> Refused:
    return Refused(
        f"a row of {longest:,} tokens is longer than the {length:,} that the model is patched for "
        f"({rotation}): cut rows to {length:,} tokens (max_length={length} in TRL), or patch with "
        f"length={longest} or more"
    )


_SAVE = "save_pretrained"


class SaveHook:
    """The `save_pretrained` of one model, which also writes the patch that is in effect.

    A trainer saves checkpoints and the finished model by this method. The folder then is what
    `rope_patch.save` makes: a config that states the rotation, and the sidecar; for an adapter the
    sidecar alone.
    """

    def __init__(self, original_method: Any, model: Any) -> None:
        self.original_method = original_method
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.original_method(save_directory, *args, **kwargs)
        handle = current(self.model)
        # Only one process writes.
        if handle is None or not kwargs.get("is_main_process", args[0] if args else True):
            return result
        folder = Path(save_directory)
        adapters = list(_adapter_folders(folder, self.model))
        if adapters:
            record_adapters([folder, *adapters], self.model, handle)
        elif (folder / "config.json").is_file():
            record_patch(folder, self.model, handle)
        if kwargs.get("push_to_hub"):
            logger.warning(
                "save_pretrained(push_to_hub=True) uploads before %s is written: push afterwards, "
                "with model.push_to_hub(name)",
                SIDECAR,
            )
        return result


def install_save_hooks(model: nn.Module, handle: Patch | EncodingPatch) -> None:
    """Have a model, and the base within PEFT's wrapper, write their patch when they are saved.

    Args:
        model: The model, or anything around it.
        handle: Its patch; the hooks end with it.
    """
    for owner in _saved_models(model):
        if not isinstance(vars(owner).get(_SAVE), SaveHook):
            handle.undo_log.set(owner, _SAVE, SaveHook(owner.save_pretrained, owner))


def copy_sidecar(source: Path, target: Path) -> None:
    """Copy the sidecar of the newest checkpoint in a run's folder, if there is one, to a folder."""
    checkpoints = sorted(source.glob(f"checkpoint-*/{SIDECAR}"), key=lambda p: p.stat().st_mtime)
    if checkpoints:
        sidecar = json.loads(checkpoints[-1].read_text())
        (target / SIDECAR).write_text(json.dumps(sidecar, indent=2) + "\n")


def _saved_models(model: nn.Module) -> Iterator[Any]:
    """Yield the outermost model that can be saved, and the base within PEFT's wrapper."""
    outer: Any = next((m for m in model.modules() if hasattr(type(m), _SAVE)), None)
    if outer is None:
        return
    yield outer
    if hasattr(outer, "peft_config") and hasattr(outer, "get_base_model"):
        yield outer.get_base_model()


def _adapter_folders(folder: Path, model: Any) -> Iterator[Path]:
    """Yield the folders in which PEFT has just written a model's adapters."""
    if not hasattr(model, "peft_config"):
        return
    for path in (folder, *(folder / name for name in model.peft_config)):
        if (path / ADAPTER_CONFIG).is_file():
            yield path
