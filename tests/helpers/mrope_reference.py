"""Decode a model with M-RoPE as a reference: cache keys unrotated, rotate them when they are read.

The sections are Qwen's published rules, written here a second time.
"""

import torch

from helpers.reference_rerotation import Reference, rotate_half, stepped


def contiguous_axes(sections):
    """Return the axis of each pair: first those of time, then height, then width (Qwen2-VL)."""
    return [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]


def interleaved_axes(sections):
    """Return the axis of each pair: time, height, width in turn, and time for the rest (Qwen3-VL).

    Height and width take turns until they have had as many as their sections say.
    """
    axes = []
    for pair in range(sum(sections)):
        turn, axis = divmod(pair, 3)
        axes.append(axis if turn < sections[axis] else 0)
    return axes


class MRopeReference(Reference):
    """`Reference` for models whose tokens have three positions, on their text decoder.

    Positions are `[3, 1, S]`, of one row.

    Attributes:
        axes: The axis of each pair.
    """

    def __init__(self, model, method, growth=stepped, options=None):
        config = model.config.get_text_config()
        sections = config.rope_parameters["mrope_section"]
        rule = contiguous_axes if config.model_type.startswith("qwen2") else interleaved_axes
        self.axes = torch.tensor(rule(sections))
        super().__init__(model, method, growth, options)

    def join(self, past, positions):
        if positions.ndim == 2:
            positions = positions[None]
        if len(positions) == 4:  # the first are for the mask of packed rows
            positions = positions[1:]
        return torch.cat([past.expand(3, 1, -1), positions[:, :1].expand(3, -1, -1)], dim=2)

    def rotate(self, x, layer):
        inv_freq, scale = self.current(layer)
        positions = self.positions[self.axes, 0, -x.shape[2] :]  # [R / 2, S]
        angle = (positions.float() * inv_freq[:, None]).T.repeat(1, 2)
        rotated, rest = x.split([angle.shape[1], x.shape[3] - angle.shape[1]], dim=-1)
        rotated = rotated * angle.cos() * scale + rotate_half(rotated) * angle.sin() * scale
        return torch.cat([rotated, rest], dim=-1)

    @torch.no_grad()
    def run(self, steps, cache=None):
        """Return the logits of forward calls after another, `[1, S, V]`; each has its arguments."""
        cache = cache or self.new_cache()
        return torch.cat([self.model(**s, past_key_values=cache).logits for s in steps], 1)
