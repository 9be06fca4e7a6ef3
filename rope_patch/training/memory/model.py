"""The arithmetic of planning: what memory a step takes on each device, from a config alone.

Counted is what a step of transformers' Llama, and of what is built like it, has allocated in the
moment when that is most: weights, gradients and AdamW's states, what the backward pass keeps, the
logits, and what one layer needs while it is computed again. `check_memory_plan`
measures the same on a CPU, to the byte. No GPU was ever measured: there CUDA, NCCL and
fragmentation take more, which `RESERVE` stands for. What a single CPU does not have (context
parallelism, DDP, Liger, offloading, torch's chunked loss in 16 bits) comes from reading the code;
FSDP2 was compared with two processes on CPUs, where it was 4 % below to 13 % above small models'
peaks, which differ from run to run. Experts count as the MLP that a token goes through.
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

RESERVE = 0.08  # of a device's memory: CUDA's context, NCCL's buffers, fragmentation
LENGTH_STEP = 1024  # tokens: lengths that fit are multiples of it
MAX_LENGTH = 2**24  # tokens: no longer row is looked for
_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device in the moment when a step needs most.

    Attributes:
        parameters: Weights, frozen ones included.
        gradients: Of weights.
        optimizer: AdamW's two states.
        activations: What the forward pass keeps for the backward pass.
        logits: The loss with its logits and gradients.
        workspace: What lasts no longer than a layer: its recomputation and backward pass, weights
            cast or gathered for it, masks.
        moment: When that is: loss, last layer, first layer, embeddings or optimizer.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int
    moment: str = ""

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "moment"}


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How a model is trained; the defaults are a recipe's on one device, in float32.

    Attributes:
        rows: Rows on a device at once.
        dtype: Weights, gradients, optimizer.
        compute_dtype: What autocast computes in; `dtype` unless given.
        lora_rank: 0 trains all weights.
        lora_targets: Linear layers that get LoRA.
        lora_trains: What is trained in full beside LoRA: embeddings, norms.
        loss: full, torch or liger.
        checkpointing: Keep layers' inputs only.
        offload_activations: Keep what the backward pass needs in the CPU's memory.
        attention: transformers' name of it.
        packed_masks: Rows are packed of documents that do not see each other.
        shards: Devices that share the weights (FSDP).
        context_parallel: Devices that share a row.
        replicated: Devices have all weights each and average gradients (DDP).
        accumulates: Gradients of several batches are added up.
        optimizer: transformers' name of it.
    """

    rows: int = 1
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = _LORA_TARGETS
    lora_trains: tuple[str, ...] = ("embeddings", "norms")
    loss: str = "torch"
    checkpointing: bool = True
    offload_activations: bool = False
    attention: str = "sdpa"
    packed_masks: bool = False
    shards: int = 1
    context_parallel: int = 1
    replicated: bool = False
    accumulates: bool = False
    optimizer: str = "adamw_torch_fused"


def memory_need(config: Any, *, length: int, **how: Any) -> MemoryNeed:
    """What a step needs on each device.

    Args:
        config: A causal language model's.
        length: Tokens of a row.
        **how: See `TrainingSetup`.
    """
    asked = TrainingSetup(**how)
    if length < 1 or asked.rows < 1 or asked.shards < 1 or asked.context_parallel < 1:
        raise ValueError(
            "length, rows, shards and context_parallel must be at least 1, got "
            f"{length}, {asked.rows}, {asked.shards}, {asked.context_parallel}"
        )
    if asked.loss not in ("full", "torch", "liger"):
        raise ValueError(f"loss must be full, torch or liger, got {asked.loss!r}")
    return max(
        _StepMemory(_model_shape(config), asked, length).moments(), key=lambda need: need.total
    )


def longest_row(config: Any, memory: int, **how: Any) -> int:
    """The longest row that fits.

    Args:
        config: A causal language model's.
        memory: Bytes of a device; `RESERVE` of it is left free.
        **how: See `TrainingSetup`.

    Returns:
        Tokens, a multiple of `LENGTH_STEP` and at most `MAX_LENGTH`; 0 if not even `LENGTH_STEP`
        tokens fit.
    """
    usable = memory * (1 - RESERVE)
    low, high = 0, MAX_LENGTH // LENGTH_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if memory_need(config, length=middle * LENGTH_STEP, **how).total <= usable:
            low = middle
        else:
            high = middle - 1
    return low * LENGTH_STEP


@dataclass(frozen=True)
class _ModelShape:
    """Sizes of a model: widths in numbers per token, the rest in numbers of weights."""

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
    extra_norm_width: int  # widths of a layer's norms beyond the two that every layer has
    weights: int
    linears: dict[str, int]  # inputs and outputs of all linear layers, by name

    @property
    def embedding_weights(self) -> int:
        """Weights of the embeddings; an untied head has as many."""
        return self.vocab * self.hidden


def _model_shape(config: Any) -> _ModelShape:
    kind: Any = type(config)
    return _cached_model_shape(config.to_json_string(use_diff=False), kind)


@lru_cache(maxsize=16)
def _cached_model_shape(text: str, kind: Any) -> _ModelShape:
    model = empty_model("the model", kind.from_dict(json.loads(text)))
    c = model.config.get_text_config(decoder=True)
    heads = c.num_attention_heads
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    query, key = heads * head_dim, (c.num_key_value_heads or heads) * head_dim
    layers, linears, widths, norms = c.num_hidden_layers, dict[str, int](), 0, 0
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            features = module.in_features + module.out_features
            linears[last] = linears.get(last, 0) + features
        elif "norm" in type(module).__name__.lower():
            size = sum(p.numel() for p in module.parameters(recurse=False))
            norms += size
            across = {"q_norm": query, "k_norm": key}.get(last, size)  # of each head, or of all
            widths += across if ".layers." in name else 0
    experts = getattr(c, "num_experts_per_tok", None) or 1
    mlp = (getattr(c, "moe_intermediate_size", None) or c.intermediate_size) * experts
    tied = bool(getattr(c, "tie_word_embeddings", False))
    table = c.vocab_size * c.hidden_size
    total = sum(p.numel() for p in model.parameters())
    return _ModelShape(
        layers=layers,
        hidden=c.hidden_size,
        heads=heads,
        query=query,
        key=key,
        head_dim=head_dim,
        mlp=mlp,
        vocab=c.vocab_size,
        tied=tied,
        matrix_weights_per_layer=(total - norms - table * (1 if tied else 2)) // layers,
        norm_weights=norms,
        extra_norm_width=max(0, widths // layers - 2 * c.hidden_size),
        weights=total,
        linears=linears,
    )


class _StepMemory:
    """A training step, in bytes on one device.

    Args:
        shape: The model's sizes.
        setup: How it is trained.
        length: Tokens of a row.
    """

    def __init__(self, shape: _ModelShape, setup: TrainingSetup, length: int) -> None:
        self.shape, self.setup = shape, setup
        self.weight_size = setup.dtype.itemsize
        self.compute_size = (setup.compute_dtype or setup.dtype).itemsize
        # FSDP gathers weights that are cast already. Autocast casts no embeddings, so that what
        # layers hand on has the weights' dtype, and each linear layer keeps a cast of its input.
        self.autocast = self.weight_size != self.compute_size and setup.shards == 1
        self.residual_size = self.weight_size if self.autocast else self.compute_size
        self.tokens = math.ceil(setup.rows * length / setup.context_parallel)
        self.attention_pairs = setup.rows * math.ceil(length / setup.context_parallel) * length
        self.key_value_numbers = setup.rows * length * 2 * shape.key
        self.lora = setup.lora_rank > 0
        self.norms_trained = not self.lora or "norms" in setup.lora_trains
        embeddings = not self.lora or "embeddings" in setup.lora_trains
        self.embedding_gradient = (
            shape.embedding_weights * self.weight_size if embeddings else 0
        )  # a gradient of the embeddings
        self.head_gradient = (
            shape.embedding_weights * self.weight_size
            if embeddings and (shape.tied or not self.lora)
            else 0
        )
        self.tied_gradient_waits = (
            shape.tied and embeddings
        )  # for the embeddings' own, to be added to it
        # PEFT keeps LoRA in float32, and what it trains in full beside the frozen original.
        adapters = 4 * setup.lora_rank * sum(shape.linears.get(n, 0) for n in setup.lora_targets)
        copies = self.embedding_gradient + (
            shape.norm_weights * self.weight_size if self.norms_trained else 0
        )
        self.trained = adapters + copies if self.lora else shape.weights * self.weight_size
        self.weights = shape.weights * self.weight_size + (self.trained if self.lora else 0)
        self.adapters_per_layer = adapters // shape.layers
        repeats = self.mask() > 0 or setup.attention == "eager"  # keys, for each query's head
        self.key_width = shape.query if repeats else shape.key

    def moments(self) -> list[MemoryNeed]:
        """The moments of which one is the worst; between them, the need only falls or grows."""
        checkpointed, offloaded = self.setup.checkpointing, self.setup.offload_activations
        saved, work = self.saved_for_backward(), max(self.layer_work())
        stored = self.tokens * self.shape.hidden * self.residual_size if checkpointed else saved
        # With a float32 residual stream, the layer's kept input is what its first norm keeps.
        shared = stored if checkpointed and self.residual_size == 4 and not offloaded else 0
        work -= shared if checkpointed or offloaded else saved
        stored = 0 if offloaded else stored
        kept, gradient = (
            self.shape.layers * stored + self.inputs_and_tables(),
            self.tokens * self.shape.hidden,
        )
        matrices = self.shape.matrix_weights_per_layer * self.compute_size if self.autocast else 0
        casts = self.shape.layers * matrices
        cached = casts if not checkpointed or not self.lora else matrices  # until autocast ends
        casts = 0 if checkpointed else casts
        done = self.layer_gradients()
        layer = (
            self.adapters_per_layer
            if self.lora
            else self.shape.matrix_weights_per_layer * self.weight_size
        )
        grown = (
            self.trained
            - layer
            + done
            - (0 if self.tied_gradient_waits else self.embedding_gradient)
        )
        forward, backward = self.loss()
        loss = kept + self.final_norm()
        mask = self.mask()
        once = matrices if checkpointed else 0
        waiting = (
            self.tied_gradient_waits
            * self.embedding_gradient
            // self.weight_size
            * (self.compute_size if self.setup.shards > 1 else self.weight_size)
        )
        return [
            self.moment_need("loss", 0, loss, forward, cached + mask),
            self.moment_need("loss", 0, loss, backward, casts + mask),
            self.moment_need(
                "last layer", self.head_gradient + done, kept, 0, work + casts + once + mask
            ),
            self.moment_need(
                "first layer", grown, stored + self.inputs_and_tables(), 0, work + matrices + mask
            ),
            self.moment_need("embeddings", self.trained, gradient * self.residual_size, 0, waiting),
            self.moment_need("optimizer", self.trained, 0, 0, self.optimizer_work()),
        ]

    def moment_need(
        self, moment: str, gradients: int, kept: int, logits: int, work: int
    ) -> MemoryNeed:
        """Puts a moment's parts together, as devices share or repeat them."""
        how, optimizer = self.setup, self.optimizer_states()
        ending = moment in ("embeddings", "optimizer")
        if how.shards > 1:
            work += self.fsdp_gathered(moment)
            # Of the root's gradients (embeddings, head) there are no shards before the very end.
            root = self.embedding_gradient + (0 if self.tied_gradient_waits else self.head_gradient)
            whole = {"embeddings": root, "optimizer": 0}.get(moment, self.head_gradient)
            gradients = max(0, gradients - whole)
        elif how.accumulates or how.replicated:
            # Gradients are there all the time, and what comes is added; DDP has a copy in buckets.
            news = max(
                self.embedding_gradient,
                self.shape.hidden * self.shape.mlp * self.weight_size * (not self.lora),
            )
            work += (
                0
                if moment == "optimizer"
                else news + self.tied_gradient_waits * self.embedding_gradient * (not ending)
            )
            gradients = self.trained * (2 if how.replicated else 1)
        return MemoryNeed(
            parameters=self.weights // how.shards,
            gradients=gradients // how.shards,
            optimizer=optimizer // how.shards,
            activations=kept,
            logits=logits,
            workspace=work,
            moment=moment,
        )

    def fsdp_gathered(self, moment: str) -> int:
        """What FSDP2 has whole for a while: weights, gradients, copies of these on their way."""
        s, c = self.shape, self.compute_size
        held = (
            self.trained // self.weight_size * c if self.setup.accumulates else 0
        )  # until the next step
        if moment == "optimizer":
            return held
        held += (
            s.embedding_weights * (1 if s.tied else 2) * c
        )  # head and embeddings stay for all of a step
        head, layer = self.head_gradient // self.weight_size * c, s.matrix_weights_per_layer * c
        if moment == "loss":
            return held + 2 * layer  # one and the next
        if moment == "embeddings":
            root = self.embedding_gradient // self.weight_size * c + (
                0 if self.tied_gradient_waits else head
            )
            return held + 2 * root + (0 if self.lora else 4 * layer)
        # Two layers' weights, their gradients, and copies of these; as streams run apart.
        return held + head + (2 if self.lora else 4) * layer

    def optimizer_states(self) -> int:
        """Two states of each trained weight, in its dtype."""
        name = self.setup.optimizer
        if "8bit" in name:
            return 2 * self.trained // self.weight_size
        return 0 if name.startswith(("sgd", "adafactor")) else 2 * self.trained

    def optimizer_work(self) -> int:
        """Unless fused, AdamW makes the denominators of all weights at once."""
        return self.trained // self.setup.shards if self.setup.optimizer == "adamw_torch" else 0

    def inputs_and_tables(self) -> int:
        """Token ids, positions, labels, and the tables of cosines and sines."""
        return self.tokens * (32 + 2 * self.shape.head_dim * self.residual_size)

    def final_norm(self) -> int:
        """The last norm's input, product and output, and the latter's cast."""
        each = 4 + 2 * self.residual_size + (self.compute_size if self.autocast else 0)
        return self.tokens * self.shape.hidden * each

    def mask(self) -> int:
        """The mask between documents, a byte for each pair of tokens; flash and flex need none."""
        return (
            self.attention_pairs
            if self.setup.packed_masks and self.setup.attention == "sdpa"
            else 0
        )

    def saved_for_backward(self) -> int:
        """What the backward pass of a layer needs of its forward pass."""
        return self.tokens * (self.saved_attention() + self.saved_mlp()) + self.attention_scores()

    def saved_attention(self) -> int:
        """Bytes per token that attention and its norm keep."""
        s, c, targets = self.shape, self.compute_size, self.setup.lora_targets
        norm = s.hidden * (4 + self.residual_size * self.norms_trained) + s.extra_norm_width * (
            4 + self.residual_size
        )
        adapted = len({"q_proj", "k_proj", "v_proj"} & set(targets)) if self.lora else 3
        inputs = s.hidden * c * (adapted if self.autocast else 1)
        if self.lora and self.weight_size == 2:  # LoRA's weights are float32, and so is its input
            inputs += adapted * s.hidden * 4 + ("o_proj" in targets) * s.query * 4
        inner = 8 * self.setup.lora_rank * len(targets)
        return norm + inputs + 2 * (s.query + self.key_width) * c + 4 * s.heads + inner

    def saved_mlp(self) -> int:
        """Bytes per token that the MLP and its norm keep: gate, its activation, up, product."""
        s, adapted = (
            self.shape,
            {"gate_proj", "up_proj", "down_proj"} & set(self.setup.lora_targets),
        )
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
        """What a layer keeps of all pairs of tokens: eager's probabilities, or sdpa's mask."""
        if self.setup.attention == "eager":
            return (
                self.attention_pairs
                * self.shape.heads
                * (4 if self.compute_size == 4 else 4 + self.compute_size)
            )
        return self.mask() * self.compute_size  # added to the scores, so no longer one byte each

    def layer_gradients(self) -> int:
        """A layer's gradients that are there where its backward pass needs most."""
        if self.lora:
            return 0
        s, (mlp, attention) = self.shape, self.layer_work()
        matrices = 1 if mlp > attention else 3  # of the MLP's; then the attention's output's, too
        matrix = s.matrix_weights_per_layer - s.hidden * (2 * s.query + 2 * s.key)
        return (
            matrix * matrices // 3 + (0 if mlp > attention else s.hidden * s.query)
        ) * self.weight_size

    def layer_work(self) -> tuple[int, int]:
        """What a layer's backward pass holds in its MLP and its attention, what was saved included.

        In the MLP that is most at the product: its two inputs, three gradients, the gate's input.
        """
        s, c = self.shape, self.compute_size
        handed = s.hidden * (self.residual_size + (c if self.autocast else 0))
        mlp = self.saved_mlp() + self.saved_attention() + handed
        mlp += (2 if self.saved_mlp() >= 4 * s.mlp * c else 3) * s.mlp * c
        attention = self.saved_attention() + handed + 2 * (s.query + self.key_width) * c
        if self.setup.context_parallel > 1:  # partial sums are float32
            attention += 3 * 4 * s.query + 4 * 4 * s.key
        inside = self.tokens * attention + self.attention_scores()
        if self.setup.context_parallel > 1:  # every device gathers all keys and values
            inside += self.key_value_numbers * c
        if self.setup.attention == "eager":
            inside += (
                self.attention_pairs * s.heads * 8
            )  # gradients of the probabilities and the scores
        return self.tokens * mlp + self.attention_scores(), inside

    def loss(self) -> tuple[int, int]:
        """What the loss holds in its forward and backward pass, beside the hidden states."""
        s, c, rows = self.shape, self.compute_size, self.tokens
        weight = s.embedding_weights * c * self.autocast  # cast for the product, and kept
        if self.setup.loss == "full":
            # float32: their own copy, log-probabilities, and two gradients while they turn.
            return rows * s.vocab * (8 if c == 4 else 8 + c) + weight, rows * s.vocab * 12 + weight
        chunk = 1 << (math.ceil(rows / math.ceil(s.vocab / s.hidden)) - 1).bit_length()
        of_weight, of_hidden = (s.embedding_weights if self.head_gradient else 0), rows * s.hidden
        if self.setup.loss == "liger":
            held = (
                weight + of_hidden * c + of_weight * (4 + c) + min(chunk, rows) * s.vocab * (4 + c)
            )
            return held, held
        chunk = min(max(1, chunk // 2), rows)  # as LinearCrossEntropyOptions() halves it
        if c == 4:  # gradients are made in the forward pass; backward, autograd adds zeros for them
            held = of_weight * 4 + of_hidden * 4
            return held + chunk * s.vocab * 4, 2 * held
        # In 16 bits, losses of tokens are summed by losses.py, so that gradients come later.
        logits = chunk * s.vocab * (4 + c)
        held = (
            weight
            + of_hidden * c
            + of_weight * c
            + max(logits, of_weight * self.weight_size * self.autocast)
        )
        return weight + logits, held
