"""Test that damaged checkpoints raise a ValueError that names the folder and the damage."""

import json
import shutil

import pytest
import transformers
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


def lose_a_shard(folder):
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    return r"1 of \d+ shards are missing \(model-00002"


def cut_a_shard(folder):
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    return "model-00002.*is cut short or damaged"


def cut_the_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50_000])
    return "model.safetensors is cut short or damaged"


def empty_the_weights(folder):
    (folder / "model.safetensors").write_bytes(b"")
    return "model.safetensors is cut short or damaged"


def lose_the_weights(folder):
    (folder / "model.safetensors").unlink()
    return "cannot load"


def lose_the_config(folder):
    (folder / "config.json").unlink()
    return "holds no config.json.*found generation_config.json, model.safetensors"


def cut_the_config(folder):
    config = folder / "config.json"
    config.write_text(config.read_text()[:100])
    return "cannot load"


def cut_the_index(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text()[:100])
    return "index"


def name_an_unknown_kind(folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "nosuch"}
    (folder / "config.json").write_text(json.dumps(config))
    return "nosuch"


def hold_an_encoder(folder):
    transformers.ViTConfig().save_pretrained(folder)
    return "of the type 'vit'"


def be_empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    return "holds no config.json.*found nothing"


def be_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    return "is a file: expected the folder it is in"


def be_absent(folder):
    shutil.rmtree(folder)
    return "no such folder"


DAMAGES = [
    ("sharded", lose_a_shard),
    ("sharded", cut_a_shard),
    ("sharded", cut_the_index),
    ("whole", cut_the_weights),
    ("whole", empty_the_weights),
    ("whole", lose_the_weights),
    ("whole", lose_the_config),
    ("whole", cut_the_config),
    ("whole", name_an_unknown_kind),
    ("whole", hold_an_encoder),
    ("whole", be_empty),
    ("whole", be_a_file),
    ("whole", be_absent),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=[d.__name__ for _, d in DAMAGES])
def test_damaged_folder_is_named(checkpoint, name, damage):
    folder = checkpoint(name)
    message = damage(folder)
    with pytest.raises(ValueError, match=message) as error:
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
