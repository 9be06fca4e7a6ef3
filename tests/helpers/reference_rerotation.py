"""Decode as a reference for re-rotation: cache keys unrotated, rotate them whenever they are read.

Independent of the package: transformers' modules and formulas, and a cache class written here.
"""

import copy
import math
import types

import torch
from transformers import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers.tiny_models import given_cache


def stepped(length, trained):
    """Return the factor on the grid 2^(k/4), by searching the grid from below."""
    step = 0
    while trained * 2 ** (step / 4) < length:
        step += 1
    return 2 ** (step / 4)


def exact(length, trained):
    return max(1.0, length / trained)


def frequencies(config, method, length, growth=stepped, layer_type=None, options=None):
    """Return (inv_freq, attention factor) of a sequence, computed by transformers' functions."""
    trained = config.max_position_embeddings
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    theta = parameters["rope_theta"]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial = {k: parameters[k] for k in ("partial_rotary_factor",) if k in parameters}
    head_dim = int(head_dim * partial.get("partial_rotary_factor", 1.0))
    plain = 1 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if method == "longrope":
        stretch = options["short_factor" if length <= trained else "long_factor"]
        scale = math.sqrt(1 + math.log(options["factor"]) / math.log(trained))
        return plain / torch.tensor(stretch), scale
    factor = growth(length, trained)
    if factor == 1:
        return plain, 1.0
    if method == "dynamic":
        return 1 / (theta * factor ** (head_dim / (head_dim - 2))) ** (
            torch.arange(0, head_dim, 2).float() / head_dim
        ), 1.0
    if method == "dynamic-linear":
        return plain / factor, 1.0
    flat = copy.deepcopy(config)
    flat.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": trained,
        **partial,
    }
    inv_freq, scale = ROPE_INIT_FUNCTIONS["yarn"](flat, "cpu")
    return inv_freq, 1.0 if method == "dynamic-ntk-by-parts" else scale


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotate(x, positions, inv_freq, scale):
    angle = positions[:, None, :, None].float() * torch.cat([inv_freq, inv_freq])
    return x * angle.cos() * scale + rotate_half(x) * angle.sin() * scale


class Reference:
    """An unpatched model that rotates all keys by the current frequencies at every step.

    All rows have the same positions, like the beams of one prompt. Each row of a padded batch
    needs a separate reference.

    Attributes:
        model: transformers' model; its logits with `new_cache()` are the truth.
    """

    def __init__(self, model, method, growth=stepped, options=None):
        self.model = copy.deepcopy(model)
        self.config = self.model.config.get_text_config()
        self.method, self.growth, self.options = method, growth, options
        nested = all(isinstance(v, dict) for v in self.config.rope_parameters.values())
        self.kinds = self.config.layer_types if nested else [None] * self.config.num_hidden_layers
        decoder = self.model.get_decoder()
        decoder.register_forward_pre_hook(self._note_positions, with_kwargs=True)
        for module in self.model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
                self._keep_keys_unrotated(module)

    def new_cache(self):
        return _Unrotated(self)

    def current(self, layer):
        kind = self.kinds[layer]
        if kind is not None and "sliding" in kind:  # sliding layers keep the trained rotation
            return frequencies(self.config, "dynamic", 1, exact, kind)
        length = (self.positions.max() - self.positions.min()).item() + 1
        return frequencies(self.config, self.method, length, self.growth, kind, self.options)

    @torch.no_grad()
    def decode(self, ids, prompt, cache=None):
        """Return logits `[1, S, V]` of a prompt in one pass, and of the rest token by token."""
        cache = cache or self.new_cache()
        cuts = [prompt] + [1] * (ids.shape[1] - prompt)
        return torch.cat(
            [self.model(p, past_key_values=cache).logits for p in ids.split(cuts, 1)], 1
        )

    def _note_positions(self, module, args, kwargs):
        cache = given_cache(kwargs)
        past = torch.empty(1, 0, dtype=torch.long) if cache is None else cache.positions
        positions = kwargs.get("position_ids")
        if positions is None:
            tokens = args[0] if args else kwargs.get("input_ids")
            tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
            positions = torch.arange(past.shape[-1], past.shape[-1] + tokens.shape[1])[None]
        self.positions = self.join(past, positions)
        if cache is not None:
            cache.positions = self.positions

    def join(self, past, positions):
        """Return the positions of the cached tokens and the new ones, `[1, S]`."""
        return torch.cat([past, positions[:1]], dim=1)

    def rotate(self, x, layer):
        """Return the last tokens' queries or keys, rotated by the current frequencies."""
        return rotate(x, self.positions[:, -x.shape[2] :], *self.current(layer))

    def _keep_keys_unrotated(self, attention):
        def apply(q, k, cos, sin, *args, **kwargs):
            return self.rotate(q, attention.layer_idx), k

        forward = type(attention).forward
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        function = types.FunctionType(
            forward.__code__,
            {**forward.__globals__, "apply_rotary_pos_emb": apply},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        function.__kwdefaults__ = forward.__kwdefaults__
        attention.forward = types.MethodType(function, attention)


class _Unrotated(DynamicCache):
    """A cache that stores keys unrotated and returns them rotated by the current frequencies."""

    def __init__(self, reference):
        super().__init__(config=reference.config)
        self.reference = reference
        self.positions = torch.empty(1, 0, dtype=torch.long)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.reference.rotate(keys, layer_idx), values

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)
        self.positions = self.positions[..., : self.get_seq_length()]
