"""Set up a recipe's model for training: load, patch, add LoRA, install the loss."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, set_seed

from rope_patch.entry_points import patch, patch_rotation
from rope_patch.extension import Extension
from rope_patch.original_config import original_config
from rope_patch.patching import Patch, current
from rope_patch.patching.architecture.rotary_modules import find_rotaries, is_mrope
from rope_patch.patching.undo_log import UndoLog
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import (
    auto_class,
    load,
    read_config,
    read_model,
    read_original_config,
    read_tokenizer,
)
from rope_patch.pretrained.sidecar import mark_trained
from rope_patch.rope_config import read_geometries
from rope_patch.training.data.arguments import WITHOUT_MASKS
from rope_patch.training.objective import chunked_loss
from rope_patch.training.objective.arguments import require_known_length
from rope_patch.training.objective.chunk_sums import ZLoss
from rope_patch.training.objective.chunked_loss import Objective
from rope_patch.training.objective.distillation import (
    Distillation,
    Teacher,
    load_teacher,
    shares_teacher_weights,
    teacher_dtype,
)
from rope_patch.training.settings import Settings
from rope_patch.utils.errors import Refused
from rope_patch.utils.installation import install_hint
from rope_patch.utils.provenance import fingerprint

logger = logging.getLogger("rope_patch")


@dataclass
class PreparedModel:
    """A model ready for training.

    Attributes:
        model: The patched model; PEFT's wrapper of it with LoRA.
        tokenizer: The model's tokenizer.
        handle: The patch in training, or None with the method `none`.
        trained_length: Length of pretraining in tokens.
        target_length: Extended length in tokens.
        row_length: Tokens per row.
        loss: The loss in use: full, torch or liger.
        swaps: Undo log of the loss.
        objective: The loss's terms beside the cross-entropy.
        weights: Fingerprint of the weights as loaded.
        undo_length: The length that the finished model states, in tokens, if the patch is for
            training alone; None if it stays.
    """

    model: Any
    tokenizer: Any
    handle: Patch | None
    trained_length: int
    target_length: int
    row_length: int
    loss: str
    swaps: UndoLog
    objective: Objective
    weights: str
    undo_length: int | None = None

    @property
    def follows_length(self) -> bool:
        """Return whether the rotation depends on how long a row's longest document is."""
        handle = self.handle
        return handle is not None and handle.method.is_length_dependent(handle.trained_length)

    def mark_trained(self) -> None:
        """Record in the model's config that it was trained under the rotation that lasts."""
        if self.undo_length is None:
            mark_trained(self.model)

    def finish(self) -> Any:
        """Return the trained model as it is used: its own loss, LoRA merged, a lasting patch."""
        self.swaps.undo()
        self.objective.distillation = None  # the original model is not needed any more
        if is_lora(self.model):
            self.model = self.model.merge_and_unload()
        if self.undo_length is not None:
            assert self.handle is not None
            self.handle.undo()
            self.handle = None
            config = self.model.config.get_text_config(decoder=True)
            config.max_position_embeddings = self.undo_length
        self.model.config.use_cache = True
        return self.model.eval()


def prepare_model(settings: Settings) -> PreparedModel:
    """Load and patch a recipe's model, add LoRA, and install the loss.

    Raises:
        ValueError: The recipe does not fit the model.
    """
    extension, training = settings.extension, settings.training
    set_seed(training.seed)  # the same random LoRA weights on all processes
    path = demo.resolve_model_path(extension.model)
    tokenizer = read_tokenizer(path)
    tokenizer.model_max_length = 10**9  # no warnings: packing cuts documents into rows
    load_options = {
        "dtype": getattr(torch, extension.dtype),
        "attn_implementation": extension.attention,
    }
    model = _load(path, settings, **load_options)
    _require_document_masks(model, settings)
    weights = fingerprint(model)
    model.config.use_cache = False
    if training.use_liger_kernel:
        training.liger_kernel_config = liger_kernels_without_conflicts(training.liger_kernel_config)
    handle = current(model)
    trained_length = extension.trained_length
    if trained_length is None:
        trained_length = _trained_length(model, handle)
    target = trained_length if handle is None or handle.length is None else handle.length
    undo_length = None
    if settings.data.positions == "leaky":
        target = settings.leaky_target(trained_length)
        undo_length = target
    row_length = target if extension.train_length is None else extension.train_length
    _require_short_rows(settings.data.positions, row_length, trained_length, target)
    if settings.data.positions == "leaky":
        handle = _patch_leaky(model, settings.request(), row_length, target)
    distillation = None
    if settings.objective.distillation_weight > 0:
        short_length = settings.data.short_length
        if short_length is None:
            short_length = min(trained_length, row_length)
        require_known_length(settings.objective, short_length, trained_length)
        distillation = _make_distillation(path, model, settings, load_options)
    if extension.lora_rank > 0:
        model = add_lora(model, settings)
        if settings.stage is not None and settings.stage.previous is not None:
            load_adapter_weights(model, settings.stage.previous.adapter)
            weights = fingerprint(model)
    objective = make_objective(settings, distillation)
    loss, swaps = chunked_loss.install_loss(model, settings.loss, objective)
    return PreparedModel(
        model=model.train(),
        tokenizer=tokenizer,
        handle=handle,
        trained_length=trained_length,
        target_length=target,
        row_length=row_length,
        loss=loss,
        swaps=swaps,
        objective=objective,
        weights=weights,
        undo_length=undo_length,
    )


def _require_short_rows(positions: str, row_length: int, trained: int, target: int) -> None:
    """Raise unless rows have a length that their positions are made for; lengths in tokens."""
    if positions == "skip" and row_length >= target:
        raise Refused(
            f"positions: skip gives short rows the distances of {target:,} tokens: expected a "
            f"train_length below that, such as {trained:,}, got {row_length:,}"
        )
    if positions == "leaky" and (row_length > trained or trained >= target):
        raise Refused(
            "positions: leaky gives rows of the trained length the distances of longer texts: "
            f"expected a train_length of at most {trained:,} and a target above that, got rows of "
            f"{row_length:,} and a target of {target:,}"
        )


def _patch_leaky(model: Any, request: Extension, row_length: int, target_length: int) -> Patch:
    """Patch a model so that short rows have the distances of about one and a half targets."""
    # Far distances grow faster, by the inverse of Leaky ReRoPE; the finished model reads without
    # it. J. Su, kexue.fm/archives/9728: a window of a quarter of the row, and k = 1 / (2 factor).
    window, k = max(1, row_length // 4), row_length / (2 * target_length)
    return patch_rotation(
        model,
        replace(
            request,
            method="leaky-rerope",
            factor=None,
            length=None,
            options={"window": window, "k": k, "temperature": "none"},
        ),
    )


def _make_distillation(
    path: Any, model: Any, settings: Settings, load_options: dict[str, Any]
) -> Distillation:
    """Load the original model, which shares the weights that LoRA freezes."""
    objective = settings.objective
    shares_weights = shares_teacher_weights(settings)
    if not shares_weights:
        load_options = load_options | {"dtype": teacher_dtype(settings)}
    original = load_teacher(path, model, shares_weights=shares_weights, **load_options)
    return Distillation(
        Teacher(original), objective.distillation_weight, objective.distillation_temperature
    )


def _load(path: Any, settings: Settings, **load_options: Any) -> Any:
    """Load and patch a model; in a later stage, with the weights of the stage before."""
    # A stage rotates as if it were the first one: the rotation is computed from the original
    # model's config, never from the patch of another stage. With LoRA the weights are the original
    # model's, because the adapter goes on.
    method, stage = settings.extension.method, settings.stage
    if stage is None or stage.previous is None or settings.extension.lora_rank > 0:
        if method == "none":
            return read_model(path, **load_options)
        return load(path, settings.request(), **load_options)
    weights = stage.previous.model
    if method == "none":
        return read_model(weights, config=read_config(path), **load_options)
    request = settings.request()
    config = read_original_config(path, request.start, request.trained_length)
    model = read_model(weights, config=config, **load_options)
    patch(model, request)
    return model


def make_objective(settings: Settings, distillation: Distillation | None = None) -> Objective:
    """Return the terms that a recipe adds to the cross-entropy, and what takes its place."""
    coefficient = settings.extension.z_loss
    return Objective([ZLoss(coefficient)] if coefficient else [], distillation)


def _require_document_masks(model: Any, settings: Settings) -> None:
    """Raise if packed documents would see each other."""
    # Models with images count three positions a token, and some of them (Qwen2-VL) make no mask
    # from positions that start anew.
    if settings.data.needs_masks and auto_class(model.config) is AutoModelForImageTextToText:
        config = model.config.get_text_config(decoder=True)
        if is_mrope(find_rotaries(model)[0].module, config):
            raise Refused(
                f"documents packed in a row may see each other in {type(model).__name__}, whose "
                f"tokens have several positions (M-RoPE): expected {WITHOUT_MASKS}, got packing "
                f"{settings.data.packing} and short_share {settings.data.short_share:g}"
            )


def liger_kernels_without_conflicts(liger: dict[str, bool] | None) -> dict[str, bool]:
    """Return Liger's settings without the kernels that would replace ours; warn of it."""
    logger.warning(
        "use_liger_kernel: Liger's own rotation stays off, as it would take the place of the "
        "extended one, and so does its loss (say loss: liger for that)"
    )
    conflicting = ("rope", "cross_entropy", "fused_linear_cross_entropy")
    return {**(liger or {}), **dict.fromkeys(conflicting, False)}


def add_lora(model: Any, settings: Settings) -> Any:
    """Add LoRA to the attention, and train embeddings and norms in full, as LongLoRA does.

    Source: LongLoRA, arXiv:2309.12307, section 3.3: without embeddings and norms, LoRA does not
    extend the context.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which LoRA needs: {install_hint('train')}"
        ) from error
    extension = settings.extension
    names = {name for name, _ in model.named_modules()}
    for target in extension.lora_targets:
        if not any(name.split(".")[-1] == target for name in names):
            raise ValueError(
                f"lora_targets: {type(model).__name__} has no layer {target!r}; it has "
                + ", ".join(
                    sorted(
                        {
                            n.split(".")[-1]
                            for n, m in model.named_modules()
                            if isinstance(m, torch.nn.Linear)
                        }
                    )
                )
            )
    alpha: Any = extension.lora_alpha  # PEFT annotates an integer and scales by any number
    config = peft.LoraConfig(
        r=extension.lora_rank,
        lora_alpha=alpha,
        target_modules=extension.lora_targets,
        modules_to_save=modules_trained_in_full(model, extension.lora_trains) or None,
        ensure_weight_tying="embeddings" in extension.lora_trains and _has_tied_embeddings(model),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def adapter_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return what LoRA trains: the adapter, and embeddings and norms in full."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def load_adapter_weights(model: Any, file: Path) -> None:
    """Load what LoRA trained in the stage before.

    Raises:
        ValueError: It was trained on other layers.
    """
    trained, tensors = adapter_weights(model), load_file(file)
    if trained.keys() != tensors.keys():
        names = sorted(trained.keys() ^ tensors.keys())
        raise ValueError(
            f"{file} lacks layers that LoRA trains here, or has others: {', '.join(names[:3])}; "
            "expected the same lora_targets and lora_trains as in the stage before"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[name])


def modules_trained_in_full(model: Any, groups: list[str]) -> list[str]:
    """Return PEFT's names of a model's embeddings and norms."""
    names = set()
    embeddings = model.get_input_embeddings()
    for name, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        if ("embeddings" in groups and module is embeddings) or ("norms" in groups and is_norm):
            names.add(name.split(".")[-1])
    return sorted(names)


def is_lora(model: Any) -> bool:
    """Return whether PEFT wraps the model."""
    return hasattr(model, "peft_config")


def _has_tied_embeddings(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))


def _trained_length(model: Any, handle: Patch | None) -> int:
    if handle is not None:
        return handle.trained_length
    config = original_config(model.config.get_text_config(decoder=True))
    return next(iter(read_geometries(config, None).values())).trained_length
