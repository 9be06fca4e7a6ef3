"""Test the speed benchmark: rows, ratios, memory and compilation, but no absolute times."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.commands import run_in_this_process
from helpers.tiny_models import TRAINED, make_model, tokens

import rope_patch
from rope_patch.evaluation import (
    SpeedRequest,
    TimedMethod,
    bench_methods,
    compare_times,
    count_recompilations,
    decode_start_length,
    make_timed_method,
    measure_memory,
    timing_row,
)

TINY = Path(__file__).parents[2] / "assets" / "tiny-llama"  # trained on 256 tokens
SETTING = {"model": str(TINY), "decode": 4, "repeats": 2}


def numbers(data):
    """Return all numbers in nested data."""
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list):
        return [number for part in data for number in numbers(part)]
    return [data] if isinstance(data, int | float) else []


def make_timed(method="dynamic-yarn", **options):
    """Return a method on a tiny random model with a trained length of 64 tokens."""
    model = make_model()
    handle = rope_patch.patch(model, method, **options) if method != "none" else None
    return TimedMethod(name=method, model=model, handle=handle)


@pytest.fixture(scope="module")
def results():
    methods = ("none", "dynamic-yarn")
    return bench_methods(SpeedRequest(**SETTING, methods=methods, compiled=True))


@pytest.fixture(scope="module")
def rows(results):
    return {row["method"]: row for row in results["methods"]}


def test_every_method_has_times_and_ratios_to_the_first(results, rows):
    assert list(rows) == ["none", "dynamic-yarn"]
    assert all(math.isfinite(number) for number in numbers(results))
    for row in rows.values():
        for times in (row["prompt"], row["token"]):
            assert min(numbers(times)) > 0
            assert times["min"] <= times["ratio"] <= times["max"]
    for times in (rows["none"]["prompt"], rows["none"]["token"]):
        assert times["ratio"] == times["min"] == times["max"] == 1


def test_decoding_starts_at_a_growth_step(results, rows):
    assert results["prompt"] == results["decode_from"] == 4 * 256
    assert rows["none"]["growth"] is None
    assert rows["dynamic-yarn"]["growth"]["tokens"] == int(1024 * 2**0.25) - 1024


def test_a_cache_record_holds_little_more_than_positions(rows):
    cache = 1024 * 2 * 2 * 2 * 32 * 4  # tokens, keys and values, layers, heads, dimensions, float32
    memory = {name: row["memory"] for name, row in rows.items()}
    assert {m["cache"] for m in memory.values()} == {cache}
    assert memory["none"]["record"] == {}
    positions = 1024 * 8
    assert positions <= sum(memory["dynamic-yarn"]["record"].values()) < positions + 1000


@torch.no_grad()
def test_the_keys_that_a_position_map_keeps_are_counted():
    ids = tokens(5 * TRAINED + 1)
    sizes = {}
    for name in ("self-extend", "string"):  # string turns queries alone
        timed = make_timed(name)
        timed.cache = timed.read(ids[:, :-1], ids.shape[1])
        memory = measure_memory(timed, ids, 5 * TRAINED)
        sizes[name] = memory["record"].get("turned keys", 0) / memory["cache"]
    assert 0.3 < sizes["self-extend"] < 0.8  # half of the cache, less near keys, and some room
    assert sizes["string"] == 0


def test_the_peak_is_that_of_the_cache_and_one_step(rows):
    for row in rows.values():
        one_layer = row["memory"]["cache"] // 2
        assert (
            row["memory"]["cache"] < row["memory"]["peak"] < row["memory"]["cache"] + 4 * one_layer
        )
    assert rows["dynamic-yarn"]["memory"]["peak"] >= rows["none"]["memory"]["peak"]


def test_compiling_breaks_no_graph_and_adds_no_traces(rows):
    counts = [row["compile"] for row in rows.values()]
    assert counts[0]["graph_breaks"] == 0
    assert all(count == counts[0] for count in counts)


@pytest.mark.slow
@torch.no_grad()
def test_graph_breaks_and_recompilations_are_counted(rows):
    """The model breaks its graph, and more than the length changes with every step."""
    timed, ids = make_timed("none"), tokens(43)
    timed.cache = timed.read(ids[:, :40], 40)
    steps = []
    timed.model.register_forward_pre_hook(lambda *_: steps.append(0))
    timed.model.model.norm.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    timed.model.model.norm.register_forward_hook(lambda _, __, out: out * (1 + len(steps)))
    counts, usual = count_recompilations(timed, ids), rows["none"]["compile"]
    assert counts["graph_breaks"] > usual["graph_breaks"]
    assert counts["recompilations"] > usual["recompilations"]


@pytest.mark.parametrize(
    ("prompt", "start"), [(50, 50), (64, 64), (70, 64), (255, 215), (256, 256), (300, 256)]
)
def test_keys_are_rerotated_once_and_in_the_first_step(prompt, start):
    timed, decode = make_timed(), 7
    assert decode_start_length([timed, make_timed("none")], prompt, decode) == start
    frequencies_at = timed.handle.frequencies_at
    after = frequencies_at(start + 1)[None].inv_freq
    assert torch.equal(after, frequencies_at(start + 1 + decode)[None].inv_freq)
    assert torch.equal(after, frequencies_at(start)[None].inv_freq) == (prompt < TRAINED)


@torch.no_grad()
def test_decoding_after_admission_rerotates_nothing():
    timed, ids = make_timed(growth="admission"), tokens(3 * TRAINED)
    assert decode_start_length([timed], 77, 500) == 77
    timed.cache = timed.read(ids[:, :60], 3 * TRAINED)
    for step in timed.decode(ids, timed.cache):
        step()
    assert timed.cache.get_seq_length() == 3 * TRAINED


def test_without_growth_decoding_starts_at_the_prompt():
    assert decode_start_length([make_timed("none"), make_timed("yarn", factor=4)], 77, 500) == 77


def test_methods_share_only_weights():
    model = make_model()
    yarn = rope_patch.Extension("yarn", factor=4, trained_length=64)
    plain, patched = (make_timed_method("", model, options) for options in (None, yarn))
    ids = tokens(100)
    with torch.no_grad():
        before = model(ids).logits
        assert torch.equal(plain.model(ids).logits, before)
        assert not torch.equal(patched.model(ids).logits, before)
    for parameter, shared in zip(model.parameters(), patched.model.parameters(), strict=True):
        assert shared is parameter


def test_ratios_are_those_of_alternating_runs():
    """A machine that is temporarily ten times slower slows both methods down."""
    slow = [1.0, 1.0, 10.0, 10.0, 10.0]
    times, baseline = [[1.1 * s for s in slow], [2.2, 2.2]], [slow, [1.0, 2.0]]
    got = compare_times(times, baseline)
    assert got == pytest.approx({"ms": 2200, "ratio": 1.375, "min": 1.1, "max": 1.65})


def test_growth_is_a_share_of_the_time_until_the_next_step(monkeypatch):
    timed = make_timed()
    timed.prompt_times, timed.token_times, timed.growth_times = [[1.0]], [[0.002, 0.002]], [[0.03]]
    growth = timing_row(timed, timed, 256)["growth"]
    assert growth == pytest.approx({"ms": 30, "tokens": 48, "share": 0.03 / (48 * 0.002)})


def test_the_command_prints_a_table_and_writes_the_file(tmp_path):
    path = tmp_path / "deep" / "speed.json"
    words = ("bench", TINY, "--method", "yarn,dynamic-yarn", "--prompt", "300", "--out", path)
    result = run_in_this_process(*words, "--decode", "2", "--repeats", "1")
    assert result.returncode == 0, result.stderr
    first, names, *lines = result.stdout.splitlines()
    assert "trained on 256 tokens" in first
    assert names.split() == ["yarn", "dynamic-yarn"]
    assert lines[0].startswith("prompt of 300 ")
    assert lines[1].startswith("token after 256 ")
    assert "\r" not in result.stderr  # no progress bars in a log
    record = json.loads(path.read_text())
    assert [row["method"] for row in record["methods"]] == ["yarn", "dynamic-yarn"]


def test_a_config_is_enough_for_random_weights(tmp_path, monkeypatch):
    """Without --out nothing is written."""
    shutil.copy(TINY / "config.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("bench", tmp_path, "--method", "none", "--random-weights", "--dtype", "bfloat16")
    words = (*words, "--json", "--prompt", "64", "--decode", "2", "--repeats", "1")
    result = run_in_this_process(*words)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"methods": ()}, "none"),
        ({"methods": ("yarn", "yarn")}, "yarn, yarn"),
        ({"methods": ("yran",)}, "'yarn'"),
        ({"methods": ("longrope",)}, "'long_factor'"),
        ({"model": "/no/such"}, "/no/such"),
        ({"factor": 1.0}, "factor must be above 1"),
        ({"factor": float("nan")}, "factor must be above 1"),
        *(({name: 0}, f"{name} must be .* 1, got 0") for name in ("decode", "repeats", "prompt")),
        ({"prompt": 4}, "prompt must be longer than 4 tokens, got 4"),
        ({"decode": 193}, "192 tokens"),
        ({"dtype": "float8"}, "dtype"),
    ],
)
def test_bad_requests_are_refused(changes, fact):
    request = {"methods": ("dynamic-yarn",), **SETTING, **changes}
    with pytest.raises(ValueError, match=fact):
        bench_methods(SpeedRequest(**request))
