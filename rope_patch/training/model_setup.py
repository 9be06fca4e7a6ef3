"""From a recipe to a model that can be trained: loaded, patched, LoRA, the loss."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import set_seed

from rope_patch.patching import Patch, current
from rope_patch.patching.undo_log import UndoLog
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import load, read_model, read_tokenizer
from rope_patch.rope_config import read_geometries
from rope_patch.training import chunked_loss
from rope_patch.training.settings import Settings
from rope_patch.utils.provenance import fingerprint

logger = logging.getLogger("rope_patch")


@dataclass
class PreparedModel:
    """A model ready for training.

    Attributes:
        model: The model, patched; with LoRA, PEFT's.
        tokenizer: Its tokenizer.
        handle: The patch, or None with the method `none`.
        trained_length: Tokens of pretraining.
        target_length: Tokens that the context is extended to.
        row_length: Tokens of a row.
        loss: Who computes the loss: full, torch or liger.
        weights: Fingerprint of the weights as they were read.
    """

    model: Any
    tokenizer: Any
    handle: Patch | None
    trained_length: int
    target_length: int
    row_length: int
    loss: str
    swaps: UndoLog
    weights: str

    def finish(self) -> Any:
        """The trained model on its own: the plain loss again, and LoRA merged into the weights."""
        self.swaps.undo()
        if is_lora(self.model):
            self.model = self.model.merge_and_unload()
        self.model.config.use_cache = True
        return self.model.eval()


def prepare(settings: Settings) -> PreparedModel:
    """Loads, patches and equips the model that a recipe names.

    Raises:
        ValueError: Something that the recipe asks for does not fit the model.
    """
    asked, training = settings.extension, settings.training
    set_seed(training.seed)  # LoRA starts at random, and alike on all processes
    path = demo.resolve_model_path(asked.model)
    tokenizer = read_tokenizer(path)
    tokenizer.model_max_length = 10**9  # documents are cut into rows here
    kwargs = {"dtype": getattr(torch, asked.dtype), "attn_implementation": asked.attention}
    if asked.method == "none":
        model = read_model(path, **kwargs)
    else:
        model = load(
            path,
            asked.method,
            factor=asked.factor,
            length=asked.length,
            trained_length=asked.trained_length,
            layer_types=asked.layer_types,
            kernels=asked.kernels,
            **settings.method_options,
            **kwargs,
        )
    weights = fingerprint(model)
    model.config.use_cache = False
    if training.use_liger_kernel:
        training.liger_kernel_config = liger_kernels_without_conflicts(training.liger_kernel_config)
    handle = current(model)
    trained_length = asked.trained_length or _trained_length(model, handle)
    target = trained_length if handle is None or handle.length is None else handle.length
    if asked.lora_rank > 0:
        model = add_lora(model, settings)
    loss, swaps = chunked_loss.install_loss(model, settings.loss)
    return PreparedModel(
        model=model.train(),
        tokenizer=tokenizer,
        handle=handle,
        trained_length=trained_length,
        target_length=target,
        row_length=asked.train_length or target,
        loss=loss,
        swaps=swaps,
        weights=weights,
    )


def liger_kernels_without_conflicts(liger: dict[str, bool] | None) -> dict[str, bool]:
    """Liger's kernels without those whose places are taken."""
    logger.warning(
        "use_liger_kernel: Liger's own rotation stays off, as it would take the place of the "
        "extended one, and so does its loss (say loss: liger for that)"
    )
    taken = ("rope", "cross_entropy", "fused_linear_cross_entropy")
    return {**(liger or {}), **dict.fromkeys(taken, False)}


def add_liger(model: Any, config: dict[str, bool] | None) -> None:
    """Puts Liger's kernels on a model, as the Trainer does by itself."""
    try:
        from transformers.integrations.liger import apply_liger_kernel
    except ImportError as error:
        raise ValueError(
            "use_liger_kernel: this transformers has it in its Trainer only: leave out --loop"
        ) from error
    apply_liger_kernel(model, config)


def add_lora(model: Any, settings: Settings) -> Any:
    """LoRA on the attention, and embeddings and norms trained in full, as LongLoRA does.

    Source: LongLoRA, arXiv:2309.12307, section 3.3: without embeddings and norms, LoRA does not
    get to longer contexts.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which LoRA needs: pip install 'rope-patch[train]'"
        ) from error
    asked = settings.extension
    names = {name for name, _ in model.named_modules()}
    for target in asked.lora_targets:
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
    alpha: Any = asked.lora_alpha  # PEFT annotates an integer and scales by any number
    config = peft.LoraConfig(
        r=asked.lora_rank,
        lora_alpha=alpha,
        target_modules=asked.lora_targets,
        modules_to_save=modules_trained_in_full(model, asked.lora_trains) or None,
        ensure_weight_tying="embeddings" in asked.lora_trains and _has_tied_embeddings(model),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def modules_trained_in_full(model: Any, kinds: list[str]) -> list[str]:
    """The names by which PEFT finds the embeddings and norms of a model."""
    names = set()
    embeddings = model.get_input_embeddings()
    for name, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        if ("embeddings" in kinds and module is embeddings) or ("norms" in kinds and is_norm):
            names.add(name.split(".")[-1])
    return sorted(names)


def enable_checkpointing(model: Any) -> None:
    """Keeps the inputs of layers only, and computes the rest again in the backward pass."""
    # transformers 5.23 has a new name for it, which older ones do not know.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def is_lora(model: Any) -> bool:
    """Whether PEFT stands around the model."""
    return hasattr(model, "peft_config")


def _has_tied_embeddings(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))


def _trained_length(model: Any, handle: Patch | None) -> int:
    if handle is not None:
        return handle.trained_length
    config = model.config.get_text_config(decoder=True)
    return next(iter(read_geometries(config, None).values())).trained_length
