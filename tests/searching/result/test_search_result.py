"""Test the result of a search: patching with it, saving, loading and exporting it."""

import json
import math
from dataclasses import replace

import pytest
import torch
from architectures.tiny_architectures import tiny_config
from helpers.tiny_models import make_config
from safetensors.torch import load_file
from search_results import TINY, entry, make_result, rising_stretch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app
from rope_patch.rope_config import read_geometries
from rope_patch.searching.candidates import Candidate
from rope_patch.searching.result.search_result import SearchResult


def tiny(config=None):
    return AutoModelForCausalLM.from_pretrained(TINY, config=config, dtype=torch.float32).eval()


def logits(model, length):
    ids = torch.randint(5, 500, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        return model(ids).logits


def test_a_result_is_the_arguments_of_patch():
    result = make_result()
    assert set(result) == {"factor", "long_factor", "short_factor", "attention_factor"}
    assert len(result) == 4
    model = tiny()
    handle = rope_patch.patch(model, "longrope", **result)
    (geometry,) = handle.geometries.values()
    expected = [
        1 / (stretch * 10_000 ** (2 * i / 32)) for i, stretch in enumerate(rising_stretch(16))
    ]
    torch.testing.assert_close(
        handle.frequencies[None].inv_freq, torch.tensor(expected, dtype=torch.float64), rtol=1e-12,
        atol=0,
    )  # fmt: skip
    assert handle.frequencies[None].attention_factor == 1.25
    assert (handle.length, geometry.trained_length) == (1024, 256)


@pytest.mark.parametrize(
    ("method", "options"), [("yarn", {"beta_slow": 2.0}), ("abf", {"new_theta": 5e5}), ("ntk", {})]
)
def test_results_of_other_methods_patch_like_them(method, options):
    """Scans find YaRN with another ramp, or another base."""
    result = make_result(candidate=Candidate("scan", method, options))
    model, other = tiny(), tiny()
    rope_patch.patch(model, "longrope", **result)
    rope_patch.patch(other, method, factor=4, **options)
    torch.testing.assert_close(logits(model, 400), logits(other, 400), rtol=0, atol=1e-4)


def test_short_sequences_keep_their_frequencies():
    result = make_result()
    handle = rope_patch.patch(tiny(), "longrope", **result)
    short = handle.method.frequencies(handle.geometries[None], 256).inv_freq
    assert torch.equal(short, handle.geometries[None].inv_freq())


def test_search_options_that_patching_needs_are_kept():
    result = make_result(asked={"trained_length": 256, "start": "unscaled"})
    assert result["start"] == "unscaled"
    rope_patch.patch(tiny(), "longrope", **result)


def test_start_tokens_are_named_only_if_there_are_some():
    options = {"long_factor": rising_stretch(16), "start_tokens": 4}
    result = make_result(candidate=Candidate("mutation", "longrope", options))
    assert result["start_tokens"] == 4
    assert "start_tokens" not in make_result()
    assert rope_patch.patch(tiny(), "longrope", **result).method.start_token_count == 4


def test_start_tokens_have_no_config(tmp_path):
    """Saving deletes the config of an earlier result, which has another rotation."""
    make_result().save(tmp_path)
    assert (tmp_path / "config.json").is_file()
    options = {"long_factor": rising_stretch(16), "start_tokens": 4}
    make_result(candidate=Candidate("mutation", "longrope", options)).save(tmp_path)
    assert not (tmp_path / "config.json").exists()
    exports = json.loads((tmp_path / "exports.json").read_text())
    plugin = exports.pop("vllm")
    assert plugin["needs_plugin"]
    assert plugin["config"]["rope_parameters"]["start_tokens"] == 4
    assert all("start_tokens" in each["refused"] for each in exports.values())


def test_a_saved_result_is_read_back_equal(tmp_path):
    against = {"difference": -0.1, "interval": [-math.inf, math.inf]}
    result = make_result(held_out={"found": {"nll": 0.4}, "against yarn": against})
    path = result.save(tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "found.json"
    for place in (path, path.parent):
        read = SearchResult.load(place)
        assert dict(read) == dict(result)
        assert read.history == result.history
        assert math.isinf(read.history[1]["fitness"])
        for name in ("model", "weights", "strategy", "seed", "geometry", "candidate", "command",
                     "versions", "evaluations_per_minute", "length", "trained_length"):  # fmt: skip
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


@pytest.mark.parametrize("length", [100, 256, 257, 700])
def test_plain_transformers_reads_the_saved_config(tmp_path, length):
    result = make_result()
    result.save(tmp_path)
    native = tiny(AutoConfig.from_pretrained(tmp_path))
    model = tiny()
    plain = logits(model, length)
    rope_patch.patch(model, "longrope", **result)
    ours, theirs = logits(model, length), logits(native, length)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    assert (theirs - plain).abs().max() > 1
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] == 1024
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_only_the_decoders_part_of_a_config_is_changed(tmp_path):
    """The config of Gemma 3 has parts for text and vision."""
    config = tiny_config("gemma3")
    geometry = read_geometries(config.get_text_config(decoder=True))["full_attention"]
    make_result(
        config, geometry=geometry, candidate=make_candidate(geometry), asked={"layer_types": FAR}
    ).save(tmp_path)
    config_dict = json.loads((tmp_path / "config.json").read_text())
    assert config_dict["model_type"] == "gemma3"
    written = AutoConfig.from_pretrained(tmp_path)
    assert written.vision_config.to_dict() == config.vision_config.to_dict()
    assert written.text_config.rope_parameters["full_attention"]["rope_type"] == "longrope"


FAR = ["full_attention"]


def make_candidate(geometry):
    return Candidate("curve", "longrope", {"long_factor": rising_stretch(geometry.rotary_dim // 2)})


def test_only_the_searched_layer_types_are_stretched(tmp_path):
    """Gemma 3's full-attention layers are stretched, its sliding windows are not."""
    config = make_config("gemma3")
    geometry = read_geometries(config)["full_attention"]
    options = {"layer_types": FAR}
    result = make_result(
        config, geometry=geometry, candidate=make_candidate(geometry), asked=options
    )
    assert result.layer_type == "full_attention"
    result.save(tmp_path)
    rope_parameters = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert rope_parameters["full_attention"]["long_factor"] == result["long_factor"]
    assert rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_engines_get_the_stretches_for_all_lengths(tmp_path):
    result = make_result()
    result.save(tmp_path)
    exports = json.loads((tmp_path / "exports.json").read_text())
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
    export = json.loads((tmp_path / "exports.json").read_text())["llama.cpp"]
    at = export["arguments"].index(flags[0])
    assert export["arguments"][at : at + 2] == flags
    assert "by the found stretches, too" in export["notes"][-1]


def test_the_llama_cpp_converter_gets_a_config_for_phi3(tmp_path):
    """Its converter writes stretches pair by pair from these fields, for this architecture."""
    config = make_config("phi3")
    result = make_result(config)
    result.save(tmp_path)
    exports = json.loads((tmp_path / "exports.json").read_text())
    config_dict = exports["llama.cpp"]["config"]
    rope = config_dict["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert rope["long_factor"] == rope["short_factor"] == pytest.approx(result["long_factor"])
    assert config_dict["original_max_position_embeddings"] == result.trained_length
    assert config_dict["max_position_embeddings"] == result.length


def test_llama_cpp_refuses_stretches_for_qwen(tmp_path):
    make_result(make_config("qwen3")).save(tmp_path)
    export = json.loads((tmp_path / "exports.json").read_text())["llama.cpp"]
    assert "only, none for qwen3" in export["refused"]


def export(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_the_export_command_reads_the_result(tmp_path):
    result = make_result()
    result.save(tmp_path / "search")
    words = ["--found", tmp_path / "search", "--engine", "llama.cpp"]
    command_result = export(TINY, *words, "--write", tmp_path / "made", "--json")
    assert command_result.exit_code == 0, command_result.output
    exports = json.loads((tmp_path / "search" / "exports.json").read_text())
    assert json.loads(command_result.stdout) == exports["llama.cpp"]
    factors = load_file(tmp_path / "made" / "model_rope_freqs.safetensors")["rope.freqs.weight"]
    torch.testing.assert_close(factors, torch.tensor(result["long_factor"]), rtol=1e-6, atol=0)
    for extra in (["--method", "yarn"], ["--factor", "4"]):
        assert "leave --method" in str(export(TINY, *words, *extra).exception)
    config = AutoConfig.from_pretrained(TINY)
    config.rope_parameters["rope_theta"] = 5e5
    config.save_pretrained(tmp_path / "other")
    assert "is not for this model" in str(export(tmp_path / "other", *words).exception)


def test_without_a_config_only_the_result_is_saved(tmp_path):
    make_result(config={}).save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} - {"picture.svg"} == {"found.json"}


def test_a_folder_with_a_model_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="holds a model"):
        make_result().save(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        make_result().save(tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model.safetensors"]


def change_keys(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: change_keys(p, seed=7), "was changed after it was written"),
        (lambda p: change_keys(p, format="rope_patch.search/0"), "read it with the version"),
        (
            lambda p: change_keys(p, format="rope_patch.eval/2"),
            "not the result of rope-patch search",
        ),
        (lambda p: p.write_text("{}"), "expected format 'rope_patch.search/1', got None"),
        (lambda p: p.write_text("[]"), "got 'list'"),
        (lambda p: p.write_bytes(p.read_bytes()[:500]), "is not JSON"),
        (lambda p: p.unlink(), "there is no"),
    ],
)
def test_damaged_and_foreign_results_are_refused(tmp_path, spoil, message):
    path = make_result().save(tmp_path)
    spoil(path)
    with pytest.raises(ValueError, match=message):
        SearchResult.load(path)


def test_stretches_that_the_candidate_does_not_give_are_refused(tmp_path):
    """The file is forged with a valid digest, or another version changed a formula."""
    path = make_result().save(tmp_path)
    record = json.loads(path.read_text())
    record["patch"]["long_factor"][3] *= 1.001
    del record["digest"]
    from rope_patch.searching.result import search_result as module

    path.write_text(json.dumps({**record, "digest": module.json_digest(record)}))
    with pytest.raises(ValueError, match="gives other stretches with this version"):
        SearchResult.load(path)
    del record["geometry"]["theta"]
    path.write_text(json.dumps({**record, "digest": module.json_digest(record)}))
    with pytest.raises(ValueError, match=r"is damaged \(TypeError"):
        SearchResult.load(path)


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
    assert (
        repr(make_result(history=[entry(1, 1.0, 1.0)]))
        == "<SearchResult by curve ×4: 1 evaluations>"
    )


def test_stopped_pairs_have_stretch_1_or_an_endless_one():
    """Pairs with frequency 0 keep it; pairs that a candidate stops have an endless stretch."""
    geometry = make_result().geometry
    base = (*geometry.unscaled_inv_freq().tolist()[:8], *[0.0] * 8)
    half_stopped = replace(geometry, base=base)
    result = make_result(geometry=half_stopped)
    assert result.long_factor == pytest.approx([*rising_stretch(16)[:8], *[1.0] * 8])
    stopped = Candidate("fewer", "proportional", {"partial_rotary_factor": 0.5})
    stretch = make_result(candidate=stopped).long_factor
    assert stretch[-1] == 1e18
    json.dumps(make_result(candidate=stopped).to_dict(), allow_nan=False)
