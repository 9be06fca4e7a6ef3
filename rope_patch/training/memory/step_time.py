"""Estimate of a step's time from its floating point operations, at a stated utilisation.

Linear layers and the head cost 2 operations per weight and token, attention 4 per pair of tokens
and number of its query; causal attention has half of the pairs. A backward pass costs twice the
forward pass, and 2.5 times in attention, which recomputes its scores (FlashAttention's). A
checkpointed layer is computed once more. The estimate has no communication, no copies to the CPU
and no optimizer step: they are what makes a real step slower than the operations alone, and
`UTILISATION` stands for all of them. Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.training.memory.model_shape import ModelShape, model_shape

UTILISATION = 0.5  # of the peak, recomputed layers counted; stated, not measured
# Dense bf16 operations per second, from the makers' data sheets (without sparsity).
PEAKS = {
    "RTX 4090": 165.2e12,
    "A100": 312e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "B200": 2250e12,
}


@dataclass(frozen=True)
class StepWork:
    """Floating point operations of one optimizer step, over all devices.

    Attributes:
        linear: Operations of linear layers and the head, recomputed ones included.
        attention: Operations between pairs of tokens, recomputed ones included.
        model: Operations of both without recomputation, with attention's backward pass at twice
            its forward pass: what published "model FLOPs" count.
    """

    linear: float
    attention: float
    model: float

    @property
    def total(self) -> float:
        """Return the operations that devices execute."""
        return self.linear + self.attention

    def seconds(
        self, devices: int, peak: float = PEAKS["H100"], utilisation: float = UTILISATION
    ) -> float:
        """Return the estimated time of the step.

        Args:
            devices: Devices that share the step evenly.
            peak: Operations per second of one device.
            utilisation: Share of the peak that is reached, between 0 and 1.

        Raises:
            ValueError: A number is outside its range.
        """
        if devices < 1 or peak <= 0 or not 0 < utilisation <= 1:
            raise ValueError(
                "expected at least 1 device, a peak above 0 and a utilisation above 0 and at most "
                f"1, got {devices}, {peak} and {utilisation}"
            )
        return self.total / (devices * peak * utilisation)


def step_work(
    config: Any, *, length: int, rows: int, checkpointing: bool = True, trains_all: bool = True
) -> StepWork:
    """Return the operations of a step.

    Args:
        config: Config of a causal language model.
        length: Tokens per row; each sees all tokens before it, or those of its layer's window.
        rows: Rows of the step, over all devices and accumulated batches.
        checkpointing: Whether layers are computed once more in the backward pass.
        trains_all: Whether all weights have gradients, which LoRA's frozen ones do not.
    """
    if length < 1 or rows < 1:
        raise ValueError(f"length and rows must be at least 1, got {length} and {rows}")
    shape = model_shape(config)
    # Of experts, those that a token passes through count.
    weights = min(
        shape.matrix_weights_per_layer,
        shape.hidden * (3 * shape.mlp + 2 * shape.query + 2 * shape.key),
    )
    operations = 2.0 * rows * length  # per weight
    layers = operations * shape.layers * weights
    head = operations * shape.embedding_weights
    # torch stops to recompute a layer before its last product, which nothing needs.
    recomputed = layers - operations * shape.layers * shape.hidden * shape.mlp
    attention = 4.0 * rows * shape.query * _attended_pairs(config, shape, length)
    backward = 2 if trains_all else 1
    linear = (layers + head) * (1 + backward) + checkpointing * recomputed
    return StepWork(
        linear=linear,
        attention=attention * (1 + 2.5 + checkpointing),
        model=(layers + head) * (1 + backward) + attention * 3,
    )


def _attended_pairs(config: Any, shape: ModelShape, length: int) -> float:
    """Return the pairs of tokens that attention compares in one row, over all layers."""
    text = config.get_text_config(decoder=True)
    causal = length * (length + 1) / 2
    types = getattr(text, "layer_types", None) or ["full_attention"] * shape.layers
    window = getattr(text, "sliding_window", None) or length
    beyond = max(0, length - window)
    windowed = causal - beyond * (beyond + 1) / 2
    pairs = {"full_attention": causal, "sliding_attention": windowed, "chunked_attention": windowed}
    # Recurrent layers compare no pairs; their own work is within their weights'.
    return sum(pairs.get(kind, 0.0) for kind in types)
