"""Provide fixtures: transformers' registry, restored after each test, and saved adapters."""

import logging

import pytest
import transformers
from helpers.rope_type_configs import registry
from helpers.tiny_models import LONG, SHORT, logits, make_model

import rope_patch


@pytest.fixture
def restored_registry():
    """Unregister our methods after a test, and check that transformers' registry is restored."""
    before = registry()
    yield
    rope_patch.unregister_rope_types()
    assert registry() == before


@pytest.fixture
def registered(restored_registry):
    """Register our methods for one test."""
    rope_patch.register_rope_types()


@pytest.fixture
def library_log(caplog):
    """Capture warnings of transformers and rope_patch, as users see them."""
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    yield caplog
    transformers.logging.disable_propagation()
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return a folder with the base models."""
    root = tmp_path_factory.mktemp("bases")
    for family in ("llama", "gemma3"):
        make_model(family).save_pretrained(root / family)
    return root


@pytest.fixture(scope="module")
def saved_adapter(bases, tmp_path_factory):
    """Return a function that returns an adapter's folder and logits, saving each adapter once."""
    from helpers.lora_adapters import METHODS, add_adapter, base  # skips without peft

    adapters = {}

    def save(method="yarn", family="llama", first="patch", **options):
        key = repr((method, family, first, options))
        if key not in adapters:
            model = base(bases, family)
            options = {**METHODS[method], **options}
            if first == "patch":
                rope_patch.patch(model, method, **options)
                model = add_adapter(model)
            else:
                model = add_adapter(model)
                rope_patch.patch(model, method, **options)
            folder = tmp_path_factory.mktemp("adapter")
            rope_patch.save(model, folder)
            adapters[key] = folder, [logits(model, length) for length in (SHORT, LONG)]
        return adapters[key]

    return save


@pytest.fixture
def without_sidecar(bases, tmp_path):
    """Return the folder of an adapter without a sidecar, and its logits."""
    from helpers.lora_adapters import add_adapter, base

    model = add_adapter(base(bases))
    model.save_pretrained(tmp_path / "without_sidecar")
    return tmp_path / "without_sidecar", logits(model)
