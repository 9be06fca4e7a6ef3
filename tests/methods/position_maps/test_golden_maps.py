"""Compare the relative positions of all maps with vectors computed by brute force.

`golden.json` holds matrices of small texts. They were computed in float64 by loops over queries
and keys, which were cross-checked against the outputs of the authors' released code (Self-Extend,
ReRoPE, Leaky ReRoPE, DCA, STRING, LM-Infinite, StreamingLLM, LaMPE and DPE without its choice of
pairs). Jet-Long is by its paper and the code that its authors published. Row i has keys 0 to i.
"""

import json
from pathlib import Path

import pytest
import torch
from relative_positions import relative_positions

from rope_patch.methods import PositionMap, build, registered_methods

CASES = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['method']}-{c['tokens']}")
def test_relative_positions_match(case):
    tokens = case["tokens"]
    positions = torch.arange(tokens)
    method = build(case["method"], **case["options"])
    regions = method.map_regions(positions, positions, tokens, tokens - 1)
    matrix, counts = relative_positions(regions, positions, positions)
    # DPE has one matrix for each pair.
    expected = case["relative"] if isinstance(case["relative"][0][0], list) else [case["relative"]]
    matrices = matrix.movedim(-1, 0) if matrix.ndim == 3 else matrix[None]
    seen = case.get("seen") or [[1] * (i + 1) for i in range(tokens)]
    assert len(matrices) == len(expected)
    for i in range(tokens):
        assert counts[i].tolist() == seen[i] + [0] * (tokens - i - 1)
        for ours, theirs in zip(matrices, expected, strict=True):
            for j in range(i + 1):
                assert not seen[i][j] or ours[i, j].item() == pytest.approx(theirs[i][j], abs=1e-9)


def test_every_map_has_vectors():
    maps = {name for name, cls in registered_methods().items() if issubclass(cls, PositionMap)}
    assert {case["method"] for case in CASES} == maps
