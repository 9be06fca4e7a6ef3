"""Test the demo model: extensions of real pretrained weights, on a small scale."""

import pytest
import torch
from helpers.reference_rerotation import Reference
from helpers.tiny_models import step_by_step

import rope_patch
from rope_patch.evaluation.measures import perplexity
from rope_patch.pretrained import demo_folder, read_model, read_tokenizer, resolve_model_path
from rope_patch.tasks import documents
from rope_patch.utils import file_sha256

pytestmark = pytest.mark.slow

LENGTH, WINDOW, CONTEXT = 12288, 1024, 4096


@pytest.fixture(scope="module")
def folder():
    return demo_folder()


@pytest.fixture(scope="module")
def model(folder):
    torch.set_num_threads(2)
    return read_model(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def ids(folder):
    return documents(["emma"], read_tokenizer(folder), LENGTH)[0].tokens


def test_demo_is_converted_once(folder):
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert resolve_model_path("demo") == str(folder)
    assert resolve_model_path("some/other") == "some/other"


def test_damaged_demo_is_converted_again(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    demo_copy = tmp_path / "rope_patch" / folder.name
    demo_copy.mkdir(parents=True)
    (demo_copy / "model.safetensors").write_bytes(b"cut short")
    assert demo_folder() == demo_copy
    digest = file_sha256(demo_copy / "model.safetensors")
    assert digest == file_sha256(folder / "model.safetensors")


def test_demo_generates_sensible_text(model, folder):
    tokenizer = read_tokenizer(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(generated[0])


def last_window_perplexity(model, ids, label):
    """Return the perplexity of the last window after all tokens before it."""
    block = perplexity.block_size(WINDOW)
    losses = perplexity.block_losses(perplexity.document_losses(model, ids, label), block)
    return perplexity.curve_points([losses], block, WINDOW)[-1]["perplexity"]


def test_yarn_keeps_perplexity_at_twice_the_trained_length(model, ids):
    control = perplexity.perplexity(perplexity.control_loss(model, ids, LENGTH, WINDOW, CONTEXT))
    plain = last_window_perplexity(model, ids, "plain")
    with rope_patch.patch(model, "yarn", factor=2):
        yarn = last_window_perplexity(model, ids, "yarn")
    assert yarn <= 1.1 * control
    assert plain >= 2 * yarn


@pytest.mark.timeout(1800)  # 650 steps of 30 layers, three times
def test_decoding_matches_rotating_all_keys_afresh(folder, ids):
    """Set a trained length of 512 tokens; the model has 30 layers and logits of size 20."""
    model, part = read_model(folder, dtype=torch.float32), torch.tensor([ids[:650]])
    model.config.max_position_embeddings = 512
    expected = Reference(model, "dynamic-yarn").decode(part, 500)
    plain = step_by_step(model, part, 500)
    rope_patch.patch(model, "dynamic-yarn")
    got = step_by_step(model, part, 500)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    assert (got - plain)[:, :512].abs().max() == 0
    assert (got - plain)[:, 512:].abs().max() > 0.5


def test_saved_model_loads_in_plain_transformers(model, folder, tmp_path):
    from transformers import AutoModelForCausalLM

    ids = torch.arange(100, 164)[None]
    with torch.no_grad(), rope_patch.patch(model, "yarn", factor=2):
        rope_patch.save(model, tmp_path)
        expected = model(ids).logits
        got = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)


def test_python_takes_the_demo_by_name(folder):
    assert rope_patch.current(rope_patch.load("demo", "yarn", factor=2)).length == 16384
    diagnosis = rope_patch.diagnose("demo", "yarn", factor=2)
    assert diagnosis.length == 16384
    assert diagnosis.advice.python.startswith("model = rope_patch.load('demo', ")
    assert "compare demo " in diagnosis.advice.shell
