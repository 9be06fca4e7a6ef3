"""Test launches by a table of measured choices: any choice computes the same."""

import json

import pytest
import torch

pytest.importorskip("triton")

from mock_kernel import mock_launcher

from rope_patch import ops
from rope_patch.benchmarks.kernels import tile_search
from rope_patch.ops import reference
from rope_patch.ops.kernels import launch_choices, rope
from rope_patch.ops.kernels.launch_choices import LaunchChoice, force_choice

HEADS, KEY_HEADS, DIM, TOKENS = 5, 2, 32, 3
ROW = {
    "kernel": "rope",
    "heads": [HEADS, KEY_HEADS],
    "head_dim": DIM,
    "dtype": "bfloat16",
    "above": 2,
    "up_to": 64,
    "choice": {"tile": 2, "splits": True, "warps": 4, "stages": 3},
    "microseconds": 1.5,
}


def inputs(**how):
    q, k = (torch.randn(1, TOKENS, n, DIM, **how) for n in (HEADS, KEY_HEADS))
    packed = ops.pack_frequencies(1e4 ** -(torch.arange(DIM // 2) / (DIM // 2)))
    return q, k, torch.arange(4, 4 + TOKENS), packed


@pytest.mark.parametrize(
    "choice",
    [
        LaunchChoice(1, True, 1),
        LaunchChoice(4, True, 2),
        LaunchChoice(2, False, 1, 2),
        LaunchChoice(16, False, 4),
    ],
    ids=str,
)
def test_any_choice_computes_the_same(choice):
    torch.manual_seed(0)
    q, k, *where = inputs()
    weights = [torch.rand(DIM) + 0.5 for _ in range(2)]
    with force_choice(choice, tile_search._launchers()):
        rotated = ops.rope(q, k, *where, kernels="triton")
        normed = ops.qk_norm_rope(q, k, *weights, *where, eps=1e-6, kernels="triton")
    wanted = reference.rope(q, k, *where)
    wanted += reference.qk_norm_rope(q, k, *weights, *where, eps=1e-6)
    for got, exact in zip((*rotated, *normed), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """Return a function that launches so many tokens by a table with one row."""
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"meta": [ROW]}))
    monkeypatch.setattr(launch_choices, "TABLE", table)
    kernel = mock_launcher(monkeypatch, rope, "_launcher")

    def run(tokens=TOKENS, heads=HEADS, dtype=torch.bfloat16):
        q, k = (torch.empty(1, tokens, n, DIM, dtype=dtype, device="meta") for n in (heads, 2))
        whole = [torch.empty(n, dtype=torch.int64, device="meta") for n in (tokens, DIM // 2 + 1)]
        rope.launch(q, k, *whole, None, False, 2, False)
        return kernel.slow[-1]

    return run


def test_a_row_holds_for_what_was_measured(launch):
    for tokens in (TOKENS, 64):
        chosen = launch(tokens)
        assert (chosen.grid, chosen.warps, chosen.stages) == ((tokens, 4, 1), 4, 3)
        assert chosen.constants["HEADS"] == 2
        assert chosen.constants["ONE_TILE"]
    for other in ({"tokens": 2}, {"tokens": 65}, {"heads": 6}, {"dtype": torch.float16}):
        assert launch(**other).stages == 1


def test_a_table_that_is_not_one_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"sm_90": [{"kernel": "rope"}]}))
    with pytest.raises(ValueError, match=r"table\.json.*Row"):
        launch_choices.read_table(path)
    launch_choices.read_table(launch_choices.TABLE)


def test_a_search_measures_each_size_once(tmp_path):
    path = tmp_path / "choices.json"
    words = {"shapes": ("llama-3-8b",), "repeats": 1, "path": path, "candidates": 1}
    results = tile_search.search_tiles(lengths=(2,), **words)
    (case,) = results["measured"]
    assert case["finalists"][0]["choice"] == {"tile": 1, "splits": True, "warps": 1, "stages": 1}
    assert not case["failed"]
    written = path.read_text()
    assert tile_search.search_tiles(lengths=(2,), **words) == json.loads(written)
    assert path.read_text() == written
