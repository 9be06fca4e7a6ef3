"""Test proofs at first use: when one is made, what is remembered, and what it refuses."""

import importlib.util
import logging
import random
import re
import sys
import threading

import numpy as np
import pytest
import torch
from helpers.tiny_models import BEFORE_5_23, LONG, logits, make_config, make_model
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,  # noqa: F401  (a rotary module's layout is read from its file)
)

import rope_patch
from rope_patch.patching.proof import first_use
from rope_patch.transformers_api import models as releases

STRETCHES = [1 + 0.4 * pair for pair in range(8)]
REQUESTS = {
    "static": ("yarn", {"factor": 4}),
    "dynamic": ("dynamic-linear", {}),
    "two sets": ("longrope", {"factor": 4, "long_factor": STRETCHES}),
    "position map": ("rerope", {"window": 16}),
    "temperature": ("linear", {"factor": 2, "temperature": 1.2}),
    "start tokens": (
        "longrope",
        {
            "factor": 4,
            "long_factor": STRETCHES,
            "short_factor": STRETCHES,
            "start_tokens": 2,
        },
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Demand proofs, in a process that made none and with an empty cache folder."""
    monkeypatch.setenv("ROPE_PATCH_CACHE", str(tmp_path))
    monkeypatch.setenv("ROPE_PATCH_PROOF", "1")
    forget(monkeypatch)
    return tmp_path / "proofs"


def forget(monkeypatch):
    monkeypatch.setattr(first_use, "_proofs", {})
    monkeypatch.setattr(first_use, "_warned", set())


def remembered(folder):
    return len(list(folder.glob("*.json"))) if folder.exists() else 0


def forbid(monkeypatch):
    """Let no proof run from now on."""

    def prove(*_):
        raise AssertionError("a proof ran")

    monkeypatch.setattr(first_use, "prove", prove)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in REQUESTS),
        pytest.param("qwen3", "dynamic", marks=pytest.mark.slow),
        pytest.param("gemma3", "dynamic", marks=pytest.mark.slow),
    ],
)
def test_a_passed_proof_is_remembered(family, kind, folder, monkeypatch):
    model, (method, options) = make_model(family), REQUESTS[kind]
    rope_patch.patch(model, method, **options).undo()
    kinds = {"temperature": 2, "start tokens": 2}.get(kind, 1)  # with the frequencies below them
    assert remembered(folder) == kinds
    forbid(monkeypatch)
    rope_patch.patch(model, method, **options).undo()  # in this process
    forget(monkeypatch)
    rope_patch.patch(make_model(family), method, **options)  # in the next one


def test_another_version_is_proven_again(folder, monkeypatch):
    rope_patch.patch(make_model(), "yarn", factor=4)
    monkeypatch.setattr(first_use, "transformers_version", lambda: "99.0")
    rope_patch.patch(make_model(), "yarn", factor=4)
    assert remembered(folder) == 2


def test_another_source_of_the_class_is_proven_again(folder, tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(
        "from transformers import LlamaForCausalLM\nclass Mine(LlamaForCausalLM):\n    pass\n"
    )
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mine", module)
    spec.loader.exec_module(module)
    model = module.Mine(make_config())
    for expected in (1, 1):
        forget(monkeypatch)
        rope_patch.patch(model, "yarn", factor=4).undo()
        assert remembered(folder) == expected
    path.write_text(path.read_text() + "# a line more\n")
    forget(monkeypatch)
    rope_patch.patch(model, "yarn", factor=4)
    assert remembered(folder) == 2


def test_a_folder_that_cannot_be_written_forgets(folder, monkeypatch):
    folder.parent.joinpath("proofs").write_text("a file")
    rope_patch.patch(make_model(), "yarn", factor=4)


@pytest.mark.parametrize(
    ("version", "variable", "runs"),
    [
        (releases.NEWEST_TESTED, None, False),
        ("5.0.0", None, False),
        ("99.0.0", None, True),
        ("99.0.0.dev0", "", True),
        ("99.0.0", "0", False),
        ("5.0.0", "1", True),
    ],
)
def test_releases_that_were_not_tested_are_proven(version, variable, runs, folder, monkeypatch):
    monkeypatch.setattr("rope_patch.transformers_api.models.transformers_version", lambda: version)
    monkeypatch.delenv("ROPE_PATCH_PROOF")
    if variable is not None:
        monkeypatch.setenv("ROPE_PATCH_PROOF", variable)
    rope_patch.patch(make_model(), "yarn", factor=4)
    assert remembered(folder) == runs


def test_another_value_of_the_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("ROPE_PATCH_PROOF", "yes")
    with pytest.raises(rope_patch.Refused, match=r"ROPE_PATCH_PROOF.*'yes'"):
        rope_patch.patch(make_model(), "yarn", factor=4)


class Llama(LlamaForCausalLM):
    """A Llama whose rotary module is of another class."""

    rotary = LlamaRotaryEmbedding

    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = self.rotary(config)


class UnscaledChunks(LlamaRotaryEmbedding):
    """Ignores `inv_freq` where far positions are read behind a cache."""

    def forward(self, x, position_ids):
        if position_ids.min() < 32:
            return super().forward(x, position_ids)
        angle = position_ids[..., None].float() * self.original_inv_freq
        return tuple(f(torch.cat((angle, angle), -1)) for f in (torch.cos, torch.sin))


class FirstRowForAll(LlamaRotaryEmbedding):
    """Rotates all rows as the first one, if they are many."""

    def forward(self, x, position_ids):
        own = self.inv_freq
        if own.ndim == 3 and len(own) > 2:
            self.inv_freq = own[:1]
        try:
            return super().forward(x, position_ids)
        finally:
            self.inv_freq = own


class RoundsPatched(LlamaRotaryEmbedding):
    """Rounds while a patch is in effect."""

    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        return (cos.bfloat16().float(), sin) if "_rope_patch" in vars(self) else (cos, sin)


class Remembers(LlamaRotaryEmbedding):
    """Keeps the largest attention factor for ever."""

    largest = 1.0

    def forward(self, x, position_ids):
        self.largest = max(self.largest, float(self.attention_scaling))
        cos, sin = super().forward(x, position_ids)
        scale = self.largest / self.attention_scaling
        return cos * scale, sin * scale


def named(rotary):
    return type(f"{rotary.__name__}Llama", (Llama,), {"rotary": rotary, "__module__": __name__})


@pytest.mark.parametrize(
    ("rotary", "request_", "problem"),
    [
        (
            UnscaledChunks,
            REQUESTS["static"],
            r"cached steps equal one pass: logits are off by.*cached chunks equal one pass",
        ),
        pytest.param(
            *(FirstRowForAll, REQUESTS["dynamic"], "rows padded on the left equal rows alone"),
            marks=pytest.mark.skipif(BEFORE_5_23, reason="modules are called row by row"),
        ),
        (RoundsPatched, REQUESTS["dynamic"], "short texts keep their bits"),
        (Remembers, REQUESTS["static"], "undoing restores the bits"),
    ],
)
def test_what_is_wrong_is_refused_by_name(rotary, request_, problem, folder):
    torch.manual_seed(0)
    model, (method, options) = named(rotary)(make_config()).eval(), request_
    before = logits(model, LONG)
    for _ in range(2):  # the second time from memory
        with pytest.raises(rope_patch.Refused) as refusal:
            rope_patch.patch(model, method, **options)
        message = str(refusal.value)
        assert re.search(problem, message)
        assert f"{rotary.__name__}Llama" in message
        for step in (f"transformers<={releases.NEWEST_TESTED}", "ROPE_PATCH_PROOF=0"):
            assert step in message
    assert rope_patch.current(model) is None
    assert torch.equal(logits(model, LONG), before)
    assert remembered(folder) == 0


def test_rows_of_one_frequency_pass_where_all_rows_have_it():
    rope_patch.patch(named(FirstRowForAll)(make_config()), "yarn", factor=4)


def test_a_patch_goes_on_at_the_users_own_risk(monkeypatch):
    monkeypatch.setenv("ROPE_PATCH_PROOF", "0")
    assert rope_patch.patch(named(UnscaledChunks)(make_config()), "yarn", factor=4).active


class Picky(LlamaForCausalLM):
    """Cannot be built from its config alone."""

    def __init__(self, config, secret):
        super().__init__(config)
        self.secret = secret


def test_a_class_that_cannot_be_shrunk_is_said_once(caplog, folder):
    caplog.set_level(logging.WARNING, logger="rope_patch")
    model = Picky(make_config(), secret=1)
    for method in ("yarn", "linear"):
        rope_patch.patch(model, method, factor=4).undo()
    rope_patch.patch(model, "dynamic-yarn").undo()
    (record,) = caplog.records
    assert "Picky could not be proven" in record.getMessage()
    assert "secret" in record.getMessage()
    assert remembered(folder) == 0


def test_a_wrapped_model_is_proven_by_its_own_class(folder):
    model = torch.nn.Sequential(make_model("qwen3").to(torch.bfloat16))
    rope_patch.patch(model, "dynamic-yarn")
    assert '"transformers.models.qwen3' in next(folder.glob("*.json")).read_text()


def test_a_patched_model_is_proven_from_its_unpatched_config(folder):
    model = make_model()
    rope_patch.patch(model, "linear", factor=4)
    rope_patch.patch(model, "yarn", factor=4)
    assert remembered(folder) == 1  # one kind, on one config


def test_the_users_state_is_untouched(folder, caplog, recwarn):
    caplog.set_level(logging.DEBUG)
    model = make_model("gemma3")
    torch.set_default_dtype(torch.float64)
    try:
        states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        rope_patch.patch(model, "dynamic-yarn")
        assert torch.equal(torch.get_rng_state(), states[0])
        assert np.array_equal(np.random.get_state()[1], states[1])
        assert random.getstate() == states[2]
        assert torch.get_default_dtype() == torch.float64
        assert torch.is_grad_enabled()
        assert torch.get_default_device() == torch.device("cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert remembered(folder) == 1
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "proved dynamic methods on a tiny Gemma3ForCausalLM",
        "patched Gemma3ForCausalLM",
    ]
    assert not recwarn.list


def test_a_default_device_and_inference_mode_do_not_matter(folder):
    model = make_model()
    with torch.device("meta"), torch.inference_mode():
        rope_patch.patch(model, "self-extend")
    assert remembered(folder) == 1


def test_threads_make_one_proof_of_one_class(folder, monkeypatch):
    proofs, original = [], first_use.prove

    def counted(*arguments):
        proofs.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(first_use, "prove", counted)
    models, handles = [make_model() for _ in range(4)], []
    threads = [
        threading.Thread(target=lambda m=m: handles.append(rope_patch.patch(m, "yarn", factor=4)))
        for m in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(proofs), len(handles)) == (1, 4)
