"""Position maps written out: relative positions by the papers' formulas, and attention by them.

Everything is a loop over queries and keys in float64, on keys whose own rotation is taken off
first, so that nothing depends on how the package cuts, turns and merges.
"""

import math

import torch


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
            for j in range(i + 1):
                r = i - j if i < self.start or not mapped else self.relative(i, j)
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
