"""The benchmark measures what it says; how long anything takes is no matter of tests."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.commands import typed
from helpers.tiny_models import TRAINED, make_model, tokens
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app
from rope_patch.evaluation.measures import speed, timed_method
from rope_patch.extension import Extension

TINY = Path(__file__).parents[2] / "assets" / "tiny-llama"  # trained on 256 tokens
SETTING = {"model": str(TINY), "decode": 4, "repeats": 2}


def numbers(data):
    """All numbers in nested data."""
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list):
        return [number for part in data for number in numbers(part)]
    return [data] if isinstance(data, int | float) else []


def contender(method="dynamic-yarn", **options):
    """One method on a tiny random model that says it was trained on 64 tokens."""
    model = make_model()
    handle = rope_patch.patch(model, method, **options) if method != "none" else None
    return timed_method.TimedMethod(name=method, model=model, handle=handle)


@pytest.fixture(scope="module")
def results():
    methods = ("yarn", "dynamic-yarn", "none")
    return speed.bench(speed.SpeedRequest(**SETTING, methods=methods, compiled=True))


@pytest.fixture(scope="module")
def rows(results):
    return {row["method"]: row for row in results["methods"]}


def test_every_method_has_times_and_ratios_to_the_first(results, rows):
    assert list(rows) == ["yarn", "dynamic-yarn", "none"]
    assert all(math.isfinite(number) for number in numbers(results))
    for row in rows.values():
        for times in (row["prompt"], row["token"]):
            assert min(numbers(times)) > 0
            assert times["min"] <= times["ratio"] <= times["max"]
    for times in (rows["yarn"]["prompt"], rows["yarn"]["token"]):
        assert times["ratio"] == times["min"] == times["max"] == 1


def test_decoding_starts_where_cached_keys_turn(results, rows):
    assert results["prompt"] == results["decode_from"] == 4 * 256
    assert rows["yarn"]["growth"] is rows["none"]["growth"] is None
    assert rows["dynamic-yarn"]["growth"]["tokens"] == int(1024 * 2**0.25) - 1024


def test_a_record_is_where_tokens_stand_and_little_else(rows):
    cache = 1024 * 2 * 2 * 2 * 32 * 4  # tokens, keys and values, layers, heads, dimensions, float32
    memory = {name: row["memory"] for name, row in rows.items()}
    assert {m["cache"] for m in memory.values()} == {cache}
    assert memory["yarn"]["record"] == memory["none"]["record"] == {}
    positions = 1024 * 8
    assert positions <= sum(memory["dynamic-yarn"]["record"].values()) < positions + 1000


def test_the_peak_is_of_the_cache_and_one_step(rows):
    for row in rows.values():
        one_layer = row["memory"]["cache"] // 2
        assert (
            row["memory"]["cache"] < row["memory"]["peak"] < row["memory"]["cache"] + 4 * one_layer
        )
    assert rows["dynamic-yarn"]["memory"]["peak"] >= rows["yarn"]["memory"]["peak"]


def test_compiling_breaks_no_graph_and_traces_no_more_often(rows):
    counts = [row["compile"] for row in rows.values()]
    assert counts[0]["graph_breaks"] == 0
    assert all(count == counts[0] for count in counts)


@pytest.mark.slow
@torch.no_grad()
def test_graph_breaks_and_recompilations_are_counted(rows):
    """Of a model that breaks its graph, and changes with every step in more than the length."""
    made, ids = contender("none"), tokens(43)
    made.cache = made.read(ids[:, :40])
    steps = []
    made.model.register_forward_pre_hook(lambda *_: steps.append(0))
    made.model.model.norm.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    made.model.model.norm.register_forward_hook(lambda _, __, out: out * (1 + len(steps)))
    counted, usual = timed_method.count_recompilations(made, ids), rows["none"]["compile"]
    assert counted["graph_breaks"] > usual["graph_breaks"]
    assert counted["recompilations"] > usual["recompilations"]


@pytest.mark.parametrize(
    ("prompt", "start"), [(50, 50), (64, 64), (70, 64), (255, 215), (256, 256), (300, 256)]
)
def test_keys_turn_once_and_at_once(prompt, start):
    made, decode = contender(), 7
    assert timed_method.decode_start_length([made, contender("none")], prompt, decode) == start
    at = made.handle.frequencies_at
    after = at(start + 1)[None].inv_freq
    assert torch.equal(after, at(start + 1 + decode)[None].inv_freq)
    assert torch.equal(after, at(start)[None].inv_freq) == (prompt < TRAINED)


def test_where_nothing_turns_decoding_starts_at_the_prompt():
    assert (
        timed_method.decode_start_length([contender("none"), contender("yarn", factor=4)], 77, 500)
        == 77
    )


def test_methods_share_weights_and_nothing_else():
    model = make_model()
    yarn = Extension("yarn", factor=4, trained_length=64)
    plain, patched = (timed_method.make_timed_method("", model, asked) for asked in (None, yarn))
    ids = tokens(100)
    with torch.no_grad():
        before = model(ids).logits
        assert torch.equal(plain.model(ids).logits, before)
        assert not torch.equal(patched.model(ids).logits, before)
    for parameter, own in zip(model.parameters(), patched.model.parameters(), strict=True):
        assert own is parameter


def test_ratios_are_of_what_took_turns():
    """A machine that is ten times slower for a while is so for both."""
    slow = [1.0, 1.0, 10.0, 10.0, 10.0]
    taken, baseline = [[1.1 * s for s in slow], [2.2, 2.2]], [slow, [1.0, 2.0]]
    got = timed_method.compare_times(taken, baseline)
    assert got == pytest.approx({"ms": 2200, "ratio": 1.375, "min": 1.1, "max": 1.65})


def test_growth_is_a_share_of_the_tokens_until_the_next(monkeypatch):
    made = contender()
    made.prompt_times, made.token_times, made.growth_times = [[1.0]], [[0.002, 0.002]], [[0.03]]
    growth = timed_method.timing_row(made, made, 256)["growth"]
    assert growth == pytest.approx({"ms": 30, "tokens": 48, "share": 0.03 / (48 * 0.002)})


def test_the_command_prints_a_table_and_writes_what_it_is_asked_to(tmp_path):
    done = typed(
        "bench",
        *(
            str(TINY),
            "--method",
            "yarn,dynamic-yarn",
            "--prompt",
            "300",
            "--out",
            "deep/speed.json",
        ),
        *("--decode", "2", "--repeats", "1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    first, names, *lines = done.stdout.splitlines()
    assert "trained on 256 tokens" in first
    assert names.split() == ["yarn", "dynamic-yarn"]
    assert lines[0].startswith("prompt of 300 ")
    assert lines[1].startswith("token after 256 ")
    assert "\r" not in done.stderr  # no progress bars in a log
    written = json.loads((tmp_path / "deep" / "speed.json").read_text())
    assert [row["method"] for row in written["methods"]] == ["yarn", "dynamic-yarn"]


def test_a_config_is_enough_for_random_weights(tmp_path):
    """And without --out nothing is written."""
    shutil.copy(TINY / "config.json", tmp_path)
    done = typed(
        "bench",
        *(str(tmp_path), "--method", "none", "--random-weights", "--dtype", "bfloat16", "--json"),
        *("--prompt", "64", "--decode", "2", "--repeats", "1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_help_teaches():
    assert "Examples:" in CliRunner().invoke(app, ["bench", "--help"]).stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ()}, "at least one method, and each named once, got none"),
        ({"methods": ("yarn", "yarn")}, "each named once, got yarn, yarn"),
        ({"methods": ("yran",)}, "did you mean 'yarn'"),
        ({"methods": ("longrope",)}, "needs the option 'long_factor'"),
        ({"model": "/no/such"}, "no such folder: /no/such"),
        ({"factor": 1.0}, "factor must be above 1"),
        ({"factor": float("nan")}, "factor must be above 1"),
        ({"decode": 0}, "decode must be a whole number of at least 1, got 0"),
        ({"repeats": 0}, "repeats must be a whole number of at least 1, got 0"),
        ({"prompt": 0}, "prompt must be a whole number of at least 1, got 0"),
        ({"prompt": 4}, "prompt must be longer than 4 tokens, got 4"),
        ({"decode": 193}, "decode must be at most 192 tokens, because after 1,217"),
        ({"dtype": "float8"}, "dtype must be one of auto, float32"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, message):
    request = {"methods": ("dynamic-yarn",), **SETTING, **changes}
    with pytest.raises(ValueError, match=message):
        speed.bench(speed.SpeedRequest(**request))
