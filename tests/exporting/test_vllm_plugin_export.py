"""Test that exports for vLLM's plugin are read back as the rotation that was patched."""

import json

import pytest
import torch
from helpers.tiny_models import LONG_FACTOR, TARGET, TRAINED, make_model

import rope_patch
from rope_patch.serving import method_name, our_parameters, read_request

METHODS = {
    "dynamic-yarn": {},
    "dynamic-ntk-by-parts": {"beta_fast": 16.0},
    "dynamic": {"factor": 2.0},
    "mixed-yarn": {"factor": 4},
    "mixed-linear": {"factor": 4},
    "mixed-abf": {"factor": 4},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR},
    "mixed-longrope": {"factor": 4, "long_factor": LONG_FACTOR},
}


def patched(family="llama", method="dynamic-yarn", **options):
    model = make_model(family)
    if method.startswith("dynamic"):
        options.setdefault("length", TARGET)
    handle = rope_patch.patch(model, method, kernels="hf", **options)
    return model, handle


def text_fields(export):
    """Return the overrides that vLLM's command line has."""
    assert export.arguments[0] == "--hf-overrides"
    return json.loads(export.arguments[1])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("method", METHODS)
def test_the_plugin_reads_the_rotation_that_was_patched(family, method):
    model, handle = patched(family, method, **METHODS[method])
    export = rope_patch.export(model, "vllm")
    fields = text_fields(export)
    (parameters,) = our_parameters(fields["rope_parameters"])
    assert method_name(parameters["rope_type"]) == method
    request = read_request(parameters)
    ((layer_type, geometry),) = handle.geometries.items()
    geometry_read = request.geometry(geometry.head_dim, geometry.rotary_dim)
    for length in (10, TRAINED, TRAINED + 1, 100, TARGET):
        got = request.method.frequencies_at(geometry_read, length)
        assert got.close_to(handle.frequencies_at(length)[layer_type])


@pytest.mark.parametrize("length", [TARGET, 100, 193, 777])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_vllm_derives_at_least_the_length_from_the_fields(family, length):
    model, _ = patched(family, length=length)
    export = rope_patch.export(model, "vllm")
    fields = text_fields(export)
    (parameters,) = our_parameters(fields["rope_parameters"])
    # The rule of vLLM 0.32's config/model.py.
    scale = 1 if family == "gemma3" else parameters["factor"]
    assert length <= fields["max_position_embeddings"] * scale < length + 1
    assert export.arguments[2:] == ["--max-model-len", str(length)]


def test_windows_of_gemma_keep_their_rotation():
    model, handle = patched("gemma3")
    fields = text_fields(rope_patch.export(model, "vllm"))
    own = handle.original_config.rope_parameters["sliding_attention"]
    assert fields["rope_parameters"]["sliding_attention"] == own


def test_without_a_length_the_longest_request_is_four_times_the_trained_length():
    model = make_model("llama")
    rope_patch.patch(model, "dynamic-yarn")
    export = rope_patch.export(model, "vllm")
    assert export.arguments[2:] == ["--max-model-len", str(4 * TRAINED)]
    assert any("no length was named" in note for note in export.notes)


@pytest.mark.parametrize("method", ["yarn", "linear", "ntk", "abf"])
def test_what_vllm_has_a_form_for_needs_no_plugin(method):
    model, _ = patched(method=method, factor=4)
    export = rope_patch.export(model, "vllm")
    assert not our_parameters(export.config["rope_parameters"])
    assert not any("plugin" in note for note in export.notes)


def test_growth_with_every_token_is_refused():
    model, _ = patched(growth="exact")
    with pytest.raises(rope_patch.Refused, match="leave it out"):
        rope_patch.export(model, "vllm")


def test_a_base_that_the_model_was_trained_with_is_written_out():
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = make_model("llama", rope_parameters=llama3)
    handle = rope_patch.patch(model, "dynamic-yarn", length=TARGET)
    (parameters,) = our_parameters(rope_patch.export(model, "vllm").config["rope_parameters"])
    request = read_request(parameters)
    geometry = handle.geometries[None]
    for length in (TRAINED, TARGET):
        got = request.method.frequencies_at(request.geometry(16, 16), length)
        expected = handle.frequencies_at(length)[None]
        torch.testing.assert_close(got.inv_freq, expected.inv_freq, rtol=1e-12, atol=0)
    assert parameters["original_max_position_embeddings"] == geometry.trained_length
    assert method_name(parameters["rope_type"]) == "dynamic-yarn"
