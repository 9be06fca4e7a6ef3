"""Test what a proof says of classes that are right, that are wrong, and that refuse a method."""

import inspect
import json

import pytest
import torch
from helpers.tiny_models import make_config, make_model
from transformers import Cache, DeepseekV3Config, LlamaForCausalLM

from rope_patch.patching import handle, prove
from rope_patch.patching.config_copy import ConfigOverride
from rope_patch.patching.dynamic.rerotation import KeyRerotation
from rope_patch.patching.proof.checks import DYNAMIC, KINDS, LIMIT, MAP, STATIC, TWO_SETS
from rope_patch.pretrained.loading import empty_model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_kind_passes(implementation):
    model = make_model("gemma3")
    model.set_attn_implementation(implementation)
    proof = prove(model)
    assert [kind.kind for kind in proof.kinds] == list(KINDS)
    assert {kind.verdict for kind in proof.kinds} == {"passed"}
    assert proof.is_ok
    for kind in proof.kinds:
        assert {check.verdict for check in kind.checks} == {"ok"}
        assert len(kind.checks) >= 10
        assert all(check.error < LIMIT / 10 for check in kind.checks if check.error is not None)


def test_the_proof_reads_as_text_and_as_json():
    proof = prove(make_model(), [STATIC, DYNAMIC])
    text = proof.as_text()
    assert text.startswith("LlamaForCausalLM, a tiny model")
    assert "| **verdict** | passed | passed |" in text
    assert "| cached keys follow a growing text |  | " in text  # dynamic alone
    data = json.loads(json.dumps(proof.as_dict(), allow_nan=False))
    assert data["ok"]
    assert data["kinds"][0]["checks"][0]["verdict"] == "ok"


def test_a_method_that_a_class_refuses_is_no_failure():
    proof = prove(empty_model("deepseek", DeepseekV3Config()), [STATIC, MAP])
    assert [kind.verdict for kind in proof.kinds] == ["passed", "refused"]
    assert "latent attention" in proof.as_text()
    assert proof.is_ok


@pytest.mark.parametrize(
    ("part", "kind", "property_"),
    [
        # A guard that finds nothing to guard, as on a release that renames an argument.
        ((handle, "install_cache_stamps"), STATIC, "a cache of the unpatched model is refused"),
        ((handle, "install_cache_stamps"), STATIC, "a cache of another patch is refused"),
        ((KeyRerotation, "rerotate"), DYNAMIC, "cached keys follow a growing text"),
        ((KeyRerotation, "rerotate"), TWO_SETS, "cached keys follow a growing text"),
        ((handle, "set_frequencies"), STATIC, "the patch acts"),
    ],
)
def test_a_part_that_does_nothing_fails_the_proof(part, kind, property_, monkeypatch):
    model = make_model()
    assert prove(model, [kind]).is_ok
    monkeypatch.setattr(*part, lambda *_, **__: [])
    proof = prove(model, [kind])
    assert not proof.is_ok
    (failed,) = proof.kinds
    assert failed.verdict == "failed"
    assert {check.name: check.verdict for check in failed.checks}[property_] == "wrong"
    assert property_ in " ".join(failed.failures)


def test_an_undo_that_leaves_something_fails_the_proof(monkeypatch):
    monkeypatch.setattr(ConfigOverride, "undo", lambda *_: [])
    (kind,) = prove(make_model(), [STATIC]).kinds
    assert kind.verdict == "failed"
    assert "refused after it was undone" in kind.problem


class Forgetful(LlamaForCausalLM):
    """Loses the last token of a cache, with and without a patch."""

    def forward(self, *args, **kwargs):
        for value in kwargs.values():
            if isinstance(value, Cache):
                value.crop(-1)
        return super().forward(*args, **kwargs)

    forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)


def test_what_transformers_lacks_is_not_asked_of_a_patch():
    torch.manual_seed(0)
    (kind,) = prove(Forgetful(make_config()), [STATIC]).kinds
    checks = {check.name: check for check in kind.checks}
    assert checks["cached steps equal one pass"].verdict == "not asked"
    assert "the unpatched model lacks it, too" in checks["cached steps equal one pass"].problem
    assert checks["rows padded on the left equal rows alone"].verdict == "ok"
    assert kind.verdict == "not proven"  # nothing is known of caches
    assert "cannot be told" in kind.problem
