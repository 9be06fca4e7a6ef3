"""`Extension`: the whole request as one value, equal to the arguments of `patch` in effect."""

import dataclasses
import json
import pickle

import pytest
import transformers
from helpers.tiny_models import LONG_FACTOR, TRAINED, logits, make_model

import rope_patch
from rope_patch import Extension
from rope_patch.entry_points import check
from rope_patch.evaluation.request import EvalRequest

REQUESTS = {
    "a factor": ("llama", "yarn", {"factor": 4}),
    "a length": ("llama", "ntk", {"length": 3 * TRAINED + 7}),
    "options": ("llama", "yarn", {"factor": 2, "beta_fast": 16, "truncate": False}),
    "a list as an option": ("llama", "longrope", {"factor": 4, "long_factor": LONG_FACTOR}),
    "layer types": ("gemma3", "yarn", {"factor": 4, "layer_types": ["full_attention"]}),
    "a trained length": ("llama", "linear", {"factor": 4, "trained_length": TRAINED // 2}),
    "no target": ("llama", "dynamic-yarn", {}),
    "an expected length": ("llama", "dynamic-yarn", {"length": 4 * TRAINED}),
    "a factor in the formula": ("llama", "dynamic", {"factor": 2.0, "length": 4 * TRAINED}),
    "kernels": ("llama", "yarn", {"factor": 4, "kernels": "hf"}),
}


@pytest.fixture(params=REQUESTS.values(), ids=REQUESTS)
def request_of_patch(request):
    return request.param


def test_a_request_patches_as_its_arguments_do(request_of_patch):
    family, method, arguments = request_of_patch
    model = make_model(family)
    with rope_patch.patch(model, method, **arguments) as handle:
        expected, summary = logits(model), handle.summary()
        resolved = handle.extension
    with rope_patch.patch(model, Extension.of(method, **arguments)) as handle:
        assert logits(model).equal(expected)
        assert handle.summary() == summary
    with rope_patch.patch(model, resolved) as handle:  # what the config decided is explicit in it
        assert logits(model).equal(expected)
        assert handle.extension == resolved


def test_a_request_survives_json_and_pickle(request_of_patch):
    _, method, arguments = request_of_patch
    request = Extension.of(method, **arguments)
    assert Extension.from_dict(json.loads(json.dumps(request.to_dict()))) == request
    assert pickle.loads(pickle.dumps(request)) == request
    assert Extension.of(method, **request.arguments()) == request


WRITTEN = [  # what is given, and the factor and the length that it means
    ({"factor": "4"}, 4, None),
    ({"factor": "4x"}, 4, None),
    ({"factor": "×1.5"}, 1.5, None),
    ({"factor": "1k"}, None, 1024),
    ({"length": "1024"}, None, 1024),
    ({"length": "1,024"}, None, 1024),
    ({"length": "1.5K"}, None, 1536),
    ({"length": "2m"}, None, 2 * 1024**2),
    ({"length": "4 x"}, 4, None),
    ({"factor": "2x", "length": "1k"}, 2, 1024),
]


@pytest.mark.parametrize(("arguments", "factor", "length"), WRITTEN, ids=str)
def test_a_unit_decides_what_a_number_is(arguments, factor, length):
    request = Extension.of("yarn", **arguments, trained_length="8k")
    assert (request.factor, request.length, request.trained_length) == (factor, length, 8192)
    assert request == Extension("yarn", factor=factor, length=length, trained_length=8192)


@pytest.mark.parametrize(
    "text", ["", "x", "four", "4y", "x4x", "4kx", "1,5", "1,0000", "0.3k", "nan", "inf", "1e999"]
)
@pytest.mark.parametrize("name", ["factor", "length"])
def test_what_is_neither_a_factor_nor_tokens_is_refused(name, text):
    with pytest.raises(ValueError, match=f"{name} must be a factor such as 4x, or tokens such as"):
        Extension.of("yarn", **{name: text})


def test_two_arguments_that_mean_the_same_are_refused():
    for arguments in ({"factor": "32k", "length": 4096}, {"factor": 4, "length": "2x"}):
        with pytest.raises(ValueError, match="exactly one of factor and length"):
            Extension.of("yarn", **arguments)


def test_all_functions_read_factors_and_lengths_alike():
    def rotation(**arguments):
        model = make_model("llama")
        rope_patch.patch(model, "yarn", **arguments)
        return logits(model)

    expected = rotation(factor=4)
    assert rotation(factor="4x").equal(expected)
    assert rotation(length="4x").equal(expected)
    geometry = {"head_dim": 64, "theta": 10000.0}
    numbers = rope_patch.frequencies("yarn", **geometry, trained_length=4096, factor=4).inv_freq
    texts = rope_patch.frequencies("yarn", **geometry, trained_length="4k", factor="4x").inv_freq
    assert (numbers == texts).all()
    written = {"lengths": ("4k", "8192"), "factor": "4x", "perplexity_length": "2k"}
    request = EvalRequest(model="demo", methods=("yarn",), **written)
    assert (request.lengths, request.factor, request.perplexity_length) == ((4096, 8192), 4, 2048)


def test_arguments_are_those_that_differ_from_the_defaults():
    request = Extension("yarn", factor=4, start="running", options={"beta_fast": 16})
    assert request.arguments() == {"factor": 4, "start": "running", "beta_fast": 16}
    assert Extension("nope").arguments() == {}


def test_a_request_is_frozen_and_owns_its_values():
    options, layer_types = {"beta_fast": 16}, ["full_attention"]
    request = Extension("yarn", factor=4, layer_types=layer_types, options=options)
    options["beta_fast"], layer_types[0] = 3, "sliding_attention"
    assert request.options == {"beta_fast": 16}
    assert list(request.layer_types) == ["full_attention"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.factor = 8
    assert len({request, dataclasses.replace(request)}) == 1


@pytest.mark.parametrize("arguments", [{"factor": 4}, {"beta_fast": 16}, {"kernels": "hf"}])
def test_a_request_takes_no_arguments_beside_it(arguments):
    model = make_model()
    before = logits(model)
    (name,) = arguments
    with pytest.raises(rope_patch.Refused, match=rf"whole request, got {name} beside it"):
        rope_patch.patch(model, Extension("yarn", factor=2), **arguments)
    assert logits(model).equal(before)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Extension("yarn", options={"factor": 4}), ValueError, r"\('yarn', factor=4\)"),
        (lambda: Extension("yarn", options=[4]), TypeError, "options must be a dictionary"),
        (lambda: Extension("yarn", 4), TypeError, "positional"),
        (
            lambda: Extension.from_dict({"method": "yarn", "lenght": 9}),
            ValueError,
            r"no field 'lenght' \(did you mean 'length'\?\)",
        ),
        (lambda: Extension.from_dict({"factor": 4}), ValueError, "needs a method"),
    ],
)
def test_what_is_no_request_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (Extension("yarn"), "exactly one of factor and length, got neither"),
        (Extension("yarn", factor=4, length=TRAINED), "got factor=4 and length="),
        (Extension("yran", factor=4), "did you mean 'yarn'"),
        (Extension("yarn", factor=4, options={"beta_fats": 1}), "did you mean 'beta_fast'"),
        (Extension("yarn", factor=4, layer_types=["far"]), r"layer_types=\['far'\] does not fit"),
        (Extension("yarn", factor=4, kernels="cuda"), "kernels must be"),
        (Extension("yarn", factor=4, start="begin"), "start must be"),
    ],
)
def test_a_request_is_checked_against_a_model(extension, message):
    with pytest.raises(ValueError, match=message):
        check(make_model(), extension)


def test_loading_and_diagnosing_take_a_request(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    request = Extension("yarn", length=4 * TRAINED, options={"beta_fast": 16})
    with rope_patch.patch(model, request):
        expected = logits(model)
    loaded = rope_patch.load(tmp_path, request)
    assert logits(loaded).equal(expected)
    assert rope_patch.current(loaded).extension.options["beta_fast"] == 16
    keywords = {"length": 4 * TRAINED, "beta_fast": 16}
    assert str(rope_patch.diagnose(model, request)) == str(
        rope_patch.diagnose(model, "yarn", **keywords)
    )


FAR = {"factor": 64.1}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("yarn", FAR),
        ("yarn", {"length": 64 * TRAINED + 1}),
        ("dynamic-yarn", {"length": 64 * TRAINED + 1}),
        ("rerope", {"length": 64 * TRAINED + 1}),
    ],
)
def test_far_lengths_must_be_meant(method, arguments):
    model = make_model()
    with pytest.raises(rope_patch.Refused, match="anyway"):
        rope_patch.patch(model, method, **arguments)
    handle = rope_patch.patch(model, method, **arguments, anyway=True)
    assert handle.extension.anyway
    assert handle.extension == dataclasses.replace(handle.extension, anyway=False)
    assert Extension.of(method, **handle.extension.arguments()).anyway


def test_near_lengths_and_none_need_no_permission():
    for method, arguments in (("yarn", {"factor": 64}), ("rerope", {}), ("dynamic-yarn", {})):
        with rope_patch.patch(make_model(), method, **arguments):
            pass
        with rope_patch.patch(make_model(), method, **arguments, anyway=True) as handle:
            assert not handle.extension.anyway  # what nobody needed is not recorded


def test_far_lengths_of_tables_must_be_meant():
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with pytest.raises(rope_patch.Refused, match="anyway"):
        rope_patch.patch(model, "linear", **FAR)
    rope_patch.patch(model, "linear", **FAR, anyway=True)


def test_a_saved_far_patch_loads_and_saves_again(tmp_path):
    model = make_model()
    rope_patch.patch(model, "yarn", **FAR, anyway=True)
    rope_patch.save(model, tmp_path)
    record = json.loads((tmp_path / "rope_patch.json").read_text())
    assert record.pop("anyway") is True
    (tmp_path / "rope_patch.json").write_text(json.dumps(record))  # as earlier releases wrote it
    loaded = rope_patch.load(tmp_path)
    assert logits(loaded).equal(logits(model))
    with pytest.raises(rope_patch.Refused, match="overwrite"):
        rope_patch.save(loaded, tmp_path)
    rope_patch.save(loaded, tmp_path, overwrite=True)
    assert logits(rope_patch.load(tmp_path)).equal(logits(model))
