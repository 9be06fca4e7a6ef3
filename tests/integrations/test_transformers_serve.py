"""Test transformers' server on saved folders: rotated as recorded, or refused when loaded."""

import inspect
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from helpers.commands import run_in_this_process
from helpers.processes import free_port
from helpers.tiny_models import logits, make_generator
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import import_utils

import rope_patch
from rope_patch.serving import patched_manager

try:
    from transformers.cli.serving.model_manager import ModelManager
except (ImportError, NameError) as error:  # to 5.10, a NameError where packages are missing
    pytest.skip(f"no server to patch: {error}", allow_module_level=True)
if "continuous_batching" not in inspect.signature(ModelManager).parameters:  # to 5.17
    pytest.skip("its server does not know of continuous batching", allow_module_level=True)

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
TEXT = "It is a truth universally acknowledged, that a single man " * 20  # passes 256 tokens


def saved(folder, method, **options):
    """Save a patched model with a tokenizer, and return the model."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    rope_patch.patch(model, method, **options)
    rope_patch.save(model, folder, tokenizer=AutoTokenizer.from_pretrained(TINY))
    return model


def make_manager(**settings):
    return patched_manager(ModelManager)(device="cpu", model_timeout=-1, **settings)


def loaded(models, folder):
    return models.load_model_and_processor(models.process_model_name(str(folder)))[0]


@pytest.mark.parametrize(
    ("method", "options"),
    [("yarn", {"factor": 4}), ("dynamic-yarn", {}), ("self-extend", {"factor": 4})],
)
def test_saved_folders_are_rotated_as_recorded(tmp_path, method, options):
    model = saved(tmp_path, method, **options)
    served = loaded(make_manager(), tmp_path)
    assert str(rope_patch.current(served)) == str(rope_patch.current(model))
    assert logits(served, 300).equal(logits(model, 300))


def test_plain_transformers_loads_a_dynamic_folder_without_the_patch(tmp_path):
    """The reason for `rope-patch serve`, which the page on serving states."""
    model = saved(tmp_path, "dynamic-yarn")
    plain = loaded(ModelManager(device="cpu", model_timeout=-1), tmp_path)
    assert logits(plain, 200).equal(logits(model, 200))
    assert not torch.allclose(logits(plain, 300), logits(model, 300), atol=1e-2)


def test_models_without_a_sidecar_load_as_in_transformers(tmp_path):
    model = make_generator("llama")
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    served = loaded(make_manager(continuous_batching=True), tmp_path)
    assert rope_patch.current(served) is None
    assert logits(served).equal(logits(model))


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("dynamic-yarn", {}, "cannot be rotated again"),
        ("self-extend", {"factor": 4}, "compares each query with all keys"),
    ],
)
def test_continuous_batching_is_refused_when_the_model_is_loaded(tmp_path, method, options, reason):
    saved(tmp_path, method, **options)
    models = make_manager(continuous_batching=True)
    with pytest.raises(rope_patch.Refused, match=reason):
        loaded(models, tmp_path)
    assert not models.loaded_models


def test_continuous_batching_takes_a_static_folder(tmp_path):
    saved(tmp_path, "yarn", factor=4)
    served = loaded(make_manager(continuous_batching=True), tmp_path)
    assert rope_patch.current(served).method.name == "yarn"


@pytest.mark.skipif(import_utils.is_serve_available(), reason="the server's packages are installed")
def test_missing_packages_are_named(tmp_path):
    result = run_in_this_process("serve", str(tmp_path))
    assert result.returncode == 1
    assert "pip install transformers[serving]" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not import_utils.is_serve_available(), reason="needs pip install 'transformers[serving]'"
)
@pytest.mark.parametrize(
    ("method", "options", "arguments"),
    [
        ("dynamic-yarn", {}, []),
        ("yarn", {"factor": 4}, ["--continuous-batching", "--cb-num-blocks", "64"]),
    ],
)
def test_server_answers_as_the_model_does(tmp_path, method, options, arguments):
    model = saved(tmp_path, method, **options)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **settings)[0, ids.shape[1] :]
    plain = AutoModelForCausalLM.from_pretrained(TINY).generate(ids, **settings)
    assert not plain[0, ids.shape[1] :].equal(expected)
    port = free_port()
    command = [sys.executable, "-m", "rope_patch", "serve", str(tmp_path), "--device", "cpu"]
    server = subprocess.Popen(
        [*command, "--port", str(port), *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        body = {
            "model": str(tmp_path),
            "prompt": TEXT,
            "max_tokens": 12,
            "temperature": 0.0,
            "stream": False,
        }
        answer = _post(f"http://localhost:{port}/v1/completions", body)
    finally:
        server.terminate()
        server.wait(timeout=60)
    expected_text = tokenizer.decode(expected, skip_special_tokens=True)
    assert answer["choices"][0]["text"] == expected_text


@pytest.mark.slow
@pytest.mark.skipif(
    not import_utils.is_serve_available(), reason="needs pip install 'transformers[serving]'"
)
def test_command_refuses_to_start(tmp_path):
    saved(tmp_path, "dynamic-yarn")
    result = run_in_this_process("serve", str(tmp_path), "--continuous-batching")
    assert result.returncode == 1
    assert "paged cache of continuous batching cannot be rotated again" in result.stderr


def _post(url, body, patience=120):
    """Send JSON as soon as a server listens, and return its answer."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    until = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(request, timeout=patience) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
