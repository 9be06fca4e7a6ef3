"""PEFT adapters know under which rotation they were trained, and go on no other."""

import json
import logging
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_model,
    tokens,
)

import rope_patch

peft = pytest.importorskip("peft")

TINY = Path(__file__).parent / "assets" / "tiny-llama"


def lora(**changes):
    return peft.LoraConfig(
        **{"target_modules": ["q_proj", "v_proj"], "r": 2, "init_lora_weights": False, **changes}
    )


def adapted(model, seed=0, **changes):
    torch.manual_seed(seed)
    return peft.get_peft_model(model, lora(**changes)).eval()


def state(model):
    """Everything of a model that a refusal must leave alone."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()},
        [parameter.requires_grad for parameter in model.parameters()],
        json.dumps(model.config.to_dict(), default=str, sort_keys=True),
        rope_patch.current(model),
    )


def assert_untouched(model, before):
    after = state(model)
    assert after[1:] == before[1:]
    assert all(value.equal(before[0][name]) for name, value in after[0].items())


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    for family in ("llama", "gemma3"):
        make_model(family).save_pretrained(root / family)
    return root


def base(bases, family="llama"):
    return transformers.AutoModelForCausalLM.from_pretrained(bases / family)


METHODS = {
    "linear": {"factor": 4},
    "yarn": {"factor": 4, "beta_fast": 16},
    "ntk": {"factor": 4},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
    "dynamic": {"factor": 2},
    "dynamic-yarn": {},
    "mixed-yarn": {"factor": 4},
}


@pytest.fixture(scope="module")
def saved(bases, tmp_path_factory):
    """Adapters as they are saved, and their logits then; made once each."""
    made = {}

    def make(method="yarn", family="llama", first="patch", **options):
        key = repr((method, family, first, options))
        if key not in made:
            model = base(bases, family)
            options = {**METHODS[method], **options}
            if first == "patch":
                rope_patch.patch(model, method, **options)
                model = adapted(model)
            else:
                model = adapted(model)
                rope_patch.patch(model, method, **options)
            folder = tmp_path_factory.mktemp("adapter")
            rope_patch.save(model, folder)
            made[key] = folder, [logits(model, length) for length in (SHORT, LONG)]
        return made[key]

    return make


def assert_logits(model, expected):
    for length, wanted in zip((SHORT, LONG), expected, strict=True):
        assert logits(model, length).equal(wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_an_unpatched_base_is_patched_as_recorded(bases, saved, family, method, first):
    folder, expected = saved(method, family, first)
    model = base(bases, family)
    got = rope_patch.load_adapter(model, folder)
    assert isinstance(got, peft.PeftModel)
    assert not got.training
    assert rope_patch.current(got).method.name == method
    assert_logits(got, expected)
    assert_differs(logits(got), logits(base(bases, family)))
    assert_logits(rope_patch.load(folder), expected)


def test_what_is_written(bases, saved):
    folder, _ = saved()
    there = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "rope_patch.json"} <= there
    assert not {"config.json", "model.safetensors"} & there
    said = json.loads((folder / "rope_patch.json").read_text())
    assert (said["method"], said["options"]["beta_fast"]) == ("yarn", 16)
    assert said["base_model"] == str(bases / "llama")
    assert said["native"] is False


def test_a_trained_checkpoint_recalls_the_same(tmp_path):
    """The small model that was trained: adapters after some steps, before and after saving."""
    model = rope_patch.load(TINY, "yarn", factor=4)
    model = adapted(model, init_lora_weights=True, task_type="CAUSAL_LM")
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert all("lora_" in n for n, p in model.named_parameters() if p.requires_grad)
    ids = tokens(300)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    rope_patch.save(model, tmp_path / "adapter")
    loaded = rope_patch.load(tmp_path / "adapter")
    assert_logits(loaded, [logits(model, SHORT), logits(model, LONG)])

    plain = peft.PeftModel.from_pretrained(  # as PEFT alone does: nobody patches the base
        transformers.AutoModelForCausalLM.from_pretrained(TINY), tmp_path / "adapter"
    )
    assert_differs(logits(plain), logits(model))

    merged = loaded.merge_and_unload()
    assert rope_patch.current(merged) is not None
    rope_patch.save(merged, tmp_path / "merged")
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(native), logits(model), rtol=0, atol=1e-4)


ALIKE = {
    "the same words": ("yarn", {"factor": 4, "beta_fast": 16}),
    "a length": ("yarn", {"length": 4 * TRAINED, "beta_fast": 16}),
    "another method's words": ("abf", {"factor": 4, "new_theta": 1e4 * 4 ** (16 / 14)}),
    "a trained length": ("dynamic-yarn", {"trained_length": TRAINED, "length": 8 * TRAINED}),
}


@pytest.mark.parametrize("case", ALIKE)
def test_a_base_that_is_patched_alike_is_accepted(bases, saved, case):
    method, options = ALIKE[case]
    folder, expected = saved("ntk" if method == "abf" else method)
    model = base(bases)
    handle = rope_patch.patch(model, method, **options)
    got = rope_patch.load_adapter(model, folder)
    assert rope_patch.current(got) is handle
    if method == "abf":
        assert_close(logits(got), expected[1])
    else:
        assert_logits(got, expected)


DIFFERENT = {
    "method": ("yarn", "linear", {"factor": 4}),
    "factor": ("yarn", "yarn", {"factor": 2, "beta_fast": 16}),
    "option": ("yarn", "yarn", {"factor": 4, "beta_slow": 0.2}),
    "attention factor": ("yarn", "yarn", {"factor": 4, "beta_fast": 16, "attention_factor": 1.1}),
    "trained length": ("yarn", "yarn", {"factor": 4, "beta_fast": 16, "trained_length": 32}),
    "growing": ("dynamic-yarn", "yarn", {"factor": 4}),
    "not growing": ("yarn", "dynamic-yarn", {}),
    "steps": ("dynamic-yarn", "dynamic-yarn", {"growth": "exact"}),
    "dynamic factor": ("dynamic", "dynamic", {"factor": 3}),
    "short sequences": ("mixed-yarn", "yarn", {"factor": 4}),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_base_that_is_patched_otherwise_is_refused(bases, saved, case):
    trained, method, options = DIFFERENT[case]
    folder, _ = saved(trained)
    model = base(bases)
    handle = rope_patch.patch(model, method, **options)
    before, expected = state(model), logits(model)
    with pytest.raises(ValueError, match=r"(?s)was trained on a base.*unpatch") as refused:
        rope_patch.load_adapter(model, folder)
    assert str(refused.value).count(" → ") == 2  # both are shown
    assert str(handle) in str(refused.value)
    assert_untouched(model, before)
    assert logits(model).equal(expected)
    handle.undo()
    assert logits(model).equal(logits(base(bases)))
    assert logits(rope_patch.load_adapter(model, folder)).equal(saved(trained)[1][1])


def test_other_layer_types_are_refused(bases, saved):
    folder, expected = saved("linear", "gemma3", layer_types=["sliding_attention"])
    model = base(bases, "gemma3")
    rope_patch.patch(model, "linear", factor=4)
    before = state(model)
    with pytest.raises(ValueError, match=r"layers sliding_attention.*layers full_attention"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)
    rope_patch.patch(model, "linear", factor=4, layer_types=["sliding_attention"])
    assert_logits(rope_patch.load_adapter(model, folder), expected)


@pytest.mark.parametrize("trained", ["running", "unscaled"])
def test_another_start_is_refused(trained, tmp_path):
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    }
    sizes = {"rope_parameters": scaled, "max_position_embeddings": 2 * TRAINED}
    other = {"running": "unscaled", "unscaled": "running"}[trained]
    model = adapted(make_model(**sizes))
    rope_patch.patch(model, "linear", factor=4, start=trained)
    rope_patch.save(model, tmp_path)
    plain = make_model(**sizes)
    rope_patch.patch(plain, "linear", factor=4, start=other)
    with pytest.raises(ValueError, match="was trained on a base") as refused:
        rope_patch.load_adapter(plain, tmp_path)
    assert str(refused.value).count("running") == 1
    rope_patch.unpatch(plain)
    got = rope_patch.load_adapter(plain, tmp_path)
    assert logits(got).equal(logits(model))


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk"])
def test_a_base_whose_own_config_rotates_so_is_taken_as_it_is(bases, saved, method, tmp_path):
    folder, expected = saved(method)
    model = base(bases)
    rope_patch.patch(model, method, **METHODS[method])
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    got = rope_patch.load_adapter(native, folder)
    assert rope_patch.current(got) is None
    assert_close(logits(got), expected[1])


def test_a_base_that_stands_still_is_not_taken_for_one_that_grows(bases, saved, tmp_path):
    """Its own frequencies are those that were recorded, but at one length only."""
    folder, expected = saved("dynamic-yarn", length=4 * TRAINED)
    model = base(bases)
    rope_patch.patch(model, "yarn", factor=4)
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    got = rope_patch.load_adapter(native, folder)
    assert rope_patch.current(got).method.name == "dynamic-yarn"
    for length, wanted in zip((SHORT, LONG), expected, strict=True):
        assert_close(logits(got, length), wanted)


def test_a_base_with_another_rotation_is_refused(saved):
    folder, _ = saved("yarn")
    model = make_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    before = state(model)
    with pytest.raises(ValueError, match=r"would rotate LlamaForCausalLM otherwise.*500000"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)
    model = make_model(head_dim=32)
    with pytest.raises(ValueError, match="would rotate LlamaForCausalLM otherwise"):
        rope_patch.load_adapter(model, folder)


def test_a_base_that_cannot_be_patched_so_is_refused(saved):
    folder, _ = saved("linear", "gemma3")
    model = make_model()
    before = state(model)
    with pytest.raises(ValueError, match=r"which this one cannot be: .*rotates all layers alike"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)


def test_an_adapter_of_another_size_is_refused(saved, bases):
    folder, _ = saved("yarn")
    model = make_model(num_attention_heads=8)
    before, expected = state(model), logits(model)
    with pytest.raises(ValueError, match=rf"does not fit.*size mismatch.*{bases / 'llama'}"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)
    assert logits(model).equal(expected)


@pytest.fixture
def unrecorded(bases, tmp_path):
    model = adapted(base(bases))
    model.save_pretrained(tmp_path / "unrecorded")
    return tmp_path / "unrecorded", logits(model)


def test_nobody_knows_what_an_adapter_without_sidecar_wants(bases, unrecorded, caplog):
    folder, expected = unrecorded
    assert logits(rope_patch.load_adapter(base(bases), folder)).equal(expected)
    assert not caplog.text
    model = base(bases)
    handle = rope_patch.patch(model, "yarn", factor=4)
    got = rope_patch.load_adapter(model, folder)
    assert "nobody knows under which rotation" in caplog.text
    assert "yarn ×4" in caplog.text
    assert rope_patch.current(got) is handle
    caplog.clear()
    loaded = rope_patch.load(folder, "yarn", factor=4)
    assert logits(loaded).equal(logits(got))
    assert caplog.text.count("nobody knows") == 1
    with pytest.raises(ValueError, match=rf"name a method.*{folder} has no rope_patch.json"):
        rope_patch.load(folder)


def test_load_of_an_adapter_on_a_base_that_was_saved_patched(bases, tmp_path):
    first = base(bases)
    rope_patch.patch(first, "yarn", factor=4)
    rope_patch.save(first, tmp_path / "base")
    model = adapted(rope_patch.load(tmp_path / "base"))
    rope_patch.save(model, tmp_path / "recorded")
    model.save_pretrained(tmp_path / "unrecorded")
    expected = logits(model)
    for name in ("recorded", "unrecorded"):
        loaded = rope_patch.load(tmp_path / name)
        assert logits(loaded).equal(expected)
        assert rope_patch.current(loaded).original["max_position_embeddings"] == TRAINED


def test_load_with_a_method(saved):
    folder, expected = saved("yarn")
    assert_logits(rope_patch.load(folder, "yarn", factor=4, beta_fast=16), expected)
    with pytest.raises(ValueError, match=r"was trained on a base.*yarn ×4.*linear ×4"):
        rope_patch.load(folder, "linear", factor=4)
    with pytest.raises(ValueError, match="factor goes with a method"):
        rope_patch.load(folder, factor=4)


def test_nothing_large_is_read_for_a_request_that_fails(saved, bases, monkeypatch):
    folder, _ = saved("yarn")
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read")
    )
    with pytest.raises(ValueError, match="was trained on a base"):
        rope_patch.load(folder, "linear", factor=4)


def test_how_the_base_is_loaded_and_the_adapter_put_on(saved):
    folder, _ = saved("yarn")
    loaded = rope_patch.load(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        kernels="hf",
        is_trainable=True,
        adapter_name="mine",
    )
    assert loaded.active_adapter == "mine"
    assert loaded.get_base_model().model.layers[0].self_attn.k_proj.weight.dtype == torch.bfloat16
    assert loaded.config._attn_implementation == "eager"
    assert any(p.requires_grad for p in loaded.parameters())
    assert "transformers' own" in rope_patch.current(loaded).summary()


def test_the_revision_of_the_base_that_was_trained_on(saved, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(saved("yarn")[0], tmp_path / "adapter"))
    change(folder, "adapter_config.json", revision="v2")
    asked = []
    for kind in (transformers.AutoConfig, transformers.AutoModelForCausalLM):

        def read(path, *args, whole=kind.from_pretrained, **kwargs):
            asked.append(kwargs["revision"])
            return whole(path, *args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", read)
    assert_logits(rope_patch.load(folder), saved("yarn")[1])
    assert asked[:2] == ["v2", "v2"]
    rope_patch.load(folder, revision="v3")
    assert asked[-1] == "v3"


def test_several_adapters(bases, saved):
    folder, expected = saved("yarn")
    model = rope_patch.load_adapter(base(bases), folder)
    with pytest.raises(ValueError, match=r"expected a new name.*'default'.*adapter_name="):
        rope_patch.load_adapter(model, folder)
    assert rope_patch.load_adapter(model, folder, adapter_name="again") is model
    model.set_adapter("again")
    assert_logits(model, expected)
    before = state(model)
    with pytest.raises(ValueError, match="was trained on a base"):
        rope_patch.load_adapter(model, saved("linear")[0], adapter_name="other")
    assert_untouched(model, before)


def test_adapters_by_name_are_recorded_each(bases, tmp_path):
    model = base(bases)
    rope_patch.patch(model, "yarn", factor=4)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, lora(), adapter_name="one").eval()
    model.add_adapter("two", lora(r=4))
    rope_patch.save(model, tmp_path)
    for name in ("one", "two"):
        model.set_adapter(name)
        got = rope_patch.load_adapter(base(bases), tmp_path / name)
        assert rope_patch.current(got).method.name == "yarn"
        assert logits(got).equal(logits(model))


def test_adapters_of_transformers_own(bases, saved, tmp_path):
    """`model.add_adapter`, without PEFT's model around it."""
    model = base(bases)
    rope_patch.patch(model, "yarn", factor=4)
    torch.manual_seed(0)
    model.add_adapter(lora())
    rope_patch.save(model, tmp_path)
    got = rope_patch.load(tmp_path)
    assert rope_patch.current(got).method.name == "yarn"
    assert_close(logits(got), logits(model.eval()))


def test_the_base_goes_on_working(bases, saved):
    folder, _ = saved("yarn")
    model = base(bases)
    plain = logits(model)
    got = rope_patch.load_adapter(model, folder)
    rope_patch.patch(patched := base(bases), "yarn", factor=4, beta_fast=16)
    with got.disable_adapter():
        assert logits(got).equal(logits(patched))
    bare = got.unload()
    assert logits(bare).equal(logits(patched))
    rope_patch.unpatch(bare)
    assert logits(bare).equal(plain)


def test_offloaded_bases(bases, saved, tmp_path, monkeypatch):
    folder, expected = saved("yarn")
    monkeypatch.chdir(tmp_path)  # PEFT writes what it changes on the disk below where it stands
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    rest = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    loaded = rope_patch.load(
        folder, device_map={**places, **rest}, offload_folder=tmp_path / "offload"
    )
    assert rope_patch.current(loaded).method.name == "yarn"
    assert_close(logits(loaded), expected[1])


def change(folder, file, **values):
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def without_base(folder):
    change(folder, "adapter_config.json", base_model_name_or_path=None)
    change(folder, "rope_patch.json", base_model=None)
    return r"does not say on which model.*got None.*rope_patch\.load_adapter"


def missing_base(folder):
    change(folder, "adapter_config.json", base_model_name_or_path="/no/such/folder")
    return r"was trained on '/no/such/folder': no such folder.*rope_patch\.load_adapter"


def unknown_base(folder):
    change(folder, "adapter_config.json", base_model_name_or_path="nobody/nothing")
    return r"was trained on 'nobody/nothing': cannot load.*rope_patch\.load_adapter"


def empty_base(folder):
    (folder.parent / "empty").mkdir()
    change(folder, "adapter_config.json", base_model_name_or_path=str(folder.parent / "empty"))
    return r"was trained on '.*empty': .*holds no config\.json"


def cut_config(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": ')
    return r"adapter_config\.json is damaged"


def no_weights(folder):
    (folder / "adapter_model.safetensors").unlink()
    return r"holds no adapter_model\.safetensors"


def cut_weights(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    return r"adapter_model\.safetensors is cut short or damaged"


def cut_sidecar(folder):
    (folder / "rope_patch.json").write_text("{")
    return r"rope_patch\.json is damaged"


def no_frequencies(folder):
    change(folder, "rope_patch.json", frequencies={"all": {}})
    return "frequencies in the adapter's rope_patch.json are damaged"


def method_of_tomorrow(folder):
    change(folder, "rope_patch.json", method="tomorrow")
    return "unknown method 'tomorrow'"


DAMAGES = [
    without_base,
    missing_base,
    unknown_base,
    empty_base,
    cut_config,
    no_weights,
    cut_weights,
    cut_sidecar,
    no_frequencies,
    method_of_tomorrow,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged(bases, saved, tmp_path, damage):
    folder = Path(shutil.copytree(saved("yarn")[0], tmp_path / "adapter"))
    message = damage(folder)
    with pytest.raises(ValueError, match=message):
        rope_patch.load(folder)
    if damage in (without_base, missing_base, unknown_base, empty_base):
        got = rope_patch.load_adapter(base(bases), folder)
        assert_logits(got, saved("yarn")[1])
    elif damage is not cut_config:
        model = base(bases)
        before = state(model)
        with pytest.raises(ValueError, match=message):
            rope_patch.load_adapter(model, folder)
        assert_untouched(model, before)


def test_what_is_no_adapter(bases, tmp_path):
    with pytest.raises(ValueError, match=r"no such folder.*snapshot_download"):
        rope_patch.load_adapter(base(bases), "somebody/adapter")
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json.*found nothing"):
        rope_patch.load_adapter(base(bases), tmp_path)
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json.*found config\.json"):
        rope_patch.load_adapter(base(bases), bases / "llama")
    with pytest.raises(TypeError, match="expected a transformers model"):
        rope_patch.load_adapter("llama", tmp_path)


def test_adapters_and_whole_models_lie_apart(bases, saved, tmp_path):
    """transformers would load the adapter on top of a model that it was merged into."""
    folder = Path(shutil.copytree(saved("yarn")[0], tmp_path / "adapter"))
    model = rope_patch.load(folder)
    whole = tmp_path / "whole"
    rope_patch.save(model.merge_and_unload(), whole)
    for target, tried in ((folder, rope_patch.load(whole)), (whole, rope_patch.load(folder))):
        there = {path.name: path.read_bytes() for path in target.iterdir()}
        with pytest.raises(ValueError, match="expected another folder"):
            rope_patch.save(tried, target)
        assert {path.name: path.read_bytes() for path in target.iterdir()} == there


def test_saving_says_that_peft_alone_patches_nothing(bases, tmp_path, caplog):
    model = adapted(base(bases))
    rope_patch.patch(model, "yarn", factor=4)
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        rope_patch.save(model, tmp_path)
    assert "PEFT alone patches nothing" in caplog.text
    assert "no form of its own" not in caplog.text


def test_without_peft(bases, saved, monkeypatch):
    folder, _ = saved("yarn")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    model = base(bases)
    before = state(model)
    with pytest.raises(ValueError, match=r"peft is not installed.*rope-patch\[train\]"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)


def test_nothing_is_warned_about_twice(bases, saved):
    folder, _ = saved("yarn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rope_patch.load_adapter(base(bases), folder)
    assert not [warning for warning in caught if "adapter" in str(warning.message).lower()]
