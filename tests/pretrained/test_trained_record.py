"""Test what saved folders record: the rotation, what was trained, and the methods of plugins."""

import json

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from helpers.plugins import write_method
from helpers.published_yarn import PUBLISHED, kind_of, multiplied, present_length
from helpers.published_yarn import logits as published_logits
from helpers.published_yarn import make_model as make_published
from helpers.releases import plain_transformers
from helpers.tiny_models import (
    FACTOR,
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_model,
)
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.methods import load_plugin, registry
from rope_patch.pretrained import mark_trained


def quick(names, *quick_ones):
    """Return parameters, of which those that repeat the others are slow."""
    return [pytest.param(n, marks=() if n in quick_ones else pytest.mark.slow) for n in names]


# --- Published YaRN, saved ------------------------------------------------------------------------

published = pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs nested YaRN and new model types")
FIELD, RECORD = "rope_patch", "trained"  # of a config, and in that field
SIDECAR = "rope_patch.json"
FOUR_TIMES = [name for name in PUBLISHED if name != "DeepSeek-V3"]  # whose lengths can be followed


def save_extended(folder, name, **changes):
    """Save a published checkpoint at four times its length; return it."""
    model = make_published(name, **changes)
    rope_patch.patch(model, "yarn", factor=4)
    rope_patch.save(model, folder)
    return model


@pytest.fixture(scope="module", params=PUBLISHED)
def extended(request, tmp_path_factory):
    """Return a published checkpoint's name, its folder at four times its length, and the model."""
    folder = tmp_path_factory.mktemp("published")
    return request.param, folder, save_extended(folder, request.param)


def plain_model(folder, **arguments):
    """Load a folder by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(folder, **arguments).eval()


def eager_model(folder):
    return plain_model(folder, attn_implementation="eager")


def trained_lengths(folder):
    """Return what diagnose, load, and patch on a model of transformers take for trained."""
    plain = eager_model(folder)
    tables = [
        next(iter(rope_patch.diagnose(subject).rotations.values())) for subject in (folder, plain)
    ]
    handles = [
        rope_patch.current(rope_patch.load(folder)),
        rope_patch.current(rope_patch.load(folder, "yarn", factor=8)),
        rope_patch.patch(plain, "yarn", factor=8),
    ]
    return {table.geometry.trained_length for table in tables} | {
        handle.trained_length for handle in handles
    }


@published
def test_plain_transformers_rotates_as_the_saved_patch(extended):
    name, folder, patched = extended
    expected, mscales = multiplied(name, 4)
    plain = eager_model(folder)
    torch.testing.assert_close(
        published_logits(plain), published_logits(patched), rtol=0, atol=1e-5
    )
    loaded = rope_patch.current(rope_patch.load(folder))
    assert loaded.frequencies[kind_of(name)].close_to(expected)
    assert loaded.softmax_mscale == pytest.approx(next(iter(mscales), 1.0), rel=1e-9)
    assert loaded.length == plain.config.max_position_embeddings == 4 * present_length(name)


# The bound of the base, which a diagnosis has, takes a second at a quarter of a million tokens.
@published
@pytest.mark.parametrize(
    "extended",
    [
        pytest.param(n, marks=pytest.mark.slow if 4 * present_length(n) > 2**18 else ())
        for n in PUBLISHED
    ],
    indirect=True,
)
def test_all_readers_agree_on_the_trained_length(extended):
    name, folder, _ = extended
    assert trained_lengths(folder) == {present_length(name)}
    assert "trained in" in str(rope_patch.diagnose(folder))


@published
def test_patch_on_a_saved_model_replaces_the_saved_patch(extended):
    name, folder, _ = extended
    plain, fresh = eager_model(folder), make_published(name)
    before, present = published_logits(plain), present_length(name)
    with pytest.raises(ValueError, match=rf"reads {4 * present:,} tokens.*ends at {2 * present:,}"):
        rope_patch.patch(plain, "yarn", factor=2)
    assert published_logits(plain).equal(before)
    handle = rope_patch.patch(plain, "yarn", factor=2, trained_length=present)
    rope_patch.patch(fresh, "yarn", factor=2)
    assert published_logits(plain).equal(published_logits(fresh))
    assert handle.length == 2 * present
    handle.undo()
    assert published_logits(plain).equal(before)


@published
@pytest.mark.parametrize("method", quick(["yarn", "linear", "ntk"], "yarn"))
def test_shorter_request_on_a_saved_model_is_refused_with_both_lengths(method, tmp_path):
    model = make_model("llama")
    rope_patch.patch(model, method, factor=4)
    rope_patch.save(model, tmp_path)
    plain = eager_model(tmp_path)
    refusal = rf"reads {TARGET} tokens.*ends at {2 * TRAINED}.*trained_length={TRAINED}"
    with pytest.raises(ValueError, match=refusal):
        rope_patch.patch(plain, method, factor=2)
    for answer in ({"trained_length": TRAINED}, {"start": "unscaled"}):
        with rope_patch.patch(plain, method, factor=2, **answer) as handle:
            assert (handle.trained_length, handle.length) == (TRAINED, 2 * TRAINED)


@published
@pytest.mark.parametrize("name", FOUR_TIMES)
def test_dynamic_patch_on_a_saved_model_is_the_checkpoint_up_to_its_length(name, tmp_path):
    present = round(16 * PUBLISHED[name][2]["factor"])
    sizes = {"original_max_position_embeddings": 16, "length": present}
    save_extended(tmp_path, name, **sizes)
    plain, checkpoint = eager_model(tmp_path), make_published(name, **sizes)
    assert not published_logits(plain).equal(published_logits(checkpoint))
    rope_patch.patch(plain, "dynamic-yarn")
    assert published_logits(plain, present).equal(published_logits(checkpoint, present))


@published
@pytest.mark.parametrize("options", [{}, {"beta_fast": 16, "truncate": False}])
def test_saved_yarn_does_not_count_as_trained(options, tmp_path):
    """A config that states constants of the formula would count, had the patch not been saved."""
    model = make_model("llama")
    rope_patch.patch(model, "yarn", factor=4, **options)
    rope_patch.save(model, tmp_path)
    assert trained_lengths(tmp_path) == {TRAINED}
    assert "put on by rope_patch" in str(rope_patch.diagnose(tmp_path))
    assert "put on by rope_patch" in str(rope_patch.export(eager_model(tmp_path), "transformers"))
    assert rope_patch.diagnose(tmp_path).length == TARGET


@published
def test_diagnosis_of_a_saved_model_shows_its_own_rotation(tmp_path):
    save_extended(tmp_path, "gpt-oss")
    (table,) = rope_patch.diagnose(tmp_path).rotations.values()
    expected = multiplied("gpt-oss", 4)[0].inv_freq.tolist()
    now = [pair.turns_at_length / (4 * present_length("gpt-oss")) for pair in table.pairs]
    assert [2 * torch.pi * turns for turns in now] == pytest.approx(expected, rel=1e-5)


@published
def test_saved_layer_types_are_restored_where_a_patch_leaves_them(tmp_path):
    layer_types = ["sliding_attention", "full_attention"]
    model = make_model("gemma3")
    rope_patch.patch(model, "yarn", factor=4, layer_types=layer_types)
    rope_patch.save(model, tmp_path)
    plain, fresh = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), make_model("gemma3")
    before = logits(plain)
    for each in (plain, fresh):
        rope_patch.patch(each, "yarn", factor=8, layer_types=["full_attention"])
    assert logits(plain).equal(logits(fresh))
    rope_patch.unpatch(plain)
    assert logits(plain).equal(before)


@published
def test_folders_without_the_field_are_read_by_their_sidecar(tmp_path):
    """As folders of rope_patch 0.1."""
    save_extended(tmp_path, "gpt-oss")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config[FIELD]
    path.write_text(json.dumps(config))
    (table,) = rope_patch.diagnose(tmp_path).rotations.values()
    loaded = rope_patch.current(rope_patch.load(tmp_path))
    assert {table.geometry.trained_length, loaded.trained_length} == {present_length("gpt-oss")}


@published
def test_second_save_records_the_checkpoint(tmp_path):
    save_extended(tmp_path / "one", "gpt-oss")
    plain = eager_model(tmp_path / "one")
    rope_patch.patch(plain, "yarn", factor=4, beta_fast=16)
    rope_patch.save(plain, tmp_path / "two")
    assert trained_lengths(tmp_path / "two") == {present_length("gpt-oss")}
    one, two = (
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("one", "two")
    )
    assert one[FIELD] == two[FIELD]


@published
def test_damaged_field_is_refused(tmp_path):
    save_extended(tmp_path, "gpt-oss")
    plain = eager_model(tmp_path)
    setattr(plain.config, FIELD, {"original": {}})
    with pytest.raises(ValueError, match=r"must hold the original max_position_embeddings"):
        rope_patch.patch(plain, "yarn", factor=2)


# --- Models that were trained under a patch; the weights are random, and recorded as trained ------


STATED = {  # by a config of transformers
    "linear": {"factor": FACTOR},
    "ntk": {"factor": FACTOR},
    "ntk-by-parts": {"factor": FACTOR},
    "yarn": {"factor": FACTOR, "beta_fast": 16},
    "llama3": {"factor": FACTOR},
    "abf": {"factor": FACTOR},
    "longrope": {"factor": FACTOR, "long_factor": LONG_FACTOR},
    "clipped": {"factor": FACTOR},
    "mixed-ntk": {"factor": FACTOR},
}
UNSTATED = {
    "dynamic": {"factor": 2},
    "dynamic-yarn": {},
    "mixed-yarn": {"length": TARGET},
    "mixed-longrope": {
        "length": TARGET,
        "long_factor": LONG_FACTOR,
        "attention_factor": 1.2,
    },
    "self-extend": {},
    "nope": {"temperature": "drope:0.4"},
    "yarn": {"length": TARGET, "temperature": "log-n"},
    "longrope": {"length": TARGET, "long_factor": LONG_FACTOR, "start_tokens": 4},
}


def save_trained(folder, method, family="llama", **arguments):
    """Save a model that counts as trained under a patch; return it."""
    model = make_model(family)
    rope_patch.patch(model, method, **arguments)
    mark_trained(model)
    rope_patch.save(model, folder)
    return model


def rotation(model):
    """Return what transformers' module rotates by."""
    return model.model.rotary_emb.inv_freq


@pytest.mark.parametrize("method", quick(STATED, "yarn", "abf", "longrope", "mixed-ntk"))
def test_stated_rotation_is_the_start_of_others(method, tmp_path):
    save_trained(tmp_path, method, **STATED[method])
    model, expected = plain_model(tmp_path), plain_model(tmp_path)
    handle = rope_patch.patch(model, "dynamic-yarn", factor=2)
    assert (handle.trained_length, handle.length) == (TARGET, 2 * TARGET)
    # transformers computes the long set of frequencies in float32.
    tolerance = 1e-3 if method in ("longrope", "mixed-ntk") else 0
    torch.testing.assert_close(
        logits(model, TARGET), logits(expected, TARGET), rtol=0, atol=tolerance
    )
    assert not logits(model, TARGET + 40).equal(logits(expected, TARGET + 40))
    handle = rope_patch.patch(model, "linear", factor=2)
    assert (handle.trained_length, handle.length) == (TARGET, 2 * TARGET)
    if tolerance == 0:  # modules with two sets start with the short one
        torch.testing.assert_close(rotation(model) * 2, rotation(expected), rtol=1e-6, atol=0)
    handle.undo()
    assert logits(model).equal(logits(expected))


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs configs by layer type")
@pytest.mark.parametrize("family", ["gemma3", "phi3"])
def test_layer_types_and_longrope_alone_continue(family, tmp_path):
    save_trained(tmp_path, "yarn", family, factor=FACTOR)
    model, expected = plain_model(tmp_path), plain_model(tmp_path)
    handle = rope_patch.patch(model, "dynamic-yarn", factor=2)
    assert (handle.trained_length, handle.length) == (TARGET, 2 * TARGET)
    assert logits(model, TARGET).equal(logits(expected, TARGET))


@pytest.mark.parametrize("method", quick(UNSTATED, *UNSTATED.keys() - {"dynamic", "mixed-yarn"}))
def test_unstated_rotation_is_restored_or_replaced_but_never_guessed(method, tmp_path):
    arguments = UNSTATED[method]
    trained = save_trained(tmp_path / "one", method, **arguments)
    loaded = rope_patch.load(tmp_path / "one")
    assert logits(loaded, LONG).equal(logits(trained, LONG))
    with plain_transformers():  # 5.0 has no rope type for pairs that do not rotate
        subjects = [plain_model(tmp_path / "one"), loaded]
    for model in subjects:
        before = logits(model)
        with pytest.raises(ValueError, match=rf"trained under {method}.*start='unscaled'"):
            rope_patch.patch(model, "ntk", factor=2)
        assert logits(model).equal(before)
        with rope_patch.patch(model, "ntk", factor=2, start="unscaled") as handle:
            assert (handle.trained_length, handle.length) == (TRAINED, 2 * TRAINED)
    with pytest.raises(ValueError, match=f"trained under {method}"):
        rope_patch.load(tmp_path / "one", "ntk", factor=2)
    with pytest.raises(ValueError, match=f"trained under {method}"):
        rope_patch.patch(subjects[0], method, **{**arguments, "temperature": 1.5})
    rope_patch.patch(subjects[0], method, **arguments)  # the very request of the training
    assert logits(subjects[0], LONG).equal(logits(trained, LONG))
    for number, model in enumerate(subjects):
        rope_patch.save(model, tmp_path / str(number))
        again = plain_model(tmp_path / str(number))
        with pytest.raises(ValueError, match=f"trained under {method}"):
            rope_patch.patch(again, "ntk", factor=2)


def test_training_again_records_the_last_rotation(tmp_path):
    save_trained(tmp_path / "one", "yarn", factor=2)
    model = plain_model(tmp_path / "one")
    rope_patch.patch(model, "yarn", factor=2)
    mark_trained(model)
    rope_patch.save(model, tmp_path / "two")
    handles = [
        rope_patch.patch(plain_model(tmp_path / "two"), "yarn", factor=2),
        rope_patch.current(rope_patch.load(tmp_path / "two", "yarn", factor=2)),
        rope_patch.patch(rope_patch.load(tmp_path / "two"), "yarn", factor=2),
    ]
    assert {(handle.trained_length, handle.length) for handle in handles} == {
        (4 * TRAINED, 8 * TRAINED)
    }
    restored = rope_patch.current(rope_patch.load(tmp_path / "two"))
    assert (restored.trained_length, restored.length) == (2 * TRAINED, 4 * TRAINED)
    handle = rope_patch.patch(plain_model(tmp_path / "two"), "yarn", factor=2, start="unscaled")
    assert (handle.trained_length, handle.length) == (TRAINED, 2 * TRAINED)


def rewrite(path, change):
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def forget_record(folder):
    """Make a folder one of a release before the record."""
    rewrite(folder / "config.json", lambda fields: fields[FIELD].pop(RECORD))
    rewrite(folder / SIDECAR, lambda fields: fields.pop(RECORD))


def read_plainly(folder, **arguments):
    return rope_patch.patch(plain_model(folder), **arguments)


def read_by_us(folder, method, **arguments):
    return rope_patch.current(rope_patch.load(folder, method, **arguments))


@pytest.mark.parametrize("read", [read_plainly, read_by_us])
@pytest.mark.parametrize("method", quick(["yarn", "linear", "ntk", "llama3"], "yarn"))
def test_folder_without_the_record_is_refused_with_both_lengths(read, method, tmp_path):
    model = make_model("llama")
    rope_patch.patch(model, method, factor=FACTOR)
    rope_patch.save(model, tmp_path)
    forget_record(tmp_path)
    assert logits(rope_patch.load(tmp_path)).equal(logits(model))
    with pytest.raises(ValueError, match=rf"trained_length={TARGET} if.*trained_length={TRAINED}"):
        read(tmp_path, method="yarn", factor=8)
    for length in (TRAINED, TARGET):
        handle = read(tmp_path, method="yarn", factor=8, trained_length=length)
        assert (handle.trained_length, handle.length) == (length, 8 * length)
    handle = read(tmp_path, method="yarn", factor=8, start="unscaled")
    assert handle.trained_length == TRAINED
    handle = read(tmp_path, method="yarn", factor=8, start="running")
    assert handle.trained_length == TARGET


def test_card_of_an_earlier_finetune_says_that_it_trained(tmp_path):
    save_trained(tmp_path, "yarn", factor=FACTOR)
    forget_record(tmp_path)
    (tmp_path / "README.md").write_text("Made by `rope-patch finetune --config recipe.yaml` with\n")
    assert read_by_us(tmp_path, "yarn", factor=2).trained_length == TARGET
    assert rope_patch.patch(rope_patch.load(tmp_path), "yarn", factor=2).trained_length == TARGET
    (table,) = rope_patch.diagnose(tmp_path).rotations.values()
    assert table.geometry.trained_length == TARGET


def test_files_that_disagree_are_refused(tmp_path):
    save_trained(tmp_path, "yarn", factor=FACTOR)
    rewrite(tmp_path / SIDECAR, lambda fields: fields.update({RECORD: False}))
    refusal = rf"config.json says .* trained for {TARGET} tokens, and {SIDECAR} .* not trained"
    for read in (rope_patch.load, rope_patch.diagnose):
        with pytest.raises(ValueError, match=refusal):
            read(tmp_path)


def test_damaged_record_is_refused(tmp_path):
    save_trained(tmp_path, "yarn", factor=FACTOR)
    model = plain_model(tmp_path)
    getattr(model.config, FIELD)[RECORD].pop("rope_parameters")
    with pytest.raises(ValueError, match="must hold the trained max_position_embeddings"):
        rope_patch.patch(model, "yarn", factor=2)


def test_undoing_leaves_the_record(tmp_path):
    model = save_trained(tmp_path, "longrope", **STATED["longrope"], short_factor=SHORT_FACTOR)
    rope_patch.unpatch(model)
    handle = rope_patch.patch(model, "yarn", factor=2)
    assert (handle.trained_length, handle.length) == (TARGET, 2 * TARGET)


# --- Methods from outside, whose folders load without them ----------------------------------------

pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture
def forget(monkeypatch):
    """Return a function that forgets the method `outside`, as in another process."""

    def forget():
        registry._REGISTRY.pop("outside", None)
        monkeypatch.setenv("ROPE_PATCH_PLUGINS", "")

    return forget


def save_patched(model, folder, **changes):
    """Patch a model by a method from a file, and save it; return the handle."""
    path = write_method(folder.parent / "mine.py", **changes)
    load_plugin(str(path))
    handle = rope_patch.patch(model, "outside", factor=4)
    rope_patch.save(model, folder)
    return handle


def sidecar_of(folder):
    return json.loads((folder / "rope_patch.json").read_text())


@pytest.mark.parametrize(
    ("family", "attention_factor"),
    [
        ("llama", "1.0"),
        ("gemma3", "1.2"),
        ("phi3", "1.2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("llama", "1.2"), ("qwen3", "1.0"), ("gemma3", "1.0"), ("phi3", "1.0"))
        ),
    ],
)
def test_folders_load_without_the_plugin(family, attention_factor, tmp_path, forget, caplog):
    model = make_model(family)
    plain = logits(model)
    save_patched(model, tmp_path / "saved", attention_factor=attention_factor)
    expected = logits(model)
    assert_differs(expected, plain)
    assert sidecar_of(tmp_path / "saved")["native"]
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()), expected)
    assert_close(logits(rope_patch.load(tmp_path / "saved")), expected)
    forget()
    caplog.clear()
    loaded = rope_patch.load(tmp_path / "saved")
    assert torch.equal(logits(loaded), expected)
    assert "'outside' of the file mine.py is not loaded here" in caplog.text
    summary = rope_patch.current(loaded).summary()
    assert summary.startswith("outside (recorded) ×4, 64 → 256 tokens")
    assert "a method from outside: the file mine.py" in summary
    rope_patch.save(loaded, tmp_path / "again")
    assert torch.equal(logits(rope_patch.load(tmp_path / "again")), expected)
    for subject in (tmp_path / "saved", tmp_path / "again", loaded):
        findings = {each.code: each for each in rope_patch.diagnose(subject).findings}
        assert "the file mine.py" in findings["method-from-outside"].evidence


@torch.no_grad()
@pytest.mark.parametrize("attention_factor", ["1.0", "1.2"])
def test_latent_attention_keeps_its_softmax_scale(attention_factor, tmp_path, forget):
    model = tiny_model("deepseek_v3")
    ids = torch.randint(4, 100, (1, LONG), generator=torch.Generator().manual_seed(1))
    handle = save_patched(model, tmp_path / "saved", attention_factor=attention_factor)
    assert handle.softmax_mscale == float(attention_factor)
    expected = model(input_ids=ids, use_cache=False).logits
    forget()
    loaded = rope_patch.load(tmp_path / "saved")
    assert rope_patch.current(loaded).softmax_mscale == float(attention_factor)
    torch.testing.assert_close(loaded(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs nested YaRN and new model types")
@pytest.mark.parametrize("name", quick(PUBLISHED, "gpt-oss", "DeepSeek-V3", "Laguna"))
def test_models_with_a_yarn_of_their_own_keep_both(name, tmp_path, forget):
    model = make_published(name)
    handle = save_patched(model, tmp_path / "saved", attention_factor="1.1")
    assert handle.extension.start == "running"
    expected = published_logits(model)
    forget()
    loaded = rope_patch.load(tmp_path / "saved", attn_implementation="eager")
    assert torch.equal(published_logits(loaded), expected)


def test_adapters_load_without_the_plugin(tmp_path, forget, caplog):
    peft = pytest.importorskip("peft")
    make_model().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(model, lora).eval()
    save_patched(model, tmp_path / "adapter")
    expected = logits(model)
    forget()
    caplog.clear()
    assert_close(logits(rope_patch.load(tmp_path / "adapter")), expected)
    assert "'outside' of the file mine.py is not loaded here" in caplog.text
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert_close(logits(rope_patch.load_adapter(plain, tmp_path / "adapter")), expected)


def test_the_sidecar_names_file_and_digest(tmp_path):
    save_patched(make_model(), tmp_path / "saved")
    outside = sidecar_of(tmp_path / "saved")["outside"]
    assert (outside["package"], outside["file"]) == (None, "mine.py")
    assert len(outside["digest"]) == 16
    rope_patch.save(rope_patch.load(tmp_path / "saved", "yarn", factor=2), tmp_path / "yarn")
    assert "outside" not in sidecar_of(tmp_path / "yarn")


def test_another_computation_under_the_same_name_is_refused(tmp_path, forget):
    model = make_model()
    save_patched(model, tmp_path / "saved")
    expected = logits(model)
    forget()
    load_plugin(str(write_method(tmp_path / "mine.py", divisor="9")))
    with pytest.raises(rope_patch.Refused, match="computes other frequencies here than 'outside'"):
        rope_patch.load(tmp_path / "saved")
    named = rope_patch.load(tmp_path / "saved", "outside", factor=4)
    assert_differs(logits(named), expected)


LENGTHS = "self.factor if seq_len is None or seq_len > geometry.trained_length else 1"


def test_a_method_that_follows_the_length_needs_its_plugin(tmp_path, forget, caplog):
    model = make_model()
    handle = save_patched(model, tmp_path / "saved", divisor=f"({LENGTHS})", following=True)
    assert handle.is_length_dependent
    assert "load this folder with rope_patch.load" in caplog.text
    assert not sidecar_of(tmp_path / "saved")["native"]
    for length in (40, LONG):
        reloaded = rope_patch.load(tmp_path / "saved")
        assert torch.equal(logits(reloaded, length), logits(model, length))
    forget()
    message = "'outside' of the file mine.py, which is not loaded here and follows the length"
    with pytest.raises(rope_patch.Refused, match=message):
        rope_patch.load(tmp_path / "saved")


@pytest.mark.parametrize("damage", [{"follows_length": False}, {"start_tokens": "many"}])
def test_a_damaged_record_is_refused(tmp_path, forget, damage):
    save_patched(make_model(), tmp_path / "saved")
    forget()
    sidecar = sidecar_of(tmp_path / "saved")
    sidecar["outside"] = damage
    (tmp_path / "saved" / "rope_patch.json").write_text(json.dumps(sidecar))
    with pytest.raises(rope_patch.Refused, match=r"rope_patch\.json is damaged \(outside: "):
        rope_patch.load(tmp_path / "saved")
