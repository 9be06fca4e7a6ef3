"""Test that impossible searches are refused with a reason, before anything is written."""

import pytest
from helpers.search_fixtures import TRAINED, arguments, questions
from helpers.tiny_models import make_model
from transformers import AutoTokenizer

import rope_patch

pytestmark = pytest.mark.usefixtures("walk_strategy")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget must be at least 1 candidate"),
        ({"budget": 2.5}, TypeError, "budget must be a whole number"),
        ({"length": None}, ValueError, "exactly one of length and factor, got neither"),
        ({"factor": 2}, ValueError, "exactly one of length and factor, got length=512 and"),
        ({"method": "longrop"}, ValueError, "did you mean 'longrope'"),
        (
            {"method": "curve", "steps": 3},
            ValueError,
            "'curve' has no option 'steps': expected none",
        ),
        ({"method": "longrope", "steps": 3}, ValueError, "expected start_tokens"),
        ({"fitness": "needle"}, ValueError, "fitness must be one of needles, documents, both"),
        ({"held_out": None}, ValueError, "give held_out as well"),
        ({"held_out": questions(count=4)[:2]}, ValueError, "2 of the held-out samples are among"),
        ({"samples": None, "held_out": None}, ValueError, "made with the model's tokenizer"),
        ({"text": "emma"}, ValueError, "samples or a text to make them of, not both"),
        ({"samples": questions(TRAINED, 2)}, ValueError, "must be longer than the trained length"),
        ({"samples": questions(600, 2)}, ValueError, "samples of up to 600 tokens, to search for"),
        ({"short": questions(300, 2)}, ValueError, "within its trained length of 256 tokens"),
        ({"samples": []}, ValueError, "expected samples"),
        ({"picture": "found.jpg"}, ValueError, "found.jpg"),
        ({"length": TRAINED}, ValueError, "for this target: linear ×1 would change nothing"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    model, tmp_path, changes, error, message
):
    with pytest.raises(error, match=message):
        rope_patch.search(model, **arguments(folder=tmp_path / "new", **changes))
    assert not (tmp_path / "new").exists()
    assert rope_patch.current(model) is None


def test_a_text_shorter_than_the_length_is_refused(model, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("A few words. " * 9)
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    for fitness in ("needles", "documents", "both"):
        options = arguments(
            text=str(path), samples=None, held_out=None, short=None, fitness=fitness
        )
        with pytest.raises(ValueError, match=r"short\.txt' has \d+ tokens, 512 are needed"):
            rope_patch.search(model, tokenizer, folder=tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("case", ["random", "too far"])
def test_a_model_that_fails_the_sanity_check_is_refused(model, tmp_path, case):
    options = arguments(folder=tmp_path / "new")
    subject = model
    if case == "random":
        subject = make_model(vocab_size=512, max_position_embeddings=TRAINED)
    else:  # the trained length is 256 tokens, not 2,048
        options |= {"trained_length": 2048, "length": 2500, "short": questions(2048, 4, seed=3)}
        options |= {"samples": questions(2500, 2), "held_out": questions(2500, 2, seed=2)}
    with pytest.raises(ValueError, match=r"cannot find needles at its own trained .* [\d.]+ nats"):
        rope_patch.search(subject, **options)
    assert not (tmp_path / "new").exists()


def test_a_model_that_cannot_predict_documents_is_refused(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    options = arguments(samples=None, held_out=None, short=None, fitness="documents", count=1)
    with pytest.raises(ValueError, match="cannot predict documents at its own trained length"):
        rope_patch.search(model, tokenizer, text="persuasion", folder=tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_patched_model_is_refused(model, tmp_path):
    with (
        rope_patch.patch(model, "yarn", factor=2),
        pytest.raises(ValueError, match=r"patched already .*unpatch\(model\)"),
    ):
        rope_patch.search(model, **arguments(folder=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_folder_with_a_model_is_refused(model, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="holds a model"):
        rope_patch.search(model, **arguments(folder=tmp_path))
