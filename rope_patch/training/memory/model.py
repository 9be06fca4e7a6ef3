"""Model of the peak allocation of one training step of Llama-like models, from a config alone.

The peak consists of weights, gradients, AdamW's states, saved activations, logits, and the
workspace of one recomputed layer. `recipes/experiments/check_memory_plan.py` measures the same on a
CPU, to the byte. No GPU was ever measured: `RESERVE` stands for CUDA, NCCL and fragmentation.
What a single CPU lacks (DDP, Liger, offloading, torch's chunked loss in 16
bits) comes from reading the code. FSDP2 and context parallelism were compared with two and four
processes on CPUs: the model was 4 % below to 22 % above the peaks of small models, which vary from
run to run. Experts count as the MLP
that a token passes through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from rope_patch.training.memory.context import exchange_bytes, require_kind
from rope_patch.training.memory.loss import loss_bytes
from rope_patch.training.memory.model_shape import ModelShape, model_shape
from rope_patch.training.memory.setup import TrainingSetup
from rope_patch.training.memory.teacher import distillation_bytes, teacher_bytes

RESERVE = 0.08  # of a device's memory: CUDA's context, NCCL's buffers, fragmentation
LENGTH_STEP = 1024  # tokens; fitting lengths are multiples of it
MAX_LENGTH = 2**24  # tokens; upper end of the search


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device at the peak of a step.

    Attributes:
        parameters: Weights, frozen ones included.
        gradients: Gradients of weights.
        optimizer_states: AdamW's two states.
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


class _StepMemory:
    """The allocations of a training step, in bytes on one device.

    Args:
        shape: The model's sizes.
        setup: The training setup.
        length: Tokens per row.
    """

    def __init__(self, shape: ModelShape, setup: TrainingSetup, length: int) -> None:
        self.shape, self.setup, self.length = shape, setup, length
        require_kind(setup.context_kind, shape, setup.context_parallel)
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
        """Return the need at the mean of checkpoints, if there is one: a tensor's, twice.

        Of sharded weights, the mean is computed in the CPU's memory.
        """
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
        """Return the bytes of a layer's backward pass in MLP and attention, saved ones included.

        The MLP's peak is at the product: its two inputs, three gradients, the gate's input.
        """
        s, c = self.shape, self.compute_size
        residual = s.hidden * (self.residual_size + (c if self.autocast else 0))
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
