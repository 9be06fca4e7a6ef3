"""Compute how engines rotate by an export: restated in float64, or by transformers."""

import copy

import engine_formulas
import numpy as np
import pytest
import torch
import transformers
from helpers.rotary_modules import find_rotaries, transformers_frequencies
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig


def needs_nested_yarn():
    """Skip if transformers cannot read YaRN for one of several layer types (5.0)."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    plain = {"rope_type": "default", "rope_theta": 1e4}
    try:
        Gemma3TextConfig(rope_parameters={"full_attention": rope, "sliding_attention": plain})
    except KeyError as error:
        pytest.skip(f"transformers {transformers.__version__} looks for {error} at a wrong level")


def assert_same_rotation(original, patched_model, handle, export, loose=False):
    """Assert that every restated release rotates by the export like the patched model.

    Args:
        original: The checkpoint's text config.
        patched_model: The patched model.
        handle: Its patch.
        export: The export.
        loose: Whether some of the numbers are float32.
    """
    rotary, *_ = find_rotaries(patched_model)  # DeepSeek-V4 has several that are alike
    as_configured = transformers_frequencies(rotary, original)
    for kind, expected in {**as_configured, **handle.frequencies}.items():
        rotations = list(read(original, export, kind))
        assert rotations
        for inv_freq, attention in rotations:
            np.testing.assert_allclose(
                inv_freq,
                expected.inv_freq.numpy(),
                rtol=2e-6 if loose or export.engine == "transformers" else 1e-6,
                atol=1e-17,
                err_msg=f"{export.engine} {kind}",
            )
            assert attention == pytest.approx(expected.attention_factor, rel=1e-6), export.engine


def empty_model(config):
    """Return the model of a config without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def merge_config(original, fields):
    """Return the checkpoint's config.json with an export's fields in it."""
    return {**original.to_dict(), **copy.deepcopy(fields)}


def override_config(original, fields, merges=False):
    """Return the checkpoint's config as an engine on transformers 5 overrides it.

    Args:
        original: The config.
        fields: What is passed.
        merges: Whether old keys of `rope_parameters` stay (SGLang in some releases).
    """
    config = copy.deepcopy(original)
    for key, value in fields.items():
        assert hasattr(config, key) or key == "llama_4_scaling"  # vLLM's own
        if merges and key == "rope_parameters":
            value = {**config.rope_parameters, **value}
        setattr(config, key, copy.deepcopy(value))
    config.standardize_rope_params()
    config.validate_rope()
    return config


def read(original, export, kind):
    """Return the rotation of every restated release for an export, for one layer type."""
    engine = export.engine
    if kind is not None and "yarn" in str(export.config):
        needs_nested_yarn()
    sliding = kind == "sliding_attention"
    words = dict(zip(export.arguments[::2], export.arguments[1::2], strict=True))
    if engine == "transformers":
        yield from read_by_transformers(merge_config(original, export.config), kind)
    elif engine == "transformers4":
        yield engine_formulas.transformers4(merge_config(original, export.config), sliding)
    elif engine in ("mlx", "mlx-vlm"):
        config = merge_config(original, export.config)
        yield engine_formulas.mlx(config, kind, vlm=engine == "mlx-vlm")
    elif engine == "llama.cpp" and original.model_type == "deepseek_v4":
        yield engine_formulas.llama_cpp_deepseek_v4(original.to_dict(), kind, export.arguments)
    elif engine == "llama.cpp":
        has_multiplier = "mscale_all_dim" in str(original.rope_parameters)
        for release in ("new",) if has_multiplier else ("old", "new"):
            if "--rope-scaling" in words:
                file = engine_formulas.convert_gguf(original.to_dict(), release)
                yield engine_formulas.rotate_gguf(file, export.arguments, sliding, release)
            if export.config:
                config = merge_config(original, export.config)
                file = engine_formulas.convert_gguf(config, release, export.tensors)
                yield engine_formulas.rotate_gguf(file, export.arguments, sliding, release)
                if "--rope-scaling" in words and "attn_factor" not in str(words):
                    yield engine_formulas.rotate_gguf(file, ["-c", words["-c"]], sliding, release)
    elif engine == "sglang" and original.model_type == "deepseek_v4":
        # Published configs are flat; those that transformers 5 saves are not, and keys are merged.
        yield engine_formulas.sglang_deepseek_v4(merge_config(original, export.config), kind)
    elif engine == "sglang":
        for merges in (False, True):
            config = override_config(original, export.config, merges)
            length, rope = int(words["--context-length"]), config.rope_parameters
            yield engine_formulas.sglang(config.to_dict(), rope, length, sliding)
    else:
        config = override_config(original, export.config)
        if config.model_type == "deepseek_v4":
            length = int(words["--max-model-len"])
            yield engine_formulas.vllm_deepseek_v4(config.to_dict(), kind, length)
            return
        rope = config.rope_parameters if kind is None else config.rope_parameters[kind]
        # DeepSeek's YaRN has a class of its own, which took the two multipliers before 0.30, too.
        for release in ("new",) if "qk_rope_head_dim" in config.to_dict() else ("old", "new"):
            yield engine_formulas.vllm(
                config.to_dict(), rope, int(words["--max-model-len"]), release
            )


def read_by_transformers(fields, kind):
    """Yield the rotation of transformers' rotary module for a config.json."""
    fields.pop("transformers_version", None)
    config = AutoConfig.for_model(**fields)
    (rotary,) = find_rotaries(empty_model(config))
    frequencies = transformers_frequencies(rotary, config)[kind]
    yield frequencies.inv_freq.numpy(), frequencies.attention_factor
