"""Relative positions of the maps, from the papers' formulas, for one query and one key.

Each function takes the query i, the key j, the positions R that the frequencies reach, and the
method's options, and returns the relative position, or None where the key is not seen. Defaults
are those that the method documents. A query before the first mapped one is not asked for.
"""

import math


def self_extend(i, j, reach, window=None, group=None):
    window = reach // 4 if window is None else window
    if group is None:  # the smallest that keeps every position within two thirds of the reach
        group = 1
        while window + (i + 1 - window) / group > 2 * reach // 3:
            group += 1
    return i - j if i - j < window else i // group - j // group + window - window // group


def jet_long(i, j, reach, window=None, group=None):
    window = min(2048, reach // 4) if window is None else window
    if group is None:
        group = 1
        while group * reach < i + 1:
            group += 1
    return i - j if i - j <= window else i // group - j // group


def rerope(i, j, reach, window=None):
    return min(i - j, reach // 4 if window is None else window)


def leaky_rerope(i, j, reach, window=None, k=16):
    window = reach // 4 if window is None else window
    return i - j if i - j < window else window + (i - j - window) / k


def dca(i, j, reach, sizes="paper", chunk=None, top=None):
    parts = {"paper": (3 / 4, reach - 1), "released": (5 / 8, math.floor(reach * 3 / 4))}[sizes]
    chunk = math.floor(reach * parts[0]) if chunk is None else chunk
    top = parts[1] if top is None else top
    older = i // chunk - j // chunk
    place = (i % chunk, min(i % chunk + chunk, top), min(2 * chunk - 1, top))[min(older, 2)]
    return place - j % chunk


def string(i, j, reach, offset=None, local=None):
    offset = reach // 3 if offset is None else offset
    local = min(128, offset // 2) if local is None else local
    return i - j if i - j < offset else i - j - offset + local


def lampe(i, j, reach, mapped=None, head=None):
    mapped = 3 * reach // 4 if mapped is None else mapped
    head = reach // 8 if head is None else head
    steps = 0
    while math.ceil(reach * 2 ** (steps / 4)) <= i:
        steps += 1
    scale = mapped / (math.ceil(reach * 2 ** (steps / 4)) - 1)
    if i - j <= head:
        return i - j
    at = {p: math.floor(p * scale) for p in (i, j, head)}
    return at[i] - at[j] + head - at[head] - 1


def dpe(i, j, reach, groups, window=None):
    window = reach // 8 if window is None else window
    return [self_extend(i, j, reach, window, group) for group in groups]


def lm_infinite(i, j, reach, window=None, sinks=10, limit=None):
    window = reach - 1 if window is None else window
    if i - j < window:
        return i - j
    return (window if limit is None else limit) if j < sinks else None


def streaming(i, j, reach, window=None, sinks=4):
    window = reach - sinks if window is None else window
    if j < sinks:
        return min(i, sinks + window - 1) - j
    return i - j if i - j < window else None


FORMULAS = {
    "self-extend": self_extend,
    "jet-long": jet_long,
    "rerope": rerope,
    "leaky-rerope": leaky_rerope,
    "dca": dca,
    "string": string,
    "lampe": lampe,
    "dpe": dpe,
    "lm-infinite": lm_infinite,
    "streaming": streaming,
}
