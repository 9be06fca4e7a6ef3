"""Test frequencies against vectors of other implementations (assets/golden.md) and transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch

ROWS = json.loads((Path(__file__).parents[1] / "assets" / "golden.json").read_text())
NAMES = {"dynamic-ntk": "dynamic"}  # their names and ours
for _row in ROWS:
    _name = _row["method"].split(" (")[0]  # some have a source in brackets
    _row["method"] = NAMES.get(_name, _name)
DYNAMIC = ("dynamic", "dynamic-yarn", "dynamic-ntk-by-parts-2023-06")
STATIC = ("linear", "ntk", "ntk-by-parts-2023-06", "yarn", "llama3", "longrope", "proportional")
METHODS = STATIC + DYNAMIC


def rows(*methods):
    return [row for row in ROWS if row["method"] in methods]


def row_id(row):
    options = (f"{k}={v}" for k, v in row["params"].items() if not isinstance(v, list))
    by = row["source"].split()[0]
    return "-".join([row["method"], by, f"{row['head_dim']}x{row['rope_theta']}", *options])


def compute_frequencies(row, method=None, **options):
    return rope_patch.frequencies(
        method or row["method"],
        head_dim=row["head_dim"],
        theta=row["rope_theta"],
        trained_length=row["original_length"],
        **options,
    )


def assert_inv_freq(got, row):
    expected = torch.tensor(row["inv_freq"], dtype=torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)  # so zeros are exactly zero


@pytest.mark.parametrize("row", rows(*METHODS), ids=row_id)
def test_frequencies_match_the_reference(row):
    got = compute_frequencies(row, **row["params"])
    assert_inv_freq(got.inv_freq, row)
    assert got.attention_factor == pytest.approx(row["attention_factor"], rel=0, abs=1e-7)


def test_every_row_is_checked():
    assert len(rows(*METHODS)) == len(ROWS) == 102
    assert {row["method"] for row in ROWS} == set(METHODS)
    assert all("seq_len" in row["params"] for row in rows(*DYNAMIC))


@pytest.mark.parametrize(
    "row", [r for r in rows("yarn") if "mscale" not in r["params"]], ids=row_id
)
def test_ntk_by_parts_is_yarn_without_its_attention_factor(row):
    got = compute_frequencies(row, "ntk-by-parts", **row["params"])
    assert_inv_freq(got.inv_freq, row)
    assert got.attention_factor == 1


# head_dim, theta, trained_length: a ramp that begins before the first pair or ends after the last,
# a ramp of a single step, and a trained length of less than one rotation.
UNUSUAL = [(16, 1e4, 2**20), (64, 100, 4096), (64, 1e6, 300), (2, 1e4, 4096), (64, 1e4, 6)]


@pytest.mark.parametrize("options", [{}, {"truncate": False}, {"beta_fast": 2.0, "beta_slow": 1.9}])
@pytest.mark.parametrize(("head_dim", "theta", "trained_length"), UNUSUAL)
@pytest.mark.parametrize("method", ["yarn", "llama3"])
def test_unusual_geometries_match_transformers(method, head_dim, theta, trained_length, options):
    if method == "llama3":
        fast, slow = options.get("beta_fast", 4.0), options.get("beta_slow", 1.0)
        options = {"high_freq_factor": fast, "low_freq_factor": slow}
    config = transformers.LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=8 * trained_length,
        rope_parameters={
            "rope_type": method,
            "rope_theta": theta,
            "factor": 8.0,
            "original_max_position_embeddings": trained_length,
            **options,
        },
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[method](config, "cpu")
    got = rope_patch.frequencies(
        method, head_dim=head_dim, theta=theta, trained_length=trained_length, factor=8, **options
    )
    torch.testing.assert_close(got.inv_freq, inv_freq.double(), rtol=2e-6, atol=0)
    assert got.attention_factor == pytest.approx(attention_factor, rel=0, abs=1e-7)
