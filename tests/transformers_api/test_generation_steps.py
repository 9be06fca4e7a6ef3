"""Test that a release whose generate works in another way is refused, not followed wrongly."""

import pytest
import transformers
from helpers.tiny_models import FACTOR, make_model
from transformers import GenerationMixin

import rope_patch
from rope_patch.transformers_api import generation
from rope_patch.transformers_api.generation import served_folder

RELEASE = f"transformers {transformers.__version__}"


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (generation.CANDIDATE_GENERATOR, {}),
        (generation.PREPARE_CACHE, {"growth": "admission"}),
        (generation.PREPARE_LENGTH, {"growth": "admission"}),
    ],
)
def test_a_missing_step_is_refused(monkeypatch, step, options):
    monkeypatch.delattr(GenerationMixin, step)
    model = make_model()
    with pytest.raises(ValueError, match=f"has no step {step} in {RELEASE}"):
        rope_patch.patch(model, "dynamic-yarn", factor=FACTOR, **options)
    assert rope_patch.current(model) is None
    rope_patch.patch(model, "yarn", factor=FACTOR)  # needs none of them


@pytest.mark.parametrize("step", [generation.PREPARE_INPUTS, generation.UPDATE_ARGUMENTS])
def test_steps_that_only_save_time_may_be_missing(monkeypatch, step):
    monkeypatch.delattr(GenerationMixin, step)
    rope_patch.patch(make_model(), "dynamic-yarn", factor=FACTOR)


def test_another_start_of_continuous_batching_is_refused(monkeypatch):
    owner = next(c for c in GenerationMixin.__mro__ if generation.START_BATCHING in vars(c))
    monkeypatch.delattr(owner, generation.START_BATCHING)
    model = make_model()
    with pytest.raises(ValueError, match=f"does not know in {RELEASE}"):
        rope_patch.patch(model, "yarn", factor=FACTOR)
    assert rope_patch.current(model) is None


@pytest.mark.parametrize("name", ["folder", "fold@er"])
def test_folders_are_known_with_and_without_a_revision(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    assert served_folder(str(folder)) == folder
    assert served_folder(f"{folder}@main") == folder
    assert str(served_folder("org/model@main")) == "org/model"
