"""Test reading stretches as arguments of `patch`: Microsoft's published files and configs."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import make_config
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

import rope_patch
from rope_patch.searching import read_factors

PUBLISHED = Path(__file__).parents[2] / "assets" / "longrope_published"
FILES = sorted(path.stem for path in PUBLISHED.glob("*.csv"))
THETA, HEAD, TRAINED = 10_000, 128, 4_096


def make_llama(**changes):
    """Return a model of one layer with the heads of Llama-2 7B and Mistral 7B 0.1."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "max_position_embeddings": TRAINED,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        **changes,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**values)).eval()


def target_length(name):
    """Return the target length of a published file, such as ft_la2_128k or 512k_la2_128k."""
    first, _, last = name.split("_")
    return 1024 * int((last if first == "ft" else first).removesuffix("k"))


def published_stretches(name):
    return [float(word) for word in (PUBLISHED / f"{name}.csv").read_text().split(",")]


def test_published_files_cover_both_models_and_all_lengths():
    assert {name.split("_")[1] for name in FILES} == {"la2", "mis"}
    assert {target_length(name) // 1024 for name in FILES} == {4, 128, 256, 512, 2048}
    assert len(FILES) >= 12


@pytest.mark.parametrize("name", [name for name in FILES if target_length(name) > TRAINED])
def test_published_stretches_give_exact_frequencies(name):
    """1 / (lambda * theta^(2i / d)), and sqrt(1 + ln(s) / ln(L)) on cos and sin."""
    model = make_llama()
    length = target_length(name)
    handle = rope_patch.patch(
        model, "longrope", length=length, anyway=True, **read_factors(PUBLISHED / f"{name}.csv")
    )
    frequencies = handle.frequencies[None]
    stretch = published_stretches(name)
    expected = [1 / (stretch[i] * THETA ** (2 * i / HEAD)) for i in range(HEAD // 2)]
    assert frequencies.inv_freq.dtype == torch.float64
    torch.testing.assert_close(
        frequencies.inv_freq, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )
    expected_factor = math.sqrt(1 + math.log(length / TRAINED) / math.log(TRAINED))
    assert frequencies.attention_factor == pytest.approx(expected_factor, rel=1e-14)


def test_the_attention_factor_has_the_published_value():
    """128k from 4k: 1.1902, where YaRN has 0.1 ln 32 + 1 = 1.3466; what Phi-3-mini-128k ships."""
    factors = read_factors(PUBLISHED / "ft_la2_128k.csv")
    handle = rope_patch.patch(make_llama(), "longrope", length=131_072, **factors)
    assert handle.frequencies[None].attention_factor == pytest.approx(1.1902380714, abs=1e-10)


@pytest.mark.parametrize("name", ["ft_la2_128k", "2048k_mis_256k"])
def test_transformers_gives_the_same_logits(name):
    """Plain transformers reads the same stretches from a config and computes in float32."""
    factors = read_factors(PUBLISHED / f"{name}.csv")
    length = target_length(name)
    model = make_llama()
    rope_patch.patch(model, "longrope", length=length, anyway=True, **factors)
    native = make_llama(
        max_position_embeddings=length,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": THETA,
            "factor": length / TRAINED,
            "original_max_position_embeddings": TRAINED,
            "short_factor": [1.0] * 64,
            **factors,
        },
    )
    ids = torch.randint(64, (1, TRAINED + 2), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = (m(ids, logits_to_keep=8).logits for m in (model, native))
        rope_patch.unpatch(model)
        plain = model(ids, logits_to_keep=8).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert (ours - plain).abs().max() > 1e-3


def test_short_sequences_use_a_separate_file():
    factors = read_factors(PUBLISHED / "ft_la2_128k.csv", short=PUBLISHED / "4k_la2_128k.csv")
    model = make_llama()
    handle = rope_patch.patch(model, "longrope", length=131_072, **factors)
    short = handle.method.frequencies(handle.geometries[None], TRAINED).inv_freq
    expected = [
        1 / (stretch * THETA ** (2 * i / HEAD))
        for i, stretch in enumerate(published_stretches("4k_la2_128k"))
    ]
    torch.testing.assert_close(
        short, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize(
    ("between", "layers", "ending"),
    [(",", 1, "\n"), (", ", 32, "\n"), (" ", 32, "\n"), ("\n", 1, "\n"), ("\t", 2, "\r\n")],
    ids=["row", "layers", "spaces", "column", "tabs"],
)
def test_numbers_are_read_in_every_layout(tmp_path, between, layers, ending):
    """Layouts are a row, the same row for every layer, spaces, tabs and a column."""
    numbers = published_stretches("ft_mis_256k")
    row = between.join(f"{number:.18e}" for number in numbers)
    file = tmp_path / "found.csv"
    file.write_bytes((ending.join([row] * layers) + ending).encode())
    assert read_factors(file) == {"long_factor": numbers}


LONG, SHORT = [1.5] * 3 + [9.0], [1.0] * 4
STRETCHES = {"long_factor": LONG, "short_factor": SHORT}
OUTER = {"original_max_position_embeddings": 2048, "max_position_embeddings": 8192}
INNER = {"original_max_position_embeddings": 2048, "factor": 4.0, "attention_factor": 1.25}
SIZES = {"factor": 4.0, "trained_length": 2048}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({"rope_scaling": {"type": "su", **STRETCHES}, **OUTER}, SIZES),
        ({"rope_scaling": {"type": "longrope", **STRETCHES}, **OUTER}, SIZES),
        (
            {"rope_parameters": {"rope_type": "longrope", **STRETCHES, **INNER}},
            {**SIZES, "attention_factor": 1.25},
        ),
        (
            {
                "rope_scaling": {
                    "type": "longrope", **STRETCHES, "short_mscale": 1.3, "long_mscale": 1.3
                },
                **OUTER,
            },
            {**SIZES, "attention_factor": 1.3},
        ),
        ({"rope_scaling": {"type": "longrope", **STRETCHES}}, {}),
        (
            {
                "text_config": {
                    "rope_parameters": {
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                        "full_attention": {"rope_type": "longrope", **STRETCHES, **INNER},
                    }
                }
            },
            {**SIZES, "attention_factor": 1.25, "layer_types": ["full_attention"]},
        ),
    ],
)  # fmt: skip
def test_configs_with_longrope_are_read(tmp_path, config, more):
    """The configs are Phi-3's by its authors and by transformers 4 and 5."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for place in (tmp_path, tmp_path / "config.json"):
        assert read_factors(place) == {**STRETCHES, **more}


def test_a_saved_phi3_config_patches_a_llama(tmp_path):
    """The config that transformers writes for Phi-3 patches a Llama with the same heads."""
    long, short = [1 + i / 8 for i in range(64)], [1.0] * 63 + [1.5]
    config = Phi3Config(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=16_384,
        original_max_position_embeddings=TRAINED,
        rope_scaling={"type": "longrope", "long_factor": long, "short_factor": short},
    )
    config.save_pretrained(tmp_path)
    factors = read_factors(tmp_path)
    model = make_llama()
    handle = rope_patch.patch(model, "longrope", **factors)
    assert handle.length == 16_384
    expected_factor = math.sqrt(1 + math.log(4) / math.log(TRAINED))
    assert handle.frequencies[None].attention_factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("a.csv", "", "empty"),
        ("a.csv", "pair,factor\n0,1.0\n", "no file of numbers"),
        ("a.csv", "1,2,3\n1,2,4\n", "layer 1"),
        ("a.csv", "1,2,3\n1,2\n", "3 and 2|2 and 3"),
        ("a.csv", "1,0,3\n", "0 for pair 1"),
        ("a.csv", "1,nan,3\n", "nan for pair 1"),
        ("a.csv", "1,-2,3\n", "-2 for pair 1"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[1, 2]", "no object"),
        ("a.json", "{}", "rope_scaling"),
        ("a.json", '{"rope_scaling": {"type": "yarn", "factor": 4}}', "yarn"),
        ("a.json", '{"rope_scaling": {"type": "longrope", "long_factor": [1]}}', "short_factor"),
        (
            "a.json",
            '{"rope_scaling": {"type": "longrope", "long_factor": [1], "short_factor": [1], '
            '"short_mscale": 1.1, "long_mscale": 1.3}}',
            "1.1 and 1.3",
        ),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path, name, content, fact):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=fact):
        read_factors(tmp_path / name)


def test_missing_and_mismatched_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no "):
        read_factors(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"neither found\.json nor config\.json"):
        read_factors(tmp_path)
    (tmp_path / "short.csv").write_text("1,2,3\n")
    with pytest.raises(ValueError, match="got 3 and 64"):
        read_factors(PUBLISHED / "ft_la2_128k.csv", short=tmp_path / "short.csv")
    make_config("llama").save_pretrained(tmp_path)
    shutil.copy(tmp_path / "config.json", tmp_path / "other.json")
    with pytest.raises(ValueError, match="leave short out"):
        read_factors(tmp_path / "other.json", short=tmp_path / "short.csv")
    tiny = AutoModelForCausalLM.from_config(make_config("llama"))
    with pytest.raises(ValueError, match="one number for each of the"):
        rope_patch.patch(tiny, "longrope", factor=4, **read_factors(PUBLISHED / "ft_la2_128k.csv"))
