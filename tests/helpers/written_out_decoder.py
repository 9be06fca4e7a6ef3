"""A Llama's forward written out in numpy: float64, one loop a head and a query, any encoding.

Encodings are formulas of their papers, with the trained parts of a model's state. Nothing here
comes from the package.
"""

import math

import numpy as np

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 8, 16


def sinusoids(position, width, base, halves):
    angles = [position / base ** (2 * k / width) for k in range(width // 2)]
    if halves:
        return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return [wave(a) for a in angles for wave in (math.sin, math.cos)]


def digits(position, width, base, count):
    values = [2 * (position // base**k % base) / (base - 1) - 1 for k in range(count)]
    repeated = [value for value in values for _ in range(width // count)]
    return repeated + [0.0] * (width - len(repeated))


def vector(name, options, own, position, width):
    """Return what is added to an embedding."""
    if name == "learned":
        return own["table.weight"][position]
    rows = {
        "integer": lambda: [position] * width,
        "normalised": lambda: [position / options.get("length", LENGTH)] * width,
        "binary": lambda: digits(
            position,
            width,
            options.get("base", 2),
            options.get("digits", {2: 16, 4: 8, 8: 6, 16: 4}[options.get("base", 2)]),
        ),
        "sinusoidal": lambda: sinusoids(
            position, width, options.get("base", 10000), options.get("layout") == "halves"
        ),
    }
    return own["scale"] * np.array(rows[name](), dtype=np.float64) if name in rows else 0.0


def t5_bucket(distance, buckets=32, largest=128):
    exact = buckets // 2
    if distance < exact:
        return distance
    share = np.log(np.float32(distance) / np.float32(exact)) / math.log(largest / exact)
    return min(buckets - 1, exact + int(share * (buckets - exact)))


def bias(name, options, own, head, query, key):
    """Return what is added to a logit."""
    distance = query - key
    if name == "alibi":
        return -(2.0 ** (-8 * (head + 1) / HEADS)) * distance
    if name == "t5":
        return own["relative_attention_bias.weight"][t5_bucket(distance), head]
    if name == "kerple":
        weight, rate = max(own["weight"][head], 0.01), max(own["rate"][head], 0.01)
        if options.get("kind") == "power":
            return -weight * distance ** min(rate, 2.0) if distance else 0.0
        return -weight * math.log(1 + rate * distance)
    if name == "sandwich":
        width = options.get("width", 128)
        waves = [math.cos(distance / 10000 ** (2 * k / width)) for k in range(width // 2)]
        return (sum(waves) - width / 2) / (8 * (head + 1) / HEADS)
    if name == "fire":
        threshold = abs(own["multiplier"] * options.get("threshold", 512))
        rate = abs(own["rate"])
        share = math.log(rate * distance + 1) / math.log(rate * max(threshold, query) + 1)
        hidden = np.maximum(own["inner.weight"][:, 0] * share + own["inner.bias"], 0)
        return own["outer.weight"][head] @ hidden + own["outer.bias"][head]
    return 0.0


def angles(name, options, layer):
    """Return radians a token of each pair."""
    pairs = range(HEAD_DIM // 2)
    still = [0.0] * len(pairs)
    if name == "rnope" and (layer + 1) % options.get("every", 2) == 0:
        return still
    if name not in ("rope", "rnope", "xpos"):
        return still
    base = options.get("base", 10000)
    if share := options.get("partial"):
        rotary = int(share * HEAD_DIM)
        return [base ** (-2 * k / rotary) if k < rotary // 2 else 0.0 for k in pairs]
    fastest = int(options.get("p", 1.0) * HEAD_DIM / 2)
    return [base ** (-2 * k / HEAD_DIM) if k < fastest else 0.0 for k in pairs]


def logit(name, options, layer, query, key, i, j):
    """Return the product of a query at i and a key at j, rotated by their distance."""
    total, half = 0.0, HEAD_DIM // 2
    for k, angle in enumerate(angles(name, options, layer)):
        turn = (i - j) * angle
        a, b, c, d = query[k], query[k + half], key[k], key[k + half]
        part = (a * c + b * d) * math.cos(turn) + (a * d - b * c) * math.sin(turn)
        if name == "xpos":
            zeta = (2 * k / HEAD_DIM + options.get("gamma", 0.4)) / (1 + options.get("gamma", 0.4))
            part *= zeta ** ((i - j) / options.get("scale", 512))
        total += part
    return total / math.sqrt(HEAD_DIM)


def norm(states, weight, epsilon):
    return weight * states / np.sqrt((states**2).mean(-1, keepdims=True) + epsilon)


def attend(name, options, own, layer, queries, keys, values):
    """Return `[S, H * D]` of causal attention, one logit after the other."""
    out = np.zeros((len(queries), HEADS * HEAD_DIM))
    for head in range(HEADS):
        mine = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        group = head // (HEADS // KV_HEADS)
        theirs = slice(group * HEAD_DIM, (group + 1) * HEAD_DIM)
        for i in range(len(queries)):
            logits = [
                logit(name, options, layer, queries[i, mine], keys[j, theirs], i, j)
                + bias(name, options, own, head, i, j)
                for j in range(i + 1)
            ]
            weights = np.exp(np.array(logits) - max(logits))
            out[i, mine] = weights / weights.sum() @ values[: i + 1, theirs]
    return out


def written_out_logits(model, name, options, tokens):
    """Return a row's logits, `[S, vocabulary]`.

    Args:
        model: A LlamaForCausalLM of this module's sizes, encoded.
        name: The encoding.
        options: Its options, those that were given.
        tokens: `[S]`.
    """
    state = {key: value.double().numpy() for key, value in model.state_dict().items()}
    prefix = "model.position_encoding."
    own = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    epsilon = model.config.rms_norm_eps
    hidden = np.stack(
        [
            state["model.embed_tokens.weight"][token]
            + vector(name, options, own, position, model.config.hidden_size)
            for position, token in enumerate(tokens.tolist())
        ]
    )
    for layer in range(model.config.num_hidden_layers):
        own_layer = f"model.layers.{layer}."

        def weight(key, own_layer=own_layer):
            return state[f"{own_layer}{key}.weight"]

        states = norm(hidden, weight("input_layernorm"), epsilon)
        queries, keys, values = (states @ weight(f"self_attn.{part}_proj").T for part in "qkv")
        attended = attend(name, options, own, layer, queries, keys, values)
        hidden = hidden + attended @ weight("self_attn.o_proj").T
        states = norm(hidden, weight("post_attention_layernorm"), epsilon)
        gate, up = (states @ weight(f"mlp.{part}_proj").T for part in ("gate", "up"))
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weight("mlp.down_proj").T
    return norm(hidden, state["model.norm.weight"], epsilon) @ state["lm_head.weight"].T
