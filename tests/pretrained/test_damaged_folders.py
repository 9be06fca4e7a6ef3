"""Test that damaged checkpoints and adapters are refused, and that the error names the damage."""

import json
import shutil
from pathlib import Path

import pytest
import transformers
from helpers.lora_adapters import assert_logits, assert_untouched, base, change, state
from helpers.tiny_models import make_model

import rope_patch


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Save one checkpoint as one file and as several shards."""
    root = tmp_path_factory.mktemp("checkpoints")
    make_model().save_pretrained(root / "whole")
    make_model().save_pretrained(root / "sharded", max_shard_size="20KB")
    return root


@pytest.fixture
def checkpoint(originals, tmp_path):
    """Return a function that copies a checkpoint for a test to damage."""
    return lambda name: shutil.copytree(originals / name, tmp_path / name)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("yran", {"factor": 4}, "did you mean 'yarn'"),
        ("yarn", {"factor": 4, "beta_fst": 16}, "did you mean 'beta_fast'"),
        ("yarn", {"factor": 1}, "would change nothing"),
        ("yarn", {}, "exactly one of factor and length"),
        ("longrope", {"factor": 4}, "needs the option 'long_factor'"),
        ("yarn", {"factor": 4, "layer_types": ["x"]}, "rotates all layers alike"),
        ("yarn", {"factor": 4, "kernels": "cuda"}, "kernels must be one of"),
    ],
)
def test_requests_are_checked_before_weights_are_read(checkpoint, method, arguments, message):
    folder = checkpoint("whole")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        rope_patch.load(folder, method, **arguments)


def shard(folder):
    return sorted(folder.glob("model-*.safetensors"))[1]


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def be_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("not a folder")


CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DAMAGES = {  # the checkpoint, what happens to its folder, the fact that the error names
    "no shard": ("sharded", lambda f: shard(f).unlink(), r"1 of \d+ shards .*model-00002"),
    "cut shard": ("sharded", lambda f: cut(shard(f), -1000), "model-00002.*cut short or damaged"),
    "cut index": ("sharded", lambda f: cut(f / INDEX, 100), "index"),
    "cut weights": ("whole", lambda f: cut(f / WEIGHTS, 50_000), f"{WEIGHTS} is cut short"),
    "empty weights": ("whole", lambda f: cut(f / WEIGHTS, 0), f"{WEIGHTS} is cut short"),
    "no weights": ("whole", lambda f: (f / WEIGHTS).unlink(), "cannot load"),
    "no config": ("whole", lambda f: (f / CONFIG).unlink(), f"no config.json.*{WEIGHTS}"),
    "cut config": ("whole", lambda f: cut(f / CONFIG, 100), "cannot load"),
    "unknown kind": ("whole", lambda f: change(f, CONFIG, model_type="nosuch"), "nosuch"),
    "encoder": ("whole", lambda f: transformers.ViTConfig().save_pretrained(f), "'vit'"),
    "empty": ("whole", lambda f: [path.unlink() for path in f.iterdir()], "found nothing"),
    "file": ("whole", be_a_file, "is a file"),
    "absent": ("whole", shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_folder_is_named(checkpoint, case):
    name, damage, named = DAMAGES[case]
    folder = checkpoint(name)
    damage(folder)
    with pytest.raises(ValueError, match=named) as error:
        rope_patch.load(folder, "yarn", factor=4)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "record",
    ['{"method": ', "[]", '{"method": "yarn"}', '"yarn"', None],
    ids=["cut", "list", "short", "string", "no-lengths"],
)
def test_damaged_sidecar_is_named(record, tmp_path):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    rope_patch.save(model, tmp_path)
    sidecar = tmp_path / "rope_patch.json"
    record_fields = json.loads(sidecar.read_text())
    del record_fields["trained_length"], record_fields["layer_types"]
    sidecar.write_text(record or json.dumps(record_fields))
    with pytest.raises(ValueError, match=r"rope_patch\.json is damaged") as error:
        rope_patch.load(tmp_path)
    assert str(sidecar) in str(error.value)


def test_unknown_hub_name_is_an_error():
    with pytest.raises(ValueError, match=r"cannot load 'nobody/nothing'.*HF_HUB_OFFLINE"):
        rope_patch.load("nobody/nothing", "yarn", factor=4)


def test_checkpoint_without_rope_is_refused(tmp_path):
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'yarn' does not extend GPT2LMHeadModel's positions"):
        rope_patch.load(tmp_path, "yarn", factor=4)


# --- Adapters -------------------------------------------------------------------------------------


def trained_on(base_model, sidecar=True):
    """Return a function that makes an adapter's folder name another base, or none."""

    def damage(folder):
        change(folder, ADAPTER, base_model_name_or_path=base_model)
        if not sidecar:
            change(folder, "rope_patch.json", base_model=base_model)

    return damage


def empty_base(folder):
    (folder.parent / "empty").mkdir()
    trained_on(str(folder.parent / "empty"))(folder)


ADAPTER, LORA = "adapter_config.json", "adapter_model.safetensors"
BASES = {
    "no base": (trained_on(None, sidecar=False), r"got None.*rope_patch\.load_adapter"),
    "missing base": (trained_on("/no/such/folder"), r"no such folder.*rope_patch\.load_adapter"),
    "unknown base": (trained_on("nobody/nothing"), r"cannot load.*rope_patch\.load_adapter"),
    "empty base": (empty_base, r"empty': .*config\.json"),
}
ADAPTER_DAMAGES = BASES | {
    "cut config": (lambda f: (f / ADAPTER).write_text('{"peft_type": '), f"{ADAPTER} is damaged"),
    "no weights": (lambda f: (f / LORA).unlink(), f"no {LORA}"),
    "cut weights": (lambda f: cut(f / LORA, -10), f"{LORA} is cut short"),
    "cut sidecar": (lambda f: cut(f / "rope_patch.json", 1), r"rope_patch\.json is damaged"),
    "no frequencies": (
        lambda f: change(f, "rope_patch.json", frequencies={"all": {}}),
        r"frequencies in rope_patch\.json",
    ),
    "method": (lambda f: change(f, "rope_patch.json", method="tomorrow"), "'tomorrow'"),
}


@pytest.mark.parametrize("case", ADAPTER_DAMAGES)
def test_damaged_adapter_error_names_the_damage(bases, saved_adapter, tmp_path, case):
    folder = Path(shutil.copytree(saved_adapter("yarn")[0], tmp_path / "adapter"))
    damage, named = ADAPTER_DAMAGES[case]
    damage(folder)
    with pytest.raises(ValueError, match=named):
        rope_patch.load(folder)
    if case in BASES:
        got = rope_patch.load_adapter(base(bases), folder)
        assert_logits(got, saved_adapter("yarn")[1])
    elif case != "cut config":
        model = base(bases)
        before = state(model)
        with pytest.raises(ValueError, match=named):
            rope_patch.load_adapter(model, folder)
        assert_untouched(model, before)


def test_folders_without_an_adapter_are_refused(bases, tmp_path):
    with pytest.raises(ValueError, match=r"no such folder.*snapshot_download"):
        rope_patch.load_adapter(base(bases), "somebody/adapter")
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json.*found nothing"):
        rope_patch.load_adapter(base(bases), tmp_path)
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json.*found config\.json"):
        rope_patch.load_adapter(base(bases), bases / "llama")
    with pytest.raises(TypeError, match="expected a transformers model"):
        rope_patch.load_adapter("llama", tmp_path)
