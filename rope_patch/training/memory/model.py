"""Model of the peak allocation of one training step of Llama-like models, from a config alone.

The peak consists of weights, gradients, AdamW's states, saved activations, logits, and the
workspace of one recomputed layer. Experts count as the MLP that a token passes through.

`recipes/experiments/check_memory_plan.py` measures the same on a CPU, to the byte. What a single
CPU lacks (DDP, Liger, offloading, torch's chunked loss in 16 bits) comes from reading the code.
FSDP2 and context parallelism were compared with two and four processes on CPUs: the model was 4 %
below to 22 % above the peaks of small models, which vary from run to run. No GPU was ever measured:
`RESERVE` stands for CUDA, NCCL and fragmentation.

Context parallelism adds what attention holds beside its own part of a row. With `allgather`
(accelerate's default) every device gathers the keys and values of the whole row. With `ring` the
devices pass them around, so that each holds its own part and the one in flight. With `ulysses`
(DeepSpeed) the devices exchange heads: each attends over the whole row, for its share of the heads.
Two processes on a CPU measured all three; tests/distributed compares.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from rope_patch.pretrained.loading import empty_model
from rope_patch.training.objective.chunk_sums import COPIES, chunk_length
from rope_patch.training.objective.distillation import DISTILLATION_COPIES
from rope_patch.utils.errors import Refused

# Share of a device's memory left free for CUDA's context, NCCL's buffers and fragmentation; stated.
RESERVE = 0.08
LENGTH_STEP = 1024  # tokens; fitting lengths are multiples of it
MAX_LENGTH = 2**24  # tokens; upper end of the search


def memory_need(config: Any, *, length: int, **setup_fields: Any) -> MemoryNeed:
    """Return the peak memory of a step on each device.

    Args:
        config: Config of a causal language model.
        length: Tokens per row.
        **setup_fields: See `TrainingSetup`.
    """
    setup = TrainingSetup(**setup_fields)
    if length < 1 or setup.rows < 1 or setup.shards < 1 or setup.context_parallel < 1:
        raise ValueError(
            "length, rows, shards and context_parallel must be at least 1, got "
            f"{length}, {setup.rows}, {setup.shards}, {setup.context_parallel}"
        )
    if setup.loss not in ("full", "torch", "liger"):
        raise ValueError(f"loss must be full, torch or liger, got {setup.loss!r}")
    return max(
        _StepMemory(model_shape(config), setup, length).moments(), key=lambda need: need.total
    )


def host_memory_need(config: Any, *, length: int, **setup_fields: Any) -> int:
    """Return the bytes that a step keeps in CPU memory for each device: all that is offloaded."""
    setup = TrainingSetup(**setup_fields)
    return _StepMemory(model_shape(config), setup, length).host_bytes()


def longest_row(config: Any, memory: int, **setup: Any) -> int:
    """Return the longest row that fits.

    Args:
        config: Config of a causal language model.
        memory: Bytes of a device, of which `RESERVE` stays free.
        **setup: See `TrainingSetup`.

    Returns:
        Tokens, a multiple of `LENGTH_STEP` and at most `MAX_LENGTH`; 0 if not even `LENGTH_STEP`
        tokens fit.
    """
    usable_bytes = memory * (1 - RESERVE)
    low, high = 0, MAX_LENGTH // LENGTH_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if memory_need(config, length=middle * LENGTH_STEP, **setup).total <= usable_bytes:
            low = middle
        else:
            high = middle - 1
    return low * LENGTH_STEP


_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Settings of a training step; the defaults are a recipe's on one device, in float32.

    Attributes:
        rows: Rows per device and batch.
        dtype: Type of weights, gradients and optimizer states.
        compute_dtype: Type that autocast computes in; None means `dtype`.
        lora_rank: Rank of LoRA; 0 trains all weights.
        lora_targets: Linear layers with LoRA.
        lora_trains: Modules trained in full beside LoRA: embeddings, norms.
        loss: full, torch or liger.
        distils: Whether short rows are distilled from the original model.
        teacher_dtype: Type of the original model's own weights; None if it shares the trained
            model's frozen ones.
        loss_terms: Whether the loss has terms beside the cross-entropy, such as z-loss.
        checkpointing: Whether only layer inputs are saved (activation checkpointing).
        offload_activations: Whether saved activations move to CPU memory.
        attention: transformers' name of the attention implementation.
        packed_masks: Whether rows contain documents that do not see each other.
        shards: Devices that share the weights (FSDP).
        context_parallel: Devices that share a row.
        context_kind: How they share attention: allgather, ring or ulysses (see above).
        offload_weights: Whether the shards of weights, gradients and optimizer states are in CPU
            memory (FSDP's offload_params, DeepSpeed's offload_param).
        offload_optimizer: Whether gradients and optimizer states are in CPU memory (DeepSpeed's
            offload_optimizer).
        replicated: Whether each device has all weights and averages gradients (DDP).
        averages: Whether the finished model is the mean of several checkpoints.
        accumulates: Whether gradients of several batches are summed.
        optimizer: transformers' name of the optimizer.
    """

    rows: int = 1
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = _LORA_TARGETS
    lora_trains: tuple[str, ...] = ("embeddings", "norms")
    loss: str = "torch"
    loss_terms: bool = False
    distils: bool = False
    teacher_dtype: torch.dtype | None = None
    checkpointing: bool = True
    offload_activations: bool = False
    attention: str = "sdpa"
    packed_masks: bool = False
    shards: int = 1
    context_parallel: int = 1
    context_kind: str = "allgather"
    offload_weights: bool = False
    offload_optimizer: bool = False
    replicated: bool = False
    averages: bool = False
    accumulates: bool = False
    optimizer: str = "adamw_torch_fused"


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device at the peak of a step.

    Attributes:
        parameters: Weights, frozen ones included.
        gradients: Gradients of weights.
        optimizer: AdamW's two states.
        activations: Activations saved for the backward pass.
        logits: The loss with its logits and gradients.
        workspace: Temporaries of one layer: its recomputation and backward pass, its cast or
            gathered weights, masks.
        moment: The moment of the peak: loss, distillation, last layer, first layer,
            embeddings, optimizer or averaging.
        teacher: Weights of the original model that short rows are distilled from.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int
    moment: str = ""
    teacher: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the bytes by part; those of the original model only if it is there."""
        names = (f.name for f in fields(self) if f.name != "moment")
        sizes = {name: getattr(self, name) for name in names}
        return {name: size for name, size in sizes.items() if size or name != "teacher"}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model: widths in numbers per token, all else in numbers of weights."""

    layers: int
    hidden: int
    heads: int
    query: int
    key: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    matrix_weights_per_layer: int
    norm_weights: int
    extra_norm_width: int  # widths of a layer's norms beyond the usual two
    weights: int
    linears: dict[str, int]  # sum of input and output widths over all layers, by name

    @property
    def embedding_weights(self) -> int:
        """Return the number of weights of the embeddings; an untied head has as many."""
        return self.vocab * self.hidden


def model_shape(config: Any) -> ModelShape:
    """Return the sizes of a config's model, which is built without weights."""
    config_class: Any = type(config)
    return _cached_model_shape(config.to_json_string(use_diff=False), config_class)


@lru_cache(maxsize=16)
def _cached_model_shape(text: str, config_class: Any) -> ModelShape:
    model = empty_model("the model", config_class.from_dict(json.loads(text)))
    decoder_config = model.config.get_text_config(decoder=True)
    heads = decoder_config.num_attention_heads
    head_dim = getattr(decoder_config, "head_dim", None) or decoder_config.hidden_size // heads
    query, key = heads * head_dim, (decoder_config.num_key_value_heads or heads) * head_dim
    layers, linears, widths, norms = decoder_config.num_hidden_layers, dict[str, int](), 0, 0
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            features = module.in_features + module.out_features
            linears[last] = linears.get(last, 0) + features
        elif "norm" in type(module).__name__.lower():
            size = sum(p.numel() for p in module.parameters(recurse=False))
            norms += size
            # These normalise each head or all heads at once: either way all heads' width.
            across = {"q_norm": query, "k_norm": key}.get(last, size)
            widths += across if ".layers." in name else 0
    experts = getattr(decoder_config, "num_experts_per_tok", None) or 1
    mlp = (
        getattr(decoder_config, "moe_intermediate_size", None) or decoder_config.intermediate_size
    ) * experts
    tied = bool(getattr(decoder_config, "tie_word_embeddings", False))
    table = decoder_config.vocab_size * decoder_config.hidden_size
    total = sum(p.numel() for p in model.parameters())
    return ModelShape(
        layers=layers,
        hidden=decoder_config.hidden_size,
        heads=heads,
        query=query,
        key=key,
        head_dim=head_dim,
        mlp=mlp,
        vocab=decoder_config.vocab_size,
        tied=tied,
        matrix_weights_per_layer=(total - norms - table * (1 if tied else 2)) // layers,
        norm_weights=norms,
        extra_norm_width=max(0, widths // layers - 2 * decoder_config.hidden_size),
        weights=total,
        linears=linears,
    )


class _StepMemory:
    """The allocations of a training step with rows of `length` tokens, in bytes on one device."""

    def __init__(self, shape: ModelShape, setup: TrainingSetup, length: int) -> None:
        self.shape, self.setup, self.length = shape, setup, length
        require_context_kind(setup.context_kind, shape, setup.context_parallel)
        self.weight_size = setup.dtype.itemsize
        self.compute_size = (setup.compute_dtype or setup.dtype).itemsize
        # FSDP gathers weights after casting them. Autocast casts no embeddings, so the residual
        # stream has the weights' dtype, and each linear layer saves a cast of its input.
        self.autocast = self.weight_size != self.compute_size and setup.shards == 1
        self.residual_size = self.weight_size if self.autocast else self.compute_size
        self.tokens = math.ceil(setup.rows * length / setup.context_parallel)
        self.attention_pairs = setup.rows * math.ceil(length / setup.context_parallel) * length
        self.lora = setup.lora_rank > 0
        self.norms_trained = not self.lora or "norms" in setup.lora_trains
        embeddings = not self.lora or "embeddings" in setup.lora_trains
        table = shape.embedding_weights * self.weight_size
        self.embedding_gradient = table if embeddings else 0
        self.head_gradient = table if embeddings and (shape.tied or not self.lora) else 0
        # The head's gradient waits for that of the embeddings, to be added to it.
        self.tied_gradient_waits = shape.tied and embeddings
        # PEFT keeps LoRA in float32, and a trained copy beside the frozen original.
        adapters = 4 * setup.lora_rank * sum(shape.linears.get(n, 0) for n in setup.lora_targets)
        copies = self.embedding_gradient + (
            shape.norm_weights * self.weight_size if self.norms_trained else 0
        )
        self.trained = adapters + copies if self.lora else shape.weights * self.weight_size
        self.weights = shape.weights * self.weight_size + (self.trained if self.lora else 0)
        self.adapters_per_layer = adapters // shape.layers
        # These attentions repeat the keys for each query head.
        repeats = self.mask() > 0 or setup.attention == "eager"
        self.key_width = shape.query if repeats else shape.key

    def moments(self) -> list[MemoryNeed]:
        """Return the candidate peaks; between these moments memory only falls or only grows."""
        checkpointed, offloaded = self.setup.checkpointing, self.setup.offload_activations
        saved, work = self.saved_for_backward(), max(self.layer_work())
        stored = self.tokens * self.shape.hidden * self.residual_size if checkpointed else saved
        # With a float32 residual stream, a layer's saved input is also its first norm's.
        shared_input = stored if checkpointed and self.residual_size == 4 and not offloaded else 0
        work -= shared_input if checkpointed or offloaded else saved
        stored = 0 if offloaded else stored
        activations = self.shape.layers * stored + self.inputs_and_tables()
        gradient = self.tokens * self.shape.hidden
        matrices = self.shape.matrix_weights_per_layer * self.compute_size if self.autocast else 0
        casts = self.shape.layers * matrices
        cached = casts if not checkpointed or not self.lora else matrices  # until autocast ends
        casts = 0 if checkpointed else casts
        own_gradients = self.layer_gradients()
        layer = (
            self.adapters_per_layer
            if self.lora
            else self.shape.matrix_weights_per_layer * self.weight_size
        )
        gradients = (
            self.trained
            - layer
            + own_gradients
            - (0 if self.tied_gradient_waits else self.embedding_gradient)
        )
        loss = activations + self.final_norm()
        mask = self.mask()
        layer_casts = matrices if checkpointed else 0
        waiting_gradient = (
            self.tied_gradient_waits
            * self.embedding_gradient
            // self.weight_size
            * (self.compute_size if self.setup.shards > 1 else self.weight_size)
        )
        losses = []
        distillation = [("distillation", distillation_bytes)] if self.setup.distils else []
        for moment, bytes_of in (("loss", loss_bytes), *distillation):
            forward, backward = bytes_of(
                self.shape,
                self.setup,
                tokens=self.tokens,
                trains_head=self.head_gradient > 0,
                autocast=self.autocast,
            )
            losses += [
                self.moment_need(moment, 0, loss, forward, cached + mask),
                self.moment_need(moment, 0, loss, backward, casts + mask),
            ]
        return [
            *losses,
            self.moment_need(
                "last layer",
                self.head_gradient + own_gradients,
                activations,
                0,
                work + casts + layer_casts + mask,
            ),
            self.moment_need(
                "first layer",
                gradients,
                stored + self.inputs_and_tables(),
                0,
                work + matrices + mask,
            ),
            self.moment_need(
                "embeddings", self.trained, gradient * self.residual_size, 0, waiting_gradient
            ),
            self.moment_need("optimizer", self.trained, 0, 0, self.optimizer_work()),
            *self.averaging(),
        ]

    def moment_need(
        self, moment: str, gradients: int, activations: int, logits: int, work: int
    ) -> MemoryNeed:
        """Return the need at a moment, with the parts shared or repeated over devices."""
        setup, optimizer = self.setup, self.optimizer_states()
        is_ending = moment in ("embeddings", "optimizer")
        if setup.shards > 1:
            work += self.fsdp_gathered(moment)
            # The root's gradients (embeddings, head) stay unsharded until the very end.
            root = self.embedding_gradient + (0 if self.tied_gradient_waits else self.head_gradient)
            whole = {"embeddings": root, "optimizer": 0}.get(moment, self.head_gradient)
            gradients = max(0, gradients - whole)
        elif setup.accumulates or setup.replicated:
            # Gradients persist, and new ones are added; DDP has a copy in buckets.
            new_gradients = max(
                self.embedding_gradient,
                self.shape.hidden * self.shape.mlp * self.weight_size * (not self.lora),
            )
            work += (
                0
                if moment == "optimizer"
                else new_gradients
                + self.tied_gradient_waits * self.embedding_gradient * (not is_ending)
            )
            gradients = self.trained * (2 if setup.replicated else 1)
        on_device = not setup.offload_weights
        updates_on_device = on_device and not setup.offload_optimizer
        return MemoryNeed(
            parameters=on_device * self.weights // setup.shards,
            gradients=updates_on_device * gradients // setup.shards,
            optimizer=updates_on_device * optimizer // setup.shards,
            activations=activations,
            logits=logits,
            workspace=work,
            moment=moment,
            teacher=on_device * teacher_bytes(self.shape, setup),
        )

    def averaging(self) -> list[MemoryNeed]:
        """Return the need at the mean of checkpoints, if there is one: a tensor's, twice."""
        # Of sharded weights, the mean is computed in the CPU's memory.
        if not self.setup.averages or self.setup.shards > 1:
            return []
        largest = max(self.shape.embedding_weights, self.shape.hidden * self.shape.mlp)
        return [
            MemoryNeed(
                parameters=self.weights,
                gradients=0,
                optimizer=self.optimizer_states(),
                activations=0,
                logits=0,
                workspace=2 * 4 * largest,
                moment="averaging",
            )
        ]

    def host_bytes(self) -> int:
        """Return the bytes in CPU memory: offloaded activations, weights and optimizer states."""
        setup, size = self.setup, 0
        if setup.offload_activations:
            saved = self.tokens * self.shape.hidden * self.residual_size
            size += self.shape.layers * (
                saved if setup.checkpointing else self.saved_for_backward()
            )
        if setup.offload_weights or setup.offload_optimizer:
            size += (self.trained + self.optimizer_states()) // setup.shards
        weights = self.weights // setup.shards + teacher_bytes(self.shape, setup)
        return size + setup.offload_weights * weights

    def fsdp_gathered(self, moment: str) -> int:
        """Return the bytes that FSDP2 holds unsharded: weights, gradients, copies in flight."""
        s, c = self.shape, self.compute_size
        # Accumulated gradients stay until the next step.
        gathered_bytes = self.trained // self.weight_size * c if self.setup.accumulates else 0
        if moment == "optimizer":
            return gathered_bytes
        # Head and embeddings stay gathered during a step.
        gathered_bytes += s.embedding_weights * (1 if s.tied else 2) * c
        head, layer = self.head_gradient // self.weight_size * c, s.matrix_weights_per_layer * c
        if moment in ("loss", "distillation"):
            return gathered_bytes + 2 * layer  # the current layer and the prefetched one
        if moment == "embeddings":
            root = self.embedding_gradient // self.weight_size * c + (
                0 if self.tied_gradient_waits else head
            )
            return gathered_bytes + 2 * root + (0 if self.lora else 4 * layer)
        # Two layers' weights, their gradients, and copies: the streams overlap.
        return gathered_bytes + head + (2 if self.lora else 4) * layer

    def optimizer_states(self) -> int:
        """Return the bytes of the optimizer's states, two per trained weight."""
        name = self.setup.optimizer
        for bits in (8, 4):
            if f"{bits}bit" in name:
                return 2 * self.trained // self.weight_size * bits // 8
        return 0 if name.startswith(("sgd", "adafactor")) else 2 * self.trained

    def optimizer_work(self) -> int:
        """Return AdamW's temporaries: unless fused, the denominators of all weights at once."""
        if self.setup.offload_weights or self.setup.offload_optimizer:
            return 0
        return self.trained // self.setup.shards if self.setup.optimizer == "adamw_torch" else 0

    def inputs_and_tables(self) -> int:
        """Return the bytes of token ids, positions, labels, and tables of cosines and sines."""
        return self.tokens * (32 + 2 * self.shape.head_dim * self.residual_size)

    def final_norm(self) -> int:
        """Return the bytes of the last norm: input, product, output, and the output's cast."""
        bytes_per_number = 4 + 2 * self.residual_size + (self.compute_size if self.autocast else 0)
        return self.tokens * self.shape.hidden * bytes_per_number

    def mask(self) -> int:
        """Return the bytes of the mask between documents, one per pair of tokens, if it exists."""
        return (
            self.attention_pairs
            if self.setup.packed_masks and self.setup.attention == "sdpa"
            else 0
        )

    def saved_for_backward(self) -> int:
        """Return the activations that a layer saves for its backward pass."""
        return self.tokens * (self.saved_attention() + self.saved_mlp()) + self.attention_scores()

    def saved_attention(self) -> int:
        """Return the bytes per token that attention and its norm save."""
        s, c, targets = self.shape, self.compute_size, self.setup.lora_targets
        norm = s.hidden * (4 + self.residual_size * self.norms_trained)
        norm += s.extra_norm_width * (4 + self.residual_size)
        adapted = len({"q_proj", "k_proj", "v_proj"} & set(targets)) if self.lora else 3
        inputs = s.hidden * c * (adapted if self.autocast else 1)
        if self.lora and self.weight_size == 2:  # LoRA's weights are float32, and so is its input
            inputs += adapted * s.hidden * 4 + ("o_proj" in targets) * s.query * 4
        inner = 8 * self.setup.lora_rank * len(targets)
        return norm + inputs + 2 * (s.query + self.key_width) * c + 4 * s.heads + inner

    def saved_mlp(self) -> int:
        """Return the bytes per token saved by MLP and norm: gate, activation, up, product."""
        s = self.shape
        adapted = {"gate_proj", "up_proj", "down_proj"} & set(self.setup.lora_targets)
        trains = not self.lora or bool(adapted)
        inputs = s.hidden * self.compute_size * (2 if self.autocast else 1) if trains else 0
        if self.lora and self.weight_size == 2:
            inputs += len(adapted) * s.hidden * 4 + ("down_proj" in adapted) * s.mlp * 4
        return (
            s.hidden * (4 + self.residual_size * self.norms_trained)
            + inputs
            + (4 if trains else 3) * s.mlp * self.compute_size
        )

    def attention_scores(self) -> int:
        """Return the bytes saved per pair of tokens: eager's probabilities or sdpa's mask."""
        if self.setup.attention == "eager":
            return (
                self.attention_pairs
                * self.shape.heads
                * (4 if self.compute_size == 4 else 4 + self.compute_size)
            )
        return self.mask() * self.compute_size  # added to the scores, so in their dtype

    def layer_gradients(self) -> int:
        """Return a layer's own gradients that exist at the peak of its backward pass."""
        if self.lora:
            return 0
        s, (mlp, attention) = self.shape, self.layer_work()
        matrices = 1 if mlp > attention else 3  # the MLP's; then also the attention output's
        matrix = s.matrix_weights_per_layer - s.hidden * (2 * s.query + 2 * s.key)
        return (
            matrix * matrices // 3 + (0 if mlp > attention else s.hidden * s.query)
        ) * self.weight_size

    def layer_work(self) -> tuple[int, int]:
        """Return the bytes of a layer's backward pass in MLP and attention, saved ones included."""
        s, c = self.shape, self.compute_size
        residual = s.hidden * (self.residual_size + (c if self.autocast else 0))
        # The MLP's peak is at the product: its two inputs, three gradients, the gate's input.
        mlp = self.saved_mlp() + self.saved_attention() + residual
        mlp += (2 if self.saved_mlp() >= 4 * s.mlp * c else 3) * s.mlp * c
        attention = self.saved_attention() + residual + 2 * (s.query + self.key_width) * c
        attention_bytes = self.tokens * attention + self.attention_scores()
        attention_bytes += exchange_bytes(
            self.setup.context_kind,
            s,
            tokens=self.tokens,
            row_tokens=self.setup.rows * self.length,
            parts=self.setup.context_parallel,
            number_size=c,
        )
        if self.setup.attention == "eager":
            # Gradients of the probabilities and the scores.
            attention_bytes += self.attention_pairs * s.heads * 8
        return self.tokens * mlp + self.attention_scores(), attention_bytes


def loss_bytes(
    shape: ModelShape, setup: TrainingSetup, *, tokens: int, trains_head: bool, autocast: bool
) -> tuple[int, int]:
    """Return the peak bytes of the loss in its forward and its backward pass.

    The hidden states that it starts from are not among them.

    Args:
        shape: The model's sizes.
        setup: The training setup.
        tokens: Tokens of this device.
        trains_head: Whether the head has a gradient.
        autocast: Whether autocast casts the head for its product.
    """
    weight_size = setup.dtype.itemsize
    c = (setup.compute_dtype or setup.dtype).itemsize
    weight = shape.embedding_weights * c * autocast  # cast for the product and saved
    if setup.loss_terms:
        held_forward, held_backward = _loss_bytes_with_terms(shape, setup, tokens, trains_head)
        return weight + held_forward, weight + held_backward
    if setup.loss == "full":
        # In float32: a copy, log-probabilities, and two gradients while one becomes the other.
        forward = tokens * shape.vocab * (8 if c == 4 else 8 + c)
        return forward + weight, tokens * shape.vocab * 12 + weight
    chunk = 1 << (math.ceil(tokens / math.ceil(shape.vocab / shape.hidden)) - 1).bit_length()
    of_weight, of_hidden = (shape.embedding_weights if trains_head else 0), tokens * shape.hidden
    if setup.loss == "liger":
        logits = min(chunk, tokens) * shape.vocab * (4 + c)
        held_bytes = weight + of_hidden * c + of_weight * (4 + c) + logits
        return held_bytes, held_bytes
    chunk = min(max(1, chunk // 2), tokens)  # as LinearCrossEntropyOptions() halves it
    if c == 4:  # the forward pass computes the gradients; autograd adds zeros backward
        held_bytes = of_weight * 4 + of_hidden * 4
        return held_bytes + chunk * shape.vocab * 4, 2 * held_bytes
    # In 16 bits chunked_loss.py sums per-token losses, so gradients are computed backward.
    logits = chunk * shape.vocab * (4 + c)
    held_bytes = weight + of_hidden * c + of_weight * c
    return weight + logits, held_bytes + max(logits, of_weight * weight_size * autocast)


def _loss_bytes_with_terms(
    shape: ModelShape, setup: TrainingSetup, tokens: int, trains_head: bool
) -> tuple[int, int]:
    """Return the peak bytes of a loss with terms, which computes gradients in its forward pass."""
    weight_size, whole = setup.dtype.itemsize, setup.loss == "full"
    c = (setup.compute_dtype or setup.dtype).itemsize
    of_weight = shape.embedding_weights * 4 if trains_head and not whole else 0
    width = shape.vocab if whole else shape.hidden
    chunk = chunk_length(tokens, width, shape.vocab)
    held_bytes = tokens * width * c + of_weight  # gradients of the logits or hidden states
    is_view = whole and c == 4  # a chunk in float32 is a part of the logits, not a copy
    temporaries = chunk * shape.vocab * 4 * (COPIES - is_view)
    if whole:
        held_bytes += tokens * shape.vocab * c  # the logits, which exist beside their gradient
        return held_bytes + temporaries, held_bytes
    product = of_weight // 4 * c if c != 4 else 0  # added to the gradient in float32
    cast = of_weight // 4 * weight_size if weight_size != 4 else 0
    return held_bytes + max(temporaries, product), held_bytes + cast


def distillation_bytes(
    shape: ModelShape, setup: TrainingSetup, *, tokens: int, trains_head: bool, autocast: bool
) -> tuple[int, int]:
    """Return the peak bytes of the loss of distilled rows in its forward and its backward pass.

    The original model's own pass holds less than a layer's backward pass: it keeps no activations,
    and is over before the trained model has any.

    Args:
        shape: The model's sizes.
        setup: The training setup.
        tokens: Tokens of this device, all in distilled rows.
        trains_head: Whether the head has a gradient.
        autocast: Whether autocast casts the head for its product.
    """
    table, hidden = shape.embedding_weights, tokens * shape.hidden
    c = (setup.compute_dtype or setup.dtype).itemsize
    teacher_size = (setup.teacher_dtype or setup.dtype).itemsize
    held = table * c * autocast
    held += table * c * (teacher_size != c)  # the original model's head, cast
    if setup.shards > 1:
        held += table * teacher_size  # the original model's head, gathered
    held += 2 * hidden * c  # the original's hidden states, and the trained model's gradient
    of_weight = table * 4 if trains_head else 0
    chunk = chunk_length(tokens, shape.hidden, shape.vocab, DISTILLATION_COPIES)
    product = table * c if trains_head and c != 4 else 0  # added to the gradient in float32
    logits = max(chunk * shape.vocab * 4 * DISTILLATION_COPIES, product)
    backward = held - hidden * c + of_weight
    return held + of_weight + logits, backward + of_weight * (setup.dtype.itemsize != 4) // 2


def teacher_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the bytes of the original model's own weights on each device."""
    if not setup.distils or setup.teacher_dtype is None:
        return 0
    return shape.weights * setup.teacher_dtype.itemsize // setup.shards


def exchange_bytes(
    kind: str, shape: ModelShape, *, tokens: int, row_tokens: int, parts: int, number_size: int
) -> int:
    """Return the bytes that the backward pass of one attention holds for the exchange.

    Args:
        kind: allgather, ring or ulysses.
        shape: The model's sizes.
        tokens: Tokens of this device.
        row_tokens: Tokens of whole rows.
        parts: Devices that share a row.
        number_size: Bytes of a number in the precision of the computation.
    """
    if parts == 1:
        return 0
    if kind == "ulysses":
        # Queries, keys and values after the exchange, and their gradients. Devices beyond the
        # number of key heads hold copies of them.
        copies = max(1, parts * shape.head_dim // shape.key)
        return tokens * 2 * (shape.query + 2 * shape.key * copies) * number_size
    # Gradients are summed in float32: queries' with a copy while a part is added; of keys and
    # values the sums, a copy, what is sent and half of what is received on average.
    sums = tokens * (2 * 4 * shape.query + 7 * 4 * shape.key)
    own = tokens * 2 * shape.key * number_size  # twice: in use, and in flight or to be gathered
    whole = row_tokens * 2 * shape.key * number_size if kind == "allgather" else 0
    return sums + 2 * own + whole


CONTEXT_KINDS = ("allgather", "ring", "ulysses")


def require_context_kind(kind: str, shape: ModelShape, parts: int) -> None:
    """Raise if a model's attention cannot be shared in this way.

    Args:
        kind: allgather, ring or ulysses.
        shape: The model's sizes.
        parts: Devices that share a row.

    Raises:
        ValueError: The kind is unknown; or Ulysses has heads that cannot be divided.
    """
    if kind not in CONTEXT_KINDS:
        raise ValueError(f"context_kind must be one of {', '.join(CONTEXT_KINDS)}, got {kind!r}")
    if kind != "ulysses":
        return
    key_heads = shape.key // shape.head_dim
    if shape.heads % parts or (key_heads % parts and parts % key_heads):
        fitting = [
            number
            for number in range(1, shape.heads + 1)
            if shape.heads % number == 0 and (key_heads % number == 0 or number % key_heads == 0)
        ]
        raise Refused(
            f"Ulysses gives every device whole heads: expected a number of devices that divides "
            f"{shape.heads} heads and divides, or is a multiple of, {key_heads} key heads "
            f"({', '.join(map(str, fitting))}), got {parts}: change parallelism_config_sp_size, or "
            "use a ring (fsdp2_cp8.yaml)"
        )
