"""Write checkpoints that bring Python code: tiny-llama's weights and tokenizer, under own classes.

`cached` computes cos and sin once in every layer, for as many positions as the config names, as
remote code that was written for transformers 4 does (inclusionAI's Ling). Each file leaves a line
in `RAN` when it is executed.
"""

import json
import shutil
from pathlib import Path

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
RAN = "code-that-ran.txt"

_CONFIGURATION = """
from transformers import LlamaConfig

open({ran!r}, "a").write("configuration\\n")


class TinyLingConfig(LlamaConfig):
    model_type = "tiny_ling"
"""

_PLAIN = """
import torch
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaModel,
    apply_rotary_pos_emb,
)

from .configuration_tiny_ling import TinyLingConfig

open({ran!r}, "a").write("modeling\\n")


class TinyLingRotaryEmbedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.rope_type = "default"
        inv_freq, self.attention_scaling = self.compute_default_rope_parameters(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod  # transformers 5 computes buffers by it that no checkpoint holds
    def compute_default_rope_parameters(config, device=None, **kwargs):
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float, device=device)
        return 1.0 / config.rope_parameters["rope_theta"] ** (steps / config.head_dim), 1.0

    @torch.no_grad()
    def forward(self, x, position_ids):
        angles = position_ids[:, :, None].float() * self.inv_freq.float()
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos() * self.attention_scaling, both.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


class TinyLingModel(LlamaModel):
    config_class = TinyLingConfig

    def __init__(self, config):
        super().__init__(config)
        self.rotary_emb = TinyLingRotaryEmbedding(config)
        self.post_init()


class TinyLingForCausalLM(LlamaForCausalLM):
    config_class = TinyLingConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = TinyLingModel(config)
        self.post_init()
"""

_CACHED = """
import torch
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
)

from .configuration_tiny_ling import TinyLingConfig

open({ran!r}, "a").write("modeling\\n")


class TinyLingRotaryEmbedding(nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        self.dim, self.base = dim, base
        self.max_seq_len_cached = 0

    def _set_cos_sin_cache(self, seq_len, device):
        steps = torch.arange(0, self.dim, 2, dtype=torch.float, device=device)
        inv_freq = 1.0 / self.base ** (steps / self.dim)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float, device=device), inv_freq)
        both = torch.cat((angles, angles), dim=-1)
        self.max_seq_len_cached, self.cos_cached, self.sin_cached = seq_len, both.cos(), both.sin()

    def forward(self, position_ids):
        if int(position_ids.max()) >= self.max_seq_len_cached:
            self._set_cos_sin_cache(int(position_ids.max()) + 1, position_ids.device)
        return self.cos_cached[position_ids], self.sin_cached[position_ids]


class Nothing(nn.Module):
    def forward(self, hidden_states, position_ids):
        return None


class TinyLingAttention(LlamaAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        base = config.rope_parameters["rope_theta"]
        self.rotary_emb = TinyLingRotaryEmbedding(config.head_dim, base)

    def forward(self, hidden_states, position_embeddings=None, position_ids=None, **kwargs):
        own = self.rotary_emb(position_ids)
        return super().forward(hidden_states, position_embeddings=own, **kwargs)


class TinyLingModel(LlamaModel):
    config_class = TinyLingConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = TinyLingAttention(config, index)
        self.rotary_emb = Nothing()
        self.post_init()


class TinyLingForCausalLM(LlamaForCausalLM):
    config_class = TinyLingConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = TinyLingModel(config)
        self.post_init()
"""


def write_remote_checkpoint(folder, *, cached=False):
    """Write a checkpoint with code of its own into a new folder; return the folder."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "tiny_ling",
        "architectures": ["TinyLingForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_tiny_ling.TinyLingConfig",
            "AutoModelForCausalLM": "modeling_tiny_ling.TinyLingForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    ran = str(folder / RAN)
    files = {"configuration": _CONFIGURATION, "modeling": _CACHED if cached else _PLAIN}
    for name, text in files.items():
        (folder / f"{name}_tiny_ling.py").write_text(text.lstrip().format(ran=ran))
    return folder


def code_that_ran(folder):
    """Return the names of the files of a checkpoint that were executed, in their order."""
    path = folder / RAN
    return path.read_text().split() if path.is_file() else []
