"""Test the formulas and restatements that serve as references."""

import json
from pathlib import Path
from types import SimpleNamespace

import formulas
import pytest
from agreements import AGREEMENTS
from comparison import difference

ROWS = json.loads((Path(__file__).parents[1] / "assets" / "golden.json").read_text())


def compute_by_formula(row, at):
    """Compute a row of golden.json by the formulas."""
    method, options = row["method"].split(" (")[0], dict(row["params"])
    ratio = options.pop("seq_len", 0) / row["original_length"]
    factor = options.pop("factor", None)
    if method == "linear":
        return formulas.linear(at, factor)
    if method == "ntk":
        return formulas.ntk(at, factor)
    if method == "ntk-by-parts-2023-06":
        return formulas.by_parts_2023_06(at, factor)
    if method == "llama3":
        return formulas.llama3(at, factor, options["low_freq_factor"], options["high_freq_factor"])
    if method == "yarn":
        fast, slow = options.get("beta_fast", 32), options.get("beta_slow", 1)
        computed = formulas.yarn(at, factor, fast, slow, options.get("truncate", True))
        if "mscale" not in options:
            return computed
        of_all = formulas.yarn_attention_factor(factor, options["mscale_all_dim"])
        return computed[0], formulas.yarn_attention_factor(factor, options["mscale"]) / of_all
    if method == "longrope":
        stretch = options["long_factor" if ratio > 1 else "short_factor"]
        return formulas.longrope(at, factor, stretch)
    if method == "dynamic-ntk-by-parts-2023-06":
        return formulas.by_parts_2023_06(at, ratio) if ratio > 1 else formulas.default(at)
    if method == "dynamic-yarn":
        return formulas.yarn(at, ratio) if ratio > 1 else formulas.default(at)
    if method == "dynamic-ntk":
        grown = factor * ratio - (factor - 1)
        return formulas.ntk(at, grown) if ratio > 1 else formulas.default(at)
    assert method == "proportional"
    return formulas.proportional(at, options["partial_rotary_factor"])


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_formulas_match_the_golden_vectors(number):
    row = ROWS[number]
    at = SimpleNamespace(
        rotary_dim=row["head_dim"],
        theta=row["rope_theta"],
        trained_length=row["original_length"],
    )
    computed = compute_by_formula(row, at)
    assert difference(row["inv_freq"], computed[0]) < 2e-6
    assert computed[1] == pytest.approx(row["attention_factor"], rel=0, abs=1e-6)


@pytest.mark.parametrize("agreement", AGREEMENTS, ids=str)
def test_restated_engines_match_our_methods(agreement):
    assert agreement.number() < 1e-12
