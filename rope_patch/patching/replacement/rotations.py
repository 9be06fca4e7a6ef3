"""Encodings that rotate: RoPE in all layers or in some, partial RoPE and p-RoPE."""

from __future__ import annotations

from rope_patch.patching.replacement.encoding import DecoderShape, RotaryEncoding, require_count
from rope_patch.patching.replacement.registry import register_encoding


@register_encoding("rope")
class Rope(RotaryEncoding):
    """Rotation of queries and keys by their position (RoFormer, arXiv:2104.09864)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()

    def describe(self) -> str:
        return "queries and keys rotate by their position"


@register_encoding("rnope")
class AlternateRope(RotaryEncoding):
    """RoPE in some layers and no positions in the others (RNoPE, arXiv:2501.18795).

    Attributes:
        every: Of so many layers the last has no positions.
    """

    def __init__(self, shape: DecoderShape, *, every: int = 2) -> None:
        super().__init__()
        require_count("every", every, least=2)
        self.every = every

    def rotates(self, layer: int) -> bool:
        return (layer + 1) % self.every > 0

    def describe(self) -> str:
        return f"queries and keys rotate by their position, but in every {self.every}. layer"
