"""Position maps written out: relative positions by the papers' formulas, and attention by them.

Everything is a loop over queries and keys in float64, on keys whose own rotation is taken off
first, so that nothing depends on how the package cuts, turns and merges.
"""

import copy
import math

import torch
from transformers import AttentionInterface

import rope_patch
from helpers.tiny_models import TRAINED


def rerope(i, j, w):
    return min(i - j, w)


def leaky_rerope(i, j, w, k):
    return i - j if i - j < w else w + (i - j - w) / k


def self_extend(i, j, w, group):
    return i - j if i - j < w else i // group - j // group + w - w // group


def jet_long(i, j, w, length):
    group = math.ceil((i + 1) / length)
    return i - j if i - j <= w else i // group - j // group


def dca(i, j, s, top):
    behind = i // s - j // s
    query = [i % s, min(i % s + s, top), min(2 * s - 1, top)][min(behind, 2)]
    return query - j % s


def string(i, j, offset, local):
    return i - j if i - j < offset else i - j - offset + local


def lm_infinite(i, j, w, sinks):
    if i - j < w:
        return i - j
    return w if j < sinks else None


def streaming(i, j, w, sinks):
    if j < sinks:
        return min(i, sinks + w - 1) - j
    return i - j if i - j < w else None


def dpe(i, j, w, groups):
    """Return one relative position for each group."""
    return [self_extend(i, j, w, group) for group in groups]


class WrittenOutMap:
    """An attention function that compares at relative positions, one pair of tokens at a time.

    A mask of booleans, alike for all rows, may show a query later keys, at their own distance.

    Attributes:
        relative: The relative position of query i and key j, one for each rotated pair if a list;
            None where the query does not see the key.
        inv_freq: Radians per token, `[P]`.
        start: Queries before it compare at their own distance.
        temperature: Factor of a query's logits, by its position.
        layers: Which attentions do so.
        is_tempered_everywhere: Whether the other ones have the temperature, too.
    """

    def __init__(
        self,
        relative,
        inv_freq,
        start,
        temperature=lambda i: 1.0,
        layers=lambda module: True,
        is_tempered_everywhere=True,
    ):
        self.relative, self.inv_freq, self.start = relative, inv_freq.double(), start
        self.temperature, self.layers = temperature, layers
        self.is_tempered_everywhere = is_tempered_everywhere

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **options):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        steps, slots = query.shape[2], key.shape[2]
        window, mapped = options.get("sliding_window"), self.layers(module)
        sinks = options.get("s_aux")
        output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
        plain_query = self._turn(query, -torch.arange(slots - steps, slots))
        plain_key = self._turn(key, -torch.arange(slots))
        for step in range(steps):
            i = slots - steps + step
            seen, turns = [], []
            shown = range(i + 1) if attention_mask is None else attention_mask[0, 0, step].nonzero()
            for j in map(int, shown):
                is_plain = i < max(self.start, j) or not mapped
                r = i - j if is_plain else self.relative(i, j)
                if r is None or (window is not None and i - j >= window):
                    continue
                seen.append(j)
                turns.append(r)
            pairs = torch.tensor(turns, dtype=torch.float64)
            if pairs.ndim == 1:
                pairs = pairs[:, None].expand(-1, len(self.inv_freq))
            else:
                pairs = pairs.repeat_interleave(len(self.inv_freq) // pairs.shape[1], 1)
            turned = self._turn(plain_key[:, :, seen], -pairs)
            logits = (turned * plain_query[:, :, step, None]).sum(-1)
            is_tempered = mapped or self.is_tempered_everywhere
            logits = logits * scaling * (self.temperature(i) if is_tempered else 1)
            if (cap := options.get("softcap")) is not None:
                logits = torch.tanh(logits / cap) * cap
            if sinks is not None:
                column = sinks.to(logits.dtype).view(1, -1, 1).expand(len(logits), -1, 1)
                weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
            else:
                weights = logits.softmax(-1)
            output[:, :, step] = (weights[..., None] * value[:, :, seen]).sum(2)
        return output.transpose(1, 2), None

    def _turn(self, x, positions):
        """Rotate pairs a half of the rotated part apart by positions, `[S]` or `[S, P]`."""
        positions = positions.double()
        angle = (positions[:, None] if positions.ndim == 1 else positions) * self.inv_freq
        half = len(self.inv_freq)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


LOG_N = lambda i: max(1.0, math.log(i + 1) / math.log(TRAINED))  # noqa: E731
ONE = lambda i: 1.0  # noqa: E731
# Options, the relative position of i and j, the first query that is mapped, the temperature.
MAPS = {
    "rerope": ({"window": 20}, lambda i, j: rerope(i, j, 20), TRAINED, LOG_N),
    "leaky-rerope": (
        {"window": 20, "k": 4.0, "temperature": "none"},
        lambda i, j: leaky_rerope(i, j, 20, 4),
        TRAINED,
        ONE,
    ),
    "self-extend": (
        {"window": 10, "group": 3},
        lambda i, j: self_extend(i, j, 10, 3),
        TRAINED,
        LOG_N,
    ),
    "jet-long": ({"window": 16}, lambda i, j: jet_long(i, j, 16, TRAINED), TRAINED, LOG_N),
    "dca": ({}, lambda i, j: dca(i, j, 48, 63), TRAINED, LOG_N),
    "string": (
        {"offset": 40, "local": 8, "on": "linear:4"},
        lambda i, j: string(i, j, 40, 8),
        40,
        ONE,
    ),
    "dpe": (
        {"groups": [2, 4, 3, 8], "window": 9},
        lambda i, j: dpe(i, j, 9, (2, 4, 3, 8)),
        TRAINED,
        LOG_N,
    ),
    "lm-infinite": (
        {"window": 30, "sinks": 3},
        lambda i, j: lm_infinite(i, j, 30, 3),
        30,
        ONE,
    ),
    "streaming": (
        {"window": 30, "sinks": 3},
        lambda i, j: streaming(i, j, 30, 3),
        33,
        ONE,
    ),
}


def written_out(model, name):
    """Return a copy of an unpatched model whose attention is written out."""
    options, relative, start, temperature = MAPS[name]
    twin = copy.deepcopy(model)
    if "on" in options:
        method, factor = options["on"].split(":")
        rope_patch.patch(twin, method, factor=float(factor))
    types = getattr(model.config, "layer_types", None) or ["full_attention"]
    has_windows = "sliding_attention" in types
    truth = WrittenOutMap(
        relative,
        inv_freq(twin),
        start,
        temperature,
        lambda module: not has_windows or types[module.layer_idx] == "full_attention",
        # With one rotation for all layers, all of them are tempered.
        is_tempered_everywhere=model.config.model_type != "gemma3_text",
    )
    AttentionInterface.register("written_out", truth)
    twin.set_attn_implementation("written_out")
    return twin


def inv_freq(model):
    """Return the frequencies of the layers without a window, in float32 as the model has them."""
    rotary = model.model.rotary_emb
    buffers = dict(rotary.named_buffers())
    return buffers.get("full_attention_inv_freq", buffers.get("inv_freq"))
