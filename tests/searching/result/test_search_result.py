"""The result of a search: what patches, what is written, what is read back."""

import json
import math
from dataclasses import replace

import pytest
import torch
from architectures.tiny_architectures import tiny_config
from helpers.tiny_models import make_config
from safetensors.torch import load_file
from search_results import TINY, entry, found, rising
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


def test_it_is_what_patch_takes():
    result = found()
    assert set(result) == {"factor", "long_factor", "short_factor", "attention_factor"}
    assert len(result) == 4
    model = tiny()
    handle = rope_patch.patch(model, "longrope", **result)
    (geometry,) = handle.geometries.values()
    expected = [1 / (stretch * 10_000 ** (2 * i / 32)) for i, stretch in enumerate(rising(16))]
    torch.testing.assert_close(
        handle.frequencies[None].inv_freq, torch.tensor(expected, dtype=torch.float64), rtol=1e-12,
        atol=0,
    )  # fmt: skip
    assert handle.frequencies[None].attention_factor == 1.25
    assert (handle.length, geometry.trained_length) == (1024, 256)


@pytest.mark.parametrize(
    ("method", "options"), [("yarn", {"beta_slow": 2.0}), ("abf", {"new_theta": 5e5}), ("ntk", {})]
)
def test_what_is_not_longrope_patches_as_it_would(method, options):
    """The scans find YaRN with another end of its ramp, or a base."""
    result = found(candidate=Candidate("scan", method, options))
    model, other = tiny(), tiny()
    rope_patch.patch(model, "longrope", **result)
    rope_patch.patch(other, method, factor=4, **options)
    torch.testing.assert_close(logits(model, 400), logits(other, 400), rtol=0, atol=1e-4)


def test_short_sequences_keep_their_frequencies():
    result = found()
    handle = rope_patch.patch(tiny(), "longrope", **result)
    short = handle.method.frequencies(handle.geometries[None], 256).inv_freq
    assert torch.equal(short, handle.geometries[None].inv_freq())


def test_arguments_of_the_search_that_the_result_needs_again():
    result = found(asked={"trained_length": 256, "start": "unscaled"})
    assert result["start"] == "unscaled"
    rope_patch.patch(tiny(), "longrope", **result)


def test_start_tokens_are_named_only_if_there_are_some():
    options = {"long_factor": rising(16), "start_tokens": 4}
    result = found(candidate=Candidate("mutation", "longrope", options))
    assert result["start_tokens"] == 4
    assert "start_tokens" not in found()
    assert rope_patch.patch(tiny(), "longrope", **result).method.start_token_count == 4


def test_start_tokens_have_no_config(tmp_path):
    """Then a config of an earlier result is taken away: it would say another rotation."""
    found().save(tmp_path)
    assert (tmp_path / "config.json").is_file()
    options = {"long_factor": rising(16), "start_tokens": 4}
    found(candidate=Candidate("mutation", "longrope", options)).save(tmp_path)
    assert not (tmp_path / "config.json").exists()
    exports = json.loads((tmp_path / "exports.json").read_text())
    assert all("start_tokens" in each["refused"] for each in exports.values())


def test_saved_and_read_back(tmp_path):
    against = {"difference": -0.1, "interval": [-math.inf, math.inf]}
    result = found(held_out={"found": {"nll": 0.4}, "against yarn": against})
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


def test_a_failed_save_keeps_what_was_there(tmp_path, monkeypatch):
    found().save(tmp_path)
    before = (tmp_path / "found.json").read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        found(seed=1).save(tmp_path)
    assert (tmp_path / "found.json").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("length", [100, 256, 257, 700])
def test_plain_transformers_reads_the_config_it_writes(tmp_path, length):
    result = found()
    result.save(tmp_path)
    native = tiny(AutoConfig.from_pretrained(tmp_path))
    model = tiny()
    plain = logits(model, length)
    rope_patch.patch(model, "longrope", **result)
    ours, theirs = logits(model, length), logits(native, length)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    assert (theirs - plain).abs().max() > 1
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["max_position_embeddings"] == 1024
    assert said["architectures"] == ["LlamaForCausalLM"]


def test_a_config_within_a_config(tmp_path):
    """Where the decoder's config is a part of a whole, that part is changed and no other."""
    config = tiny_config("gemma3")
    geometry = read_geometries(config.get_text_config(decoder=True))["full_attention"]
    found(
        config, geometry=geometry, candidate=stretched(geometry), asked={"layer_types": FAR}
    ).save(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["model_type"] == "gemma3"
    written = AutoConfig.from_pretrained(tmp_path)
    assert written.vision_config.to_dict() == config.vision_config.to_dict()
    assert written.text_config.rope_parameters["full_attention"]["rope_type"] == "longrope"


FAR = ["full_attention"]


def stretched(geometry):
    return Candidate("curve", "longrope", {"long_factor": rising(geometry.rotary_dim // 2)})


def test_layer_types(tmp_path):
    """Gemma 3: the layers that see far are stretched, the windows are not."""
    config = make_config("gemma3")
    geometry = read_geometries(config)["full_attention"]
    asked = {"layer_types": FAR}
    result = found(config, geometry=geometry, candidate=stretched(geometry), asked=asked)
    assert result.layer_type == "full_attention"
    result.save(tmp_path)
    said = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert said["full_attention"]["long_factor"] == result["long_factor"]
    assert said["sliding_attention"]["rope_type"] == "default"


def test_other_engines_get_the_stretches_for_all_lengths(tmp_path):
    result = found()
    result.save(tmp_path)
    exports = json.loads((tmp_path / "exports.json").read_text())
    assert set(exports) == set(rope_patch.exporting.ENGINES)
    spelled = exports["vllm"]["config"]["rope_parameters"]
    assert spelled["long_factor"] == spelled["short_factor"] == result["long_factor"]
    assert spelled["long_mscale"] == result["attention_factor"]
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
def test_llama_cpp_gets_the_method_that_was_found(tmp_path, candidate, flags):
    """A base, or YaRN with another end of its ramp, needs no tensor of the file."""
    found(candidate=candidate).save(tmp_path)
    said = json.loads((tmp_path / "exports.json").read_text())["llama.cpp"]
    at = said["arguments"].index(flags[0])
    assert said["arguments"][at : at + 2] == flags
    assert "by the found stretches, too" in said["notes"][-1]


def test_llama_cpps_converter_reads_phi3s(tmp_path):
    """Its converter writes stretches pair by pair from these fields, for this architecture."""
    config = make_config("phi3")
    result = found(config)
    result.save(tmp_path)
    exports = json.loads((tmp_path / "exports.json").read_text())
    said = exports["llama.cpp"]["config"]
    spelled = said["rope_parameters"]
    assert spelled["rope_type"] == "longrope"
    assert spelled["long_factor"] == spelled["short_factor"] == pytest.approx(result["long_factor"])
    assert said["original_max_position_embeddings"] == result.trained_length
    assert said["max_position_embeddings"] == result.length


def test_llama_cpp_has_no_stretches_for_qwen(tmp_path):
    found(make_config("qwen3")).save(tmp_path)
    said = json.loads((tmp_path / "exports.json").read_text())["llama.cpp"]
    assert "only, none for qwen3" in said["refused"]


def export(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_the_command_that_exports_it(tmp_path):
    result = found()
    result.save(tmp_path / "search")
    words = ["--found", tmp_path / "search", "--engine", "llama.cpp"]
    done = export(TINY, *words, "--write", tmp_path / "made", "--json")
    assert done.exit_code == 0, done.output
    exports = json.loads((tmp_path / "search" / "exports.json").read_text())
    assert json.loads(done.stdout) == exports["llama.cpp"]
    told = load_file(tmp_path / "made" / "model_rope_freqs.safetensors")["rope.freqs.weight"]
    torch.testing.assert_close(told, torch.tensor(result["long_factor"]), rtol=1e-6, atol=0)
    for extra in (["--method", "yarn"], ["--factor", "4"]):
        assert "leave --method" in str(export(TINY, *words, *extra).exception)
    config = AutoConfig.from_pretrained(TINY)
    config.rope_parameters["rope_theta"] = 5e5
    config.save_pretrained(tmp_path / "other")
    assert "is not for this model" in str(export(tmp_path / "other", *words).exception)


def test_without_a_config_there_is_the_result_alone(tmp_path):
    found(config={}).save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} - {"picture.svg"} == {"found.json"}


def test_a_folder_with_a_model_is_left_alone(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="holds a model"):
        found().save(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        found().save(tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model.safetensors"]


def changed(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: changed(p, seed=7), "was changed after it was written"),
        (lambda p: changed(p, format="rope_patch.search/0"), "read it with the version"),
        (lambda p: changed(p, format="rope_patch.eval/2"), "not the result of rope-patch search"),
        (lambda p: p.write_text("{}"), "expected format 'rope_patch.search/1', got None"),
        (lambda p: p.write_text("[]"), "got 'list'"),
        (lambda p: p.write_bytes(p.read_bytes()[:500]), "is not JSON"),
        (lambda p: p.unlink(), "there is no"),
    ],
)
def test_what_is_not_a_result_is_refused_with_the_reason(tmp_path, spoil, says):
    path = found().save(tmp_path)
    spoil(path)
    with pytest.raises(ValueError, match=says):
        SearchResult.load(path)


def test_numbers_that_do_not_follow_from_the_candidate(tmp_path):
    """A forgery with its own digest, or a formula that another version changed."""
    path = found().save(tmp_path)
    said = json.loads(path.read_text())
    said["patch"]["long_factor"][3] *= 1.001
    del said["digest"]
    from rope_patch.searching.result import search_result as module

    path.write_text(json.dumps({**said, "digest": module.json_digest(said)}))
    with pytest.raises(ValueError, match="gives other stretches with this version"):
        SearchResult.load(path)
    del said["geometry"]["theta"]
    path.write_text(json.dumps({**said, "digest": module.json_digest(said)}))
    with pytest.raises(ValueError, match=r"is damaged \(TypeError"):
        SearchResult.load(path)


def test_in_words():
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
    said = str(found(held_out=held_out))
    assert "from 256 to 1,024 tokens (×4): curve, 4 evaluations, 1 of them stopped early" in said
    assert "1 failed, 30 a minute, seed 42" in said
    assert "attention factor 1.25" in said
    assert "found   0.4000 (0.3000 to 0.5000), 90.0% of answers right" in said
    assert "linear  failed: ValueError: no" in said
    compared = "-0.2000 nats (-0.3000 to -0.1000), +12.5% of answers (+5.0% to +20.0%), p = 0.012"
    assert f"against yarn  {compared}" in said
    assert found().fitness == 0.4
    assert math.isnan(found(history=[]).fitness)
    assert repr(found(history=[entry(1, 1.0, 1.0)])) == "<SearchResult by curve ×4: 1 evaluations>"


def test_pairs_that_do_not_turn_or_no_longer_do():
    """Half of the pairs of p-RoPE stand still; what a candidate stops is stretched without end."""
    geometry = found().geometry
    base = (*geometry.unscaled_inv_freq().tolist()[:8], *[0.0] * 8)
    standing = replace(geometry, base=base)
    result = found(geometry=standing)
    assert result.long_factor == pytest.approx([*rising(16)[:8], *[1.0] * 8])
    stopped = Candidate("fewer", "proportional", {"partial_rotary_factor": 0.5})
    stretch = found(candidate=stopped).long_factor
    assert stretch[-1] == 1e18
    json.dumps(found(candidate=stopped).to_dict(), allow_nan=False)
