"""Decode latent attention as a reference: cache rotary slices unrotated, rotate them when read.

Independent of the package: transformers' modules, the formula of dynamic YaRN in
`reference_rerotation`, and a cache class written here.
"""

import copy
import math
import sys

import torch
from transformers import DynamicCache

from helpers.reference_rerotation import frequencies, stepped

FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")


class UnrotatedCache(DynamicCache):
    """A cache of unrotated slices, which it returns rotated by `inv_freq`."""

    inv_freq = None
    neighbours = False
    indexer_last = False

    def rotated(self, x):
        """Rotate `[B, H, S, R]`, the keys at positions 0 to S - 1."""
        angle = torch.arange(x.shape[2])[:, None].float() * self.inv_freq
        pairs = torch.stack([x[..., 0::2], x[..., 1::2]] if self.neighbours else x.chunk(2, -1), -1)
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
            torch.ones_like(angle), angle
        )
        pairs = torch.view_as_real(turned)
        return pairs.flatten(-2) if self.neighbours else torch.cat(pairs.unbind(-1), -1)

    def update(self, keys, slices, layer, *args, **kwargs):
        keys, slices = super().update(keys, slices, layer, *args, **kwargs)
        return keys, self.rotated(slices)

    def update_indexer(self, keys, layer):
        keys = super().update_indexer(keys, layer)
        width = 2 * len(self.inv_freq)
        if self.indexer_last:
            rest, part = keys[..., :-width], keys[..., -width:]
            return torch.cat([rest, self.rotated(part[:, None])[:, 0]], -1)
        part, rest = keys[..., :width], keys[..., width:]
        return torch.cat([self.rotated(part[:, None])[:, 0], rest], -1)


class LatentReference:
    """An unpatched model under dynamic YaRN, whose keys are rotated afresh in each step."""

    def __init__(self, model, monkeypatch):
        self.model = copy.deepcopy(model)
        self.config = model.config
        module = sys.modules[type(model).__module__]
        for name in FUNCTIONS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, self.rotate_queries_only(getattr(module, name)))
        self.cache = UnrotatedCache(config=self.config)
        self.cache.neighbours = self.config.model_type == "deepseek_v2"
        self.cache.indexer_last = self.config.model_type == "hy_v4"

    def rotate_queries_only(self, function):
        def apply(q, k, *tables, **kwargs):
            if len(tables) == 2:
                none = torch.ones_like(tables[0]), torch.zeros_like(tables[1])
            else:
                none = (torch.ones_like(tables[0]),)
            return function(q, k, *tables, **kwargs)[0], function(q, k, *none, **kwargs)[1]

        return apply

    @torch.no_grad()
    def step(self, ids):
        """Return the logits of the next tokens, which all see the frequencies of the last one."""
        length = self.cache.get_seq_length() + ids.shape[1]
        inv_freq, _ = frequencies(self.config, "dynamic-yarn", length)
        mscale = 0.1 * math.log(stepped(length, self.config.max_position_embeddings)) + 1
        self.cache.inv_freq = inv_freq
        for module in self.model.modules():
            if "inv_freq" in module._buffers:
                module.inv_freq = inv_freq
            if hasattr(module, "qk_nope_head_dim") and hasattr(module, "scaling"):
                module.scaling = module.qk_head_dim**-0.5 * mscale**2
        return self.model(ids, past_key_values=self.cache).logits
