"""List the rotations of published models: fields of config.json, and the geometry they mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@dataclass(frozen=True)
class Published:
    """One layer type of a published model.

    Attributes:
        name: Name of the model.
        short: Abbreviation for column heads.
        repository: Hub repository of the config.json.
        model_type: model_type in config.json.
        fields: The fields of config.json that determine the rotation.
        head_dim: Size of a head (D).
        rotary_dim: Dimensions that rotate (R).
        theta: Rope base.
        trained_length: Tokens before any extension.
        layer_type: The layer type, if there are several.
    """

    name: str
    short: str
    repository: str
    model_type: str
    fields: dict[str, Any] = field(repr=False, hash=False)
    head_dim: int
    rotary_dim: int
    theta: float
    trained_length: int
    layer_type: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def scaling(self) -> dict[str, Any] | None:
        """Return the scaling in config.json, if it has one."""
        return self.fields.get("rope_scaling")

    def config(self) -> PreTrainedConfig:
        """Build transformers' config from the published fields."""
        return CONFIG_MAPPING[self.model_type](**self.fields)

    def numbers(self) -> dict[str, Any]:
        """Return the geometry as arguments of `rope_patch.frequencies`."""
        return {
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "theta": self.theta,
            "trained_length": self.trained_length,
        }


def _heads(hidden: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **more,
    }


# As published: float32 numbers in decimals.
PHI_LONG = """
1.0800000429153442 1.1100000143051147 1.1399999856948853 1.340000033378601 1.5899999141693115
1.600000023841858 1.6200000047683716 2.620000123977661 3.2300000190734863 3.2300000190734863
4.789999961853027 7.400000095367432 7.700000286102295 9.09000015258789 12.199999809265137
17.670000076293945 24.46000099182129 28.57000160217285 30.420001983642578 30.840002059936523
32.590003967285156 32.93000411987305 42.320003509521484 44.96000289916992 50.340003967285156
50.45000457763672 57.55000305175781 57.93000411987305 58.21000289916992 60.1400032043457
62.61000442504883 62.62000274658203 62.71000289916992 63.1400032043457 63.1400032043457
63.77000427246094 63.93000411987305 63.96000289916992 63.970001220703125 64.02999877929688
64.06999969482422 64.08000183105469 64.12000274658203 64.41000366210938 64.4800033569336
64.51000213623047 64.52999877929688 64.83999633789062
"""
PHI_SHORT = """
1.0 1.0199999809265137 1.0299999713897705 1.0299999713897705 1.0499999523162842
1.0499999523162842 1.0499999523162842 1.0499999523162842 1.0499999523162842 1.0699999332427979
1.0999999046325684 1.1099998950958252 1.1599998474121094 1.1599998474121094 1.1699998378753662
1.2899998426437378 1.339999794960022 1.679999828338623 1.7899998426437378 1.8199998140335083
1.8499997854232788 1.8799997568130493 1.9099997282028198 1.9399996995925903 1.9899996519088745
2.0199997425079346 2.0199997425079346 2.0199997425079346 2.0199997425079346 2.0199997425079346
2.0199997425079346 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914
2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914
2.0799996852874756 2.0899996757507324 2.189999580383301 2.2199995517730713 2.5899994373321533
2.729999542236328 2.749999523162842 2.8399994373321533
"""
_PHI3 = _heads(3072, 32, 32, original_max_position_embeddings=4096, rope_theta=10000.0)
_PHI3_SCALING = {
    "type": "longrope",
    "long_factor": [float(number) for number in PHI_LONG.split()],
    "short_factor": [float(number) for number in PHI_SHORT.split()],
}
_LLAMA31_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_DEEPSEEK3_SCALING = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_GEMMA3 = _heads(
    1152, 4, 1, head_dim=256, max_position_embeddings=32768, num_hidden_layers=26,
    sliding_window=512, rope_theta=1000000, rope_local_base_freq=10000,
)  # fmt: skip

LLAMA2 = Published(
    "Llama-2-7B", "L2", "meta-llama/Llama-2-7b-hf", "llama",
    _heads(4096, 32, 32, max_position_embeddings=4096), 128, 128, 1e4, 4096,
)  # fmt: skip
LLAMA31 = Published(
    "Llama-3.1-8B", "L3.1", "meta-llama/Llama-3.1-8B", "llama",
    _heads(4096, 32, 8, max_position_embeddings=131072, rope_theta=500000.0,
           rope_scaling=_LLAMA31_SCALING), 128, 128, 5e5, 8192,
)  # fmt: skip
LLAMA32 = Published(
    "Llama-3.2-1B", "L3.2", "meta-llama/Llama-3.2-1B", "llama",
    _heads(2048, 32, 8, head_dim=64, max_position_embeddings=131072, rope_theta=500000.0,
           rope_scaling={**_LLAMA31_SCALING, "factor": 32.0}), 64, 64, 5e5, 8192,
)  # fmt: skip
QWEN25 = Published(
    "Qwen2.5-7B-Instruct", "Q2.5", "Qwen/Qwen2.5-7B-Instruct", "qwen2",
    _heads(3584, 28, 4, max_position_embeddings=32768, rope_theta=1000000.0),
    128, 128, 1e6, 32768,
)  # fmt: skip
QWEN3 = Published(
    "Qwen3-8B", "Q3", "Qwen/Qwen3-8B", "qwen3",
    _heads(4096, 32, 8, head_dim=128, max_position_embeddings=40960, rope_theta=1000000),
    128, 128, 1e6, 40960,
)  # fmt: skip
GEMMA3_FULL = Published(
    "Gemma-3-1B, full attention", "G3", "google/gemma-3-1b-it", "gemma3_text", _GEMMA3,
    256, 256, 1e6, 32768, "full_attention",
)  # fmt: skip
GEMMA3_SLIDING = Published(
    "Gemma-3-1B, sliding window", "G3s", "google/gemma-3-1b-it", "gemma3_text", _GEMMA3,
    256, 256, 1e4, 32768, "sliding_attention",
)  # fmt: skip
SMOLLM2 = Published(
    "SmolLM2-135M", "S2", "HuggingFaceTB/SmolLM2-135M", "llama",
    _heads(576, 9, 3, max_position_embeddings=8192, rope_theta=100000), 64, 64, 1e5, 8192,
)  # fmt: skip
MISTRAL_1 = Published(
    "Mistral-7B-v0.1", "M.1", "mistralai/Mistral-7B-v0.1", "mistral",
    _heads(4096, 32, 8, max_position_embeddings=32768, rope_theta=10000.0, sliding_window=4096),
    128, 128, 1e4, 32768,
)  # fmt: skip
MISTRAL_3 = Published(
    "Mistral-7B-v0.3", "M.3", "mistralai/Mistral-7B-v0.3", "mistral",
    _heads(4096, 32, 8, max_position_embeddings=32768, rope_theta=1000000.0, sliding_window=None),
    128, 128, 1e6, 32768,
)  # fmt: skip
GPT_OSS = Published(
    "gpt-oss-20b", "oss", "openai/gpt-oss-20b", "gpt_oss",
    _heads(2880, 64, 8, head_dim=64, max_position_embeddings=131072, rope_theta=150000,
           rope_scaling=_GPT_OSS_SCALING), 64, 64, 1.5e5, 4096,
)  # fmt: skip
PHI3 = Published(
    "Phi-3-mini-4k", "P3", "microsoft/Phi-3-mini-4k-instruct", "phi3",
    {**_PHI3, "max_position_embeddings": 4096}, 96, 96, 1e4, 4096,
)  # fmt: skip
PHI35 = Published(
    "Phi-3.5-mini (128k)", "P3.5", "microsoft/Phi-3.5-mini-instruct", "phi3",
    {**_PHI3, "max_position_embeddings": 131072, "rope_scaling": _PHI3_SCALING},
    96, 96, 1e4, 4096,
)  # fmt: skip
PHI2 = Published(
    "Phi-2", "P2", "microsoft/phi-2", "phi",
    _heads(2560, 32, 32, max_position_embeddings=2048, rope_theta=10000.0,
           partial_rotary_factor=0.4), 80, 32, 1e4, 2048,
)  # fmt: skip
DEEPSEEK3 = Published(
    "DeepSeek-V3", "DS3", "deepseek-ai/DeepSeek-V3", "deepseek_v3",
    _heads(7168, 128, 128, qk_rope_head_dim=64, qk_nope_head_dim=128,
           max_position_embeddings=163840, rope_theta=10000, rope_scaling=_DEEPSEEK3_SCALING),
    64, 64, 1e4, 4096,
)  # fmt: skip

ALL = (
    LLAMA2, LLAMA31, LLAMA32, QWEN25, QWEN3, GEMMA3_FULL, GEMMA3_SLIDING, SMOLLM2, MISTRAL_1,
    MISTRAL_3, GPT_OSS, PHI3, PHI35, PHI2,
    DEEPSEEK3,
)  # fmt: skip
