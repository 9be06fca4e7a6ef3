"""Test the result of a search: patching with it, saving, loading, exporting and drawing it."""

import json
import math
import re
import struct
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from architectures.tiny_architectures import tiny_config
from helpers.commands import run_in_this_process
from helpers.tiny_models import make_config
from safetensors.torch import load_file
from search_results import TINY, entry, history, make_result, rising_stretch
from transformers import AutoConfig, AutoModelForCausalLM

import rope_patch
from rope_patch import statistics
from rope_patch.inference import Sample
from rope_patch.searching import (
    Candidate,
    Evaluation,
    SearchResult,
    compare_on_held_out,
    draw_search,
)
from rope_patch.utils import PALETTE, json_digest

START_TOKENS = Candidate(
    "mutation", "longrope", {"long_factor": rising_stretch(16), "start_tokens": 4}
)


def tiny(config=None):
    return AutoModelForCausalLM.from_pretrained(TINY, config=config, dtype=torch.float32).eval()


def logits(model, length):
    ids = torch.randint(5, 500, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a result and the folder that it was saved in."""
    result, folder = make_result(), tmp_path_factory.mktemp("result") / "new" / "folder"
    assert result.save(folder) == folder / "found.json"
    return result, folder


# -- patching --------------------------------------------------------------------------------------


def test_a_result_is_the_arguments_of_patch(model):
    result = make_result()
    assert set(result) == {"factor", "long_factor", "short_factor", "attention_factor"}
    assert len(result) == 4
    with rope_patch.patch(model, "longrope", **result) as handle:
        (geometry,) = handle.geometries.values()
    expected = [s * 10_000 ** (2 * i / 32) for i, s in enumerate(rising_stretch(16))]
    found = 1 / handle.frequencies[None].inv_freq
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert handle.frequencies[None].attention_factor == 1.25
    assert (handle.length, geometry.trained_length) == (1024, 256)
    short = handle.method.frequencies(handle.geometries[None], 256).inv_freq
    assert torch.equal(short, handle.geometries[None].inv_freq())


@pytest.mark.parametrize(
    ("method", "options"), [("yarn", {"beta_slow": 2.0}), ("abf", {"new_theta": 5e5}), ("ntk", {})]
)
def test_results_of_other_methods_patch_like_them(model, method, options):
    """Scans find YaRN with another ramp, or another base."""
    result = make_result(candidate=Candidate("scan", method, options))
    with rope_patch.patch(model, "longrope", **result):
        ours = logits(model, 400)
    with rope_patch.patch(model, method, factor=4, **options):
        torch.testing.assert_close(ours, logits(model, 400), rtol=0, atol=1e-4)


def test_search_options_that_patching_needs_are_kept(model):
    result = make_result(asked={"trained_length": 256, "start": "unscaled"})
    assert result["start"] == "unscaled"
    with rope_patch.patch(model, "longrope", **result):
        pass


def test_start_tokens_are_named_only_if_there_are_some_and_have_no_config(model, tmp_path):
    """Saving deletes the config of an earlier result, which has another rotation."""
    assert "start_tokens" not in make_result()
    result = make_result(candidate=START_TOKENS)
    assert result["start_tokens"] == 4
    with rope_patch.patch(model, "longrope", **result) as handle:
        assert handle.method.start_token_count == 4
    (tmp_path / "config.json").write_text("{}")
    result.save(tmp_path)
    assert not (tmp_path / "config.json").exists()
    exports = json.loads((tmp_path / "exports.json").read_text())
    plugin = exports.pop("vllm")
    assert plugin["needs_plugin"]
    assert plugin["config"]["rope_parameters"]["start_tokens"] == 4
    assert all("start_tokens" in each["refused"] for each in exports.values())


def test_stopped_pairs_have_stretch_1_or_an_endless_one():
    """Pairs with frequency 0 keep it; pairs that a candidate stops have an endless stretch."""
    geometry = make_result().geometry
    base = (*geometry.unscaled_inv_freq().tolist()[:8], *[0.0] * 8)
    result = make_result(geometry=replace(geometry, base=base))
    assert result.long_factor == pytest.approx([*rising_stretch(16)[:8], *[1.0] * 8])
    stopped = Candidate("fewer", "proportional", {"partial_rotary_factor": 0.5})
    assert make_result(candidate=stopped).long_factor[-1] == 1e18
    json.dumps(make_result(candidate=stopped).to_dict(), allow_nan=False)


# -- files -----------------------------------------------------------------------------------------


def test_a_saved_result_is_read_back_equal(tmp_path):
    against = {"difference": -0.1, "interval": [-math.inf, math.inf]}
    result = make_result(held_out={"found": {"nll": 0.4}, "against yarn": against}, config={})
    path = result.save(tmp_path / "one")
    names = {p.name for p in path.parent.iterdir()} - {"picture.svg"}
    assert names == {"found.json"}  # there is no config to write for anyone
    for place in (path, path.parent):
        read = SearchResult.load(place)
        assert dict(read) == dict(result)
        assert math.isinf(read.history[1]["fitness"])
        for name in ("model", "weights", "strategy", "seed", "geometry", "candidate", "command",
                     "versions", "evaluations_per_minute", "length", "trained_length",
                     "history"):  # fmt: skip
            assert getattr(read, name) == getattr(result, name)
        assert str(read) == str(result)
    json.loads(path.read_text(), parse_constant=pytest.fail)  # strict JSON
    again = SearchResult.load(path).save(tmp_path / "again")
    assert again.read_bytes() == path.read_bytes()


def test_a_failed_save_keeps_the_old_result(tmp_path, monkeypatch):
    make_result().save(tmp_path)
    before = (tmp_path / "found.json").read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        make_result(seed=1).save(tmp_path)
    assert (tmp_path / "found.json").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_plain_transformers_reads_the_saved_config(saved, model):
    result, folder = saved
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 1024
    assert config["architectures"] == ["LlamaForCausalLM"]
    native = tiny(AutoConfig.from_pretrained(folder))
    for length in (100, 256, 257, 700):
        plain = logits(model, length)
        with rope_patch.patch(model, "longrope", **result):
            ours = logits(model, length)
        theirs = logits(native, length)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
        assert (theirs - plain).abs().max() > 1


@pytest.mark.parametrize("has_vision", [True, False])
def test_only_the_searched_layer_types_of_the_decoder_are_stretched(tmp_path, has_vision):
    """Gemma 3's full-attention layers are stretched; neither its windows nor its eyes are."""
    config = tiny_config("gemma3") if has_vision else make_config("gemma3")
    geometry = rope_patch.diagnose(config).rotations["full_attention"].geometry
    candidate = Candidate(
        "curve", "longrope", {"long_factor": rising_stretch(geometry.rotary_dim // 2)}
    )
    asked = {"layer_types": ["full_attention"]}
    result = make_result(config, geometry=geometry, candidate=candidate, asked=asked)
    assert result.layer_type == "full_attention"
    result.save(tmp_path)
    written = AutoConfig.from_pretrained(tmp_path)
    assert written.model_type == config.model_type
    if has_vision:
        assert written.vision_config.to_dict() == config.vision_config.to_dict()
    rope_parameters = written.get_text_config(decoder=True).rope_parameters
    assert rope_parameters["full_attention"]["rope_type"] == "longrope"
    assert rope_parameters["full_attention"]["long_factor"] == result["long_factor"]
    assert rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_folders_that_hold_something_else_are_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "file").touch()
    for folder, fact in [(tmp_path, "holds a model"), (tmp_path / "file", "is a file")]:
        with pytest.raises(ValueError, match=fact):
            make_result().save(folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model.safetensors"]


def change_keys(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("spoil", "fact"),
    [
        (lambda p: change_keys(p, seed=7), "changed"),
        (lambda p: change_keys(p, format="rope_patch.search/0"), "read it with the version"),
        (lambda p: change_keys(p, format="rope_patch.eval/2"), "rope-patch search"),
        (lambda p: p.write_text("{}"), "rope_patch.search/1"),
        (lambda p: p.write_text("[]"), "'list'"),
        (lambda p: p.write_bytes(p.read_bytes()[:500]), "is not JSON"),
        (lambda p: p.unlink(), "there is no"),
    ],
)
def test_damaged_and_foreign_results_are_refused(saved, tmp_path, spoil, fact):
    _, folder = saved
    path = tmp_path / "found.json"
    path.write_bytes((folder / "found.json").read_bytes())
    spoil(path)
    with pytest.raises(ValueError, match=fact):
        SearchResult.load(path)


def test_stretches_that_the_candidate_does_not_give_are_refused(saved, tmp_path):
    """The file is forged with a valid digest, or another version changed a formula."""
    _, folder = saved
    record = json.loads((folder / "found.json").read_text())
    record["patch"]["long_factor"][3] *= 1.001
    del record["digest"]
    path = tmp_path / "found.json"
    path.write_text(json.dumps({**record, "digest": json_digest(record)}))
    with pytest.raises(ValueError, match="other stretches"):
        SearchResult.load(path)
    del record["geometry"]["theta"]
    path.write_text(json.dumps({**record, "digest": json_digest(record)}))
    with pytest.raises(ValueError, match="damaged"):
        SearchResult.load(path)


# -- exports ---------------------------------------------------------------------------------------


def exports_of(folder):
    return json.loads((folder / "exports.json").read_text())


def test_engines_get_the_stretches_for_all_lengths(saved):
    result, folder = saved
    exports = exports_of(folder)
    assert set(exports) == set(rope_patch.exporting.ENGINES)
    rope = exports["vllm"]["config"]["rope_parameters"]
    assert rope["long_factor"] == rope["short_factor"] == result["long_factor"]
    assert rope["long_mscale"] == result["attention_factor"]
    assert exports["vllm"]["arguments"][-2:] == ["--max-model-len", "1024"]
    assert "by the found stretches, too" in exports["vllm"]["notes"][-1]
    assert exports["llama.cpp"]["tensors"] == {
        "rope.freqs.weight": pytest.approx(result["long_factor"], rel=1e-12)
    }
    assert "llama.rope.scaling.attn_factor=float:1.25" in exports["llama.cpp"]["arguments"]
    assert exports["transformers"]["config"]["rope_parameters"]["short_factor"] == [1.0] * 16


@pytest.mark.parametrize(
    ("candidate", "flags"),
    [
        (Candidate("critical pair 5", "abf", {"new_theta": 5e5}), ["--rope-freq-base", "500000"]),
        (Candidate("yarn", "yarn", {"beta_slow": 2.0}), ["--yarn-beta-slow", "2"]),
    ],
)
def test_llama_cpp_gets_flags_for_known_methods(tmp_path, candidate, flags):
    """Another base, or YaRN with another ramp, needs no tensor in the model file."""
    make_result(candidate=candidate).save(tmp_path)
    export = exports_of(tmp_path)["llama.cpp"]
    at = export["arguments"].index(flags[0])
    assert export["arguments"][at : at + 2] == flags
    assert "by the found stretches, too" in export["notes"][-1]


def test_the_llama_cpp_converter_gets_a_config_for_phi3_and_refuses_qwen(tmp_path):
    """Its converter writes stretches pair by pair from these fields, for this architecture."""
    result = make_result(make_config("phi3"))
    result.save(tmp_path / "phi3")
    config = exports_of(tmp_path / "phi3")["llama.cpp"]["config"]
    rope = config["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert rope["long_factor"] == rope["short_factor"] == pytest.approx(result["long_factor"])
    assert config["original_max_position_embeddings"] == result.trained_length
    assert config["max_position_embeddings"] == result.length
    make_result(make_config("qwen3")).save(tmp_path / "qwen3")
    assert "qwen3" in exports_of(tmp_path / "qwen3")["llama.cpp"]["refused"]


def test_the_export_command_reads_the_result(saved, tmp_path):
    result, folder = saved
    words = ["--found", folder, "--engine", "llama.cpp"]
    run = run_in_this_process("export", TINY, *words, "--write", tmp_path / "made", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == exports_of(folder)["llama.cpp"]
    factors = load_file(tmp_path / "made" / "model_rope_freqs.safetensors")["rope.freqs.weight"]
    torch.testing.assert_close(factors, torch.tensor(result["long_factor"]), rtol=1e-6, atol=0)
    for extra in (["--method", "yarn"], ["--factor", "4"]):
        assert "leave --method" in run_in_this_process("export", TINY, *words, *extra).stderr
    config = AutoConfig.from_pretrained(TINY)
    config.rope_parameters["rope_theta"] = 5e5
    config.save_pretrained(tmp_path / "other")
    other = run_in_this_process("export", tmp_path / "other", *words)
    assert "is not for this model" in other.stderr


# -- the comparison on held-out samples ------------------------------------------------------------


def evaluation(nll, is_right, fitness):
    hits = tuple((is_right,) for _ in nll)
    return Evaluation(tuple(nll), hits, fitness, tokens=1, seconds=1.0, complete=True)


@pytest.mark.parametrize(("texts", "is_shown"), [(5, False), (6, True)])
def test_nothing_is_shown_below_six_texts(texts, is_shown):
    samples = [Sample((1, 2, 3), ((1, 2),), group=str(i)) for i in range(texts)]
    losses = {"found": evaluation([0.1] * texts, True, 0.1)}
    losses["yarn"] = evaluation([9.0 + i for i in range(texts)], False, 11.0)
    difference = compare_on_held_out(losses, samples)["against yarn"]
    low, high = difference["interval"]
    assert low < difference["nll"] < high
    assert (high < 0) == is_shown
    assert math.isinf(high) != is_shown
    assert (difference["p"] < 0.05) == is_shown


def test_answers_and_prose_weigh_the_same_in_the_interval():
    """The mean of the two kinds' means, tested over the texts of both."""
    kinds = [False] * 9 + [True] * 3
    samples = [Sample((1, 2, 3), ((1, 2),), str(i), kind) for i, kind in enumerate(kinds)]
    differences = [0.5 + 0.1 * i for i in range(9)] + [-0.2, -0.1, 0.4]
    losses = {"found": evaluation([2.0 + d for d in differences], True, 2.5)}
    losses["yarn"] = evaluation([2.0] * 12, True, 2.0)
    expected = statistics.mean_test(differences, range(12), kinds).mean
    assert expected.estimate == pytest.approx((0.9 + 0.1 / 3) / 2)
    interval = compare_on_held_out(losses, samples)["against yarn"]["interval"]
    assert interval == pytest.approx([expected.low, expected.high])


def test_a_printed_result_has_these_words():
    held_out = {
        "found": {"nll": 0.4, "interval": [0.3, 0.5], "accuracy": 0.9},
        "yarn": {"nll": 0.6},
        "linear": {"error": "ValueError: no"},
        "against yarn": {
            "nll": -0.2,
            "interval": [-0.3, -0.1],
            "accuracy": 0.125,
            "accuracy interval": [0.05, 0.2],
            "p": 0.0123,
        },
    }
    text = str(make_result(held_out=held_out))
    assert "from 256 to 1,024 tokens (×4): curve, 4 evaluations, 1 of them stopped early" in text
    assert "1 failed, 30 a minute, seed 42" in text
    assert "attention factor 1.25" in text
    assert "found   0.4000 (0.3000 to 0.5000), 90.0% of answers right" in text
    assert "linear  failed: ValueError: no" in text
    compared = "-0.2000 nats (-0.3000 to -0.1000), +12.5% of answers (+5.0% to +20.0%), p = 0.012"
    assert f"against yarn  {compared}" in text
    few = {"against yarn": {"nll": -0.2, "interval": ["-Infinity", "Infinity"]}}
    assert "against yarn  -0.2000 nats (no interval)" in str(make_result(held_out=few))
    assert make_result().fitness == 0.4
    assert math.isnan(make_result(history=[]).fitness)
    one = make_result(history=[entry(1, 1.0, 1.0)])
    assert repr(one) == "<SearchResult by curve ×4: 1 evaluations>"


# -- the picture -----------------------------------------------------------------------------------


TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


@pytest.fixture
def words_of(tmp_path):
    """Return a function that draws a search of these arguments and returns the picture's words."""
    pytest.importorskip("matplotlib")

    def draw(*arguments, **options):
        path = tmp_path / "drawn" / "a.svg"
        path.parent.mkdir(exist_ok=True)
        draw_search(path, make_result().space, *arguments, **options)
        assert [p.name for p in path.parent.iterdir()] == [path.name]  # no partial file
        return " ".join(TEXT.findall(path.read_text()))

    return draw


@pytest.fixture(scope="module")
def picture(saved):
    """Return the picture that a result has in its folder."""
    pytest.importorskip("matplotlib")
    _, folder = saved
    return (folder / "picture.svg").read_text()


def heights(svg, colour):
    """Return the y coordinates of the first line of a colour."""
    path = next(
        line for line in svg.split("<path") if f"stroke: {colour}" in line and "clip-path" in line
    )
    return [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.split('"')[1])]


def test_the_picture_names_the_search_and_its_lines_are_the_stretches(picture):
    """The found one's heights are its stretches' logarithms; NTK's are a straight line."""
    text = " ".join(TEXT.findall(picture))
    assert "tiny: found by curve, at 1,024 tokens (×4)" in text
    assert "found (curve), attention factor 1.25" in text
    for name in ("PI", "NTK", "YaRN", "measured whole", "stopped early", "best so far"):
        assert f" {name}" in text
    assert "worse, or failed" in text
    assert "critical dimension: pair 7" in text  # of 256 tokens: 2 pi 10000^(7/16) > 256
    assert "fitness (nats)" in text
    ntk = heights(picture, PALETTE["m2"][0])
    steps = [b - a for a, b in pairwise(ntk)]
    assert len(ntk) == 16
    assert all(step == pytest.approx(steps[0], abs=1e-3) for step in steps)
    per_log2 = (ntk[0] - ntk[-1]) / math.log2(4)  # NTK's last pair is stretched by the factor
    ours = heights(picture, PALETTE["m0"][0])
    rise = [(ours[0] - y) / per_log2 for y in ours]
    assert rise == pytest.approx([math.log2(s) for s in make_result().long_factor], abs=1e-3)


def test_every_colour_has_another_one_on_a_dark_screen(picture):
    rules = re.search(r"prefers-color-scheme:dark\)\{(.*?)\}</style>", picture)[1]
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", picture.replace(rules, "")))
    assert used == set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", rules))


def test_the_same_search_makes_the_same_file_and_a_bitmap_that_can_be_printed(picture, tmp_path):
    make_result().plot(tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == picture
    make_result().plot(tmp_path / "a.PNG")
    data = (tmp_path / "a.PNG").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1800
    assert height >= 1500


def test_a_search_without_measurements_has_no_empty_panel(words_of):
    text = words_of()
    assert "1,024 tokens (×4)" in text
    assert "YaRN" in text
    assert "found" not in text
    assert "evaluation" not in text
    result = make_result()
    assert len(result.figure().axes) == 2
    assert str(result).splitlines()[0] in result._repr_html_()


@pytest.mark.parametrize(
    "short",
    [
        [entry(1, math.inf, math.inf, "yarn")],
        [entry(1, 3.0, math.inf, "linear", complete=False)],
        [entry(1, 0.9, 0.9, "yarn"), entry(2, 0.9, 0.9, "ntk")],
        [entry(1, 0.0, 0.0, "yarn")],
    ],
    ids=["failed", "stopped", "equal", "nothing left to gain"],
)
def test_short_histories_are_drawn(words_of, short):
    text = words_of(short)
    assert "the search, smaller is better" in text
    ticks = [w for w in text.split("pair, from the fastest")[1].split() if w.lstrip("−").isdigit()]
    assert ticks  # evaluations are whole numbers
    assert "−" not in text.split("evaluation")[0].rsplit("best", 1)[-1]


def test_the_best_so_far_is_the_best_complete_candidate(words_of):
    stopped = entry(5, 0.1, 0.4, "ntk", complete=False)
    assert "found (" not in words_of(history()[1:3])  # one failed, one stopped early
    assert "found (yarn)" in words_of(history()[:3])
    assert "found (curve)" in words_of([*history(), stopped])


def test_endless_stretches_do_not_widen_the_axis(words_of):
    candidate = Candidate("curve", "longrope", {"long_factor": [1.0] * 15 + [1e18]})
    text = words_of(candidate=candidate)
    assert "×32" in text  # eight times the factor
    assert "×64" not in text


def test_a_failed_drawing_keeps_the_old_picture(picture, tmp_path, monkeypatch):
    path = tmp_path / "a.svg"
    path.write_text(picture)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_result().plot(path)
    assert path.read_text() == picture


@pytest.mark.parametrize("name", ["a.pdf", "a", "svg"])
def test_other_file_formats_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"\.svg or a \.png"):
        make_result().plot(tmp_path / name)
    assert not list(tmp_path.iterdir())
