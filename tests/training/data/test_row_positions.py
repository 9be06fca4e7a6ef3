"""Test rows whose positions reach further than their tokens."""

from random import Random

import pytest
import torch
from helpers.written_out_maps import leaky_rerope
from packed_rows import LENGTH, make_rows, packed, require_equal_rows, resumed_rows
from training_runs import TINY, run, settings_of
from transformers import AutoModelForCausalLM

from rope_patch.training import RowShare, collate, prepare_model, read_log, skipped_positions

TARGET = 200
SKIPPING = {"row_length": LENGTH, "trained_length": LENGTH, "target_length": TARGET, "seed": 0}


def test_positions_skip_once_and_stay_below_the_target():
    firsts, jumps = set(), set()
    for seed in range(4000):
        positions = skipped_positions(8, 20, Random(seed))
        steps = positions.diff()
        assert positions[0] == 0
        assert positions[-1] < 20
        assert (steps >= 1).all()
        assert (steps > 1).sum() <= 1
        jump = int(positions[-1]) - 7
        jumps.add(jump)
        if jump:
            firsts.add(int(steps.argmax()) + 1)
    assert jumps == set(range(13))
    assert firsts == {1, 2, 3, 4}


def test_every_distance_below_the_target_occurs():
    distances = set()
    for seed in range(300):
        positions = skipped_positions(16, 64, Random(seed))
        distances |= set((positions[:, None] - positions).flatten().tolist())
    assert set(range(64)) <= distances


def test_rows_that_cannot_skip_further_are_consecutive():
    assert torch.equal(skipped_positions(8, 8, Random(0)), torch.arange(8))


def test_skipping_changes_positions_alone_and_resumes_exactly(tokenizer, source):
    path, _ = source("a.jsonl", [200, 300, 400])
    plain = make_rows(tokenizer, 12, [path])
    rows = make_rows(tokenizer, 12, [path], SKIPPING, positions="skip")
    for row, other in zip(rows, plain, strict=True):
        for key in ("input_ids", "labels"):
            assert torch.equal(row[key], other[key])
    assert len({tuple(row["position_ids"].tolist()) for row in rows}) == 12
    resumed = resumed_rows(
        tokenizer, rows[4]["row"]["state"], 5, 7, [path], SKIPPING, positions="skip"
    )
    require_equal_rows(resumed, rows[5:])
    workers = [
        make_rows(
            tokenizer, 6, [path], SKIPPING | {"share": RowShare(rank=n, world=2)}, positions="skip"
        )
        for n in range(2)
    ]
    require_equal_rows([row for pair in zip(*workers, strict=True) for row in pair], rows)


def test_rows_of_another_target_do_not_resume(tokenizer, source):
    path, _ = source("a.jsonl", [200, 300])
    state = make_rows(tokenizer, 1, [path], SKIPPING, positions="skip")[0]["row"]["state"]
    other = packed(tokenizer, [path], SKIPPING | {"target_length": 300}, positions="skip")
    with pytest.raises(ValueError, match="target_length was 200, got 300"):
        other.resume(state, 1)
    with pytest.raises(ValueError, match="positions was skip, got None"):
        packed(tokenizer, [path], SKIPPING).resume(state, 1)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_tokens_see_all_before_them_over_the_gap(tokenizer, source, implementation):
    path, _ = source("a.jsonl", [200, 300])
    rows = make_rows(tokenizer, 2, [path], SKIPPING, positions="skip")
    model = AutoModelForCausalLM.from_pretrained(
        TINY["model"], attn_implementation=implementation
    ).eval()
    batch = {key: value for key, value in collate(rows, has_gaps=True).items() if key != "rows"}
    got = model(**batch, use_cache=False).logits
    lowest = torch.finfo(torch.float32).min
    causal = torch.full((LENGTH, LENGTH), lowest).triu(1).expand(2, 1, -1, -1)
    expected = model(**(batch | {"attention_mask": causal}), use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert max(row["position_ids"][-1] for row in rows) > LENGTH
    # The reason for the mask: without it transformers takes the gap for a border.
    del batch["attention_mask"]
    assert (model(**batch, use_cache=False).logits - expected).abs().max() > 1e-3


QUICK = {"max_steps": 1, "save_strategy": "no"}
LEAKY = {"positions": "leaky", "method": "none", "train_length": 256}


def test_leaky_training_compares_at_growing_distances(tmp_path):
    """Equal to attention that is written out: distances grow 2 x factor times as fast."""
    keys = {"method": "none", "factor": 4, "positions": "leaky", "train_length": 256}
    prepared = prepare_model(settings_of(tmp_path / "out", **keys))
    assert (prepared.target_length, prepared.trained_length) == (1024, 256)
    model = prepared.model.eval()
    ids = torch.randint(5, 500, (1, 256), generator=torch.Generator().manual_seed(0))
    attention = model.model.layers[0].self_attn
    inputs = {}
    handle = attention.register_forward_hook(
        lambda module, args, kwargs, output: inputs.update(
            hidden=kwargs["hidden_states"], output=output[0]
        ),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    got, hidden = inputs["output"].double(), inputs["hidden"].double()
    attention.double()
    config = model.config
    size = attention.head_dim
    query, key, value = (
        projection(hidden).view(256, -1, size).transpose(0, 1)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    repeats = config.num_attention_heads // config.num_key_value_heads
    key, value = (each.repeat_interleave(repeats, 0) for each in (key, value))
    inv_freq = 1e4 ** -(torch.arange(0, size, 2).double() / size)
    distance = torch.zeros(256, 256, dtype=torch.float64)
    for i in range(256):
        for j in range(i + 1):
            distance[i, j] = leaky_rerope(i, j, 64, 1 / 8)
    assert distance.max() == 64 + (255 - 64) * 8
    angle = distance[..., None] * inv_freq
    half = size // 2
    pairs = torch.complex(query[..., :half], query[..., half:])
    others = torch.complex(key[..., :half], key[..., half:])
    rotated = torch.polar(torch.ones_like(angle), angle)
    scores = torch.einsum("hqd,hkd,qkd->hqk", pairs, others.conj(), rotated).real * size**-0.5
    scores = scores.masked_fill(torch.ones(256, 256).triu(1).bool(), -torch.inf)
    output = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), value).flatten(1)
    with torch.no_grad():
        expected = attention.o_proj(output)[None]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_the_model_of_leaky_training_is_plain_and_states_its_length(tmp_path):
    folder = tmp_path / "out"
    keys = {"method": "none", "length": 1024, "factor": None, "positions": "leaky"}
    run("loop", folder, **QUICK, **keys)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    before = AutoModelForCausalLM.from_pretrained(TINY["model"])
    assert model.config.max_position_embeddings == 1024
    assert model.config.rope_parameters == before.config.rope_parameters
    assert not (folder / "model" / "rope_patch.json").exists()
    before.load_state_dict(model.state_dict())
    ids = torch.arange(5, 305)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before(ids).logits)
    card = (folder / "model" / "README.md").read_text()
    assert "256 → 1,024 tokens" in card
    assert "positions leaky" in card


def test_each_kind_of_positions_has_losses_of_its_own(tmp_path):
    keys = {"method": "none", "factor": 2, "train_length": 128}
    for positions in ("consecutive", "leaky"):
        run("loop", tmp_path / positions, positions=positions, **QUICK, **keys)
    for positions in ("consecutive", "skip"):
        run("loop", tmp_path / f"yarn-{positions}", positions=positions, **QUICK)
    first = [read_log(folder)[0]["loss"] for folder in sorted(tmp_path.glob("*/"))]
    assert len(first) == len(set(first)) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "skipp"}, "positions .* 'skipp'"),
        ({"positions": "skip", "packing": "masked"}, "positions: skip .*masked"),
        ({"positions": "skip", "short_share": 0.5}, "short_share .* 0.5"),
        ({"positions": "skip", "train_length": 512}, "train_length below"),
        ({"positions": "leaky"}, "method: none .* yarn"),
        (LEAKY | {"factor": None}, "exactly one of .* neither"),
        (LEAKY | {"length": 999}, "exactly one of .* both"),
        (LEAKY | {"retrieval_steps": 2}, "leave retrieval_steps out"),
        (LEAKY | {"train_length": 400}, "train_length of at most 256"),
        (LEAKY | {"factor": 1, "train_length": 128}, "128 and a target of 256"),
    ],
)
def test_positions_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run("loop", tmp_path / "out", **changes)
    assert not (tmp_path / "out" / "model").exists()
