"""Failures of single samples, and memory that runs out."""

import pytest
import torch
from language_models import CONTEXT, SETTINGS, ask, lm_for

from rope_patch.evaluation import language_model
from rope_patch.inference import prefix_reader
from rope_patch.inference.answers import AnswerStore

pytestmark = pytest.mark.usefixtures("small_chunks")


def failing(model, when, error):
    """The model raises an error for some inputs; returns the sizes of all that it got."""
    sizes = []

    def look(_, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        sizes.append(ids.numel())
        if when(ids):
            raise error

    model.register_forward_pre_hook(look, with_kwargs=True)
    return sizes


@pytest.mark.parametrize("short", [0, 512])
@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
@pytest.mark.parametrize(
    "error", [RuntimeError("boom\nand more"), torch.OutOfMemoryError("no memory")]
)
def test_one_samples_failure_leaves_the_others_alone(
    llama, tokenizer, monkeypatch, tmp_path, kind, error, short
):
    monkeypatch.setattr(language_model, "BATCHABLE_TOKENS", short)
    what = SETTINGS if kind == "generate_until" else " of"
    arguments = [(f"{CONTEXT} {end}", what) for end in ("one", "two", "\u00a3 three", "four")]
    expected = ask(lm_for(llama, tokenizer), kind, arguments)
    bad = tokenizer("\u00a3", add_special_tokens=False).input_ids[-1]
    assert all(
        (bad in tokenizer(context).input_ids) == (i == 2)
        for i, (context, _) in enumerate(arguments)
    )
    failing(llama, lambda ids: bool((ids == bad).any()), error)
    lm = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    got = ask(lm, kind, arguments)
    assert lm.failures == {("task", 2): f"{type(error).__name__}: {' '.join(str(error).split())}"}
    for i in (0, 1, 3):
        if kind == "generate_until":
            assert str(got[i]) == str(expected[i])
        else:
            assert got[i] == (pytest.approx(expected[i][0], abs=1e-4), expected[i][1])
    if kind == "generate_until":
        assert got[2].error == lm.failures["task", 2]
    llama._forward_pre_hooks.clear()  # the next run tries it again, and it alone
    again = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    sizes = failing(llama, lambda ids: False, None)
    last = ask(again, kind, arguments)
    assert not again.failures
    assert last[2] == expected[2]
    assert sizes
    if short == 0 or kind == "generate_until":
        assert again.prompt_tokens == len(tokenizer(arguments[2][0]).input_ids)
    lines = (tmp_path / "answers-0.jsonl").read_text().splitlines()
    assert len(lines) == 5  # the failure, and four answers


def test_a_failure_does_not_change_the_answers_after_it(trained, tokenizer, monkeypatch):
    """To the bit: chunks stay as they are."""
    monkeypatch.setattr(language_model, "BATCHABLE_TOKENS", 0)
    arguments = [(f"{i} {CONTEXT} {CONTEXT}", " of") for i in range(4)]
    expected = ask(lm_for(trained, tokenizer), "loglikelihood", arguments)
    first = tokenizer(arguments[1][0]).input_ids
    hook = trained.register_forward_pre_hook(
        lambda _, args: (
            (_ for _ in ()).throw(RuntimeError("boom"))
            if args and args[0][0, :4].tolist() == first[:4]
            else None
        )
    )
    lm = lm_for(trained, tokenizer)
    got = ask(lm, "loglikelihood", arguments)
    hook.remove()
    assert lm.failures.keys() == {("task", 1)}
    assert [got[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_where_memory_runs_out_less_is_read_at_once(llama, tokenizer, monkeypatch):
    monkeypatch.setattr(language_model, "BATCHABLE_TOKENS", 0)
    monkeypatch.setattr(prefix_reader, "_CPU_CHUNK", 256)
    arguments = [(" ".join([CONTEXT] * 6), " of"), (" ".join([CONTEXT] * 7), SETTINGS)]
    expected = [
        ask(lm_for(llama, tokenizer), kind, [given])[0]
        for kind, given in zip(("loglikelihood", "generate_until"), arguments, strict=True)
    ]
    sizes = failing(llama, lambda ids: ids.numel() > 100, torch.OutOfMemoryError("no memory"))
    lm = lm_for(llama, tokenizer)
    ((got, is_greedy),) = ask(lm, "loglikelihood", [arguments[0]])
    (text,) = ask(lm, "generate_until", [arguments[1]])
    assert not lm.failures
    assert got == pytest.approx(expected[0][0], abs=1e-4)
    assert is_greedy == expected[0][1]
    assert str(text) == str(expected[1])
    assert {256, 128, 64} <= set(sizes)


def test_where_memory_runs_out_batches_get_smaller(llama, tokenizer):
    arguments = [(" ".join(CONTEXT.split()[: 8 + i]), " of") for i in range(8)]
    expected = ask(lm_for(llama, tokenizer), "loglikelihood", arguments)
    sizes = failing(llama, lambda ids: ids.numel() > 120, torch.OutOfMemoryError("no memory"))
    lm = lm_for(llama, tokenizer)
    got = ask(lm, "loglikelihood", arguments)
    assert not lm.failures
    assert [a for a, _ in got] == pytest.approx([a for a, _ in expected], abs=1e-4)
    assert max(sizes) > 120


def test_stopping_by_hand_is_no_failure(llama, tokenizer, tmp_path):
    arguments = [(f"{CONTEXT} {i}", SETTINGS) for i in range(3)]
    seen = []

    def stop(*_):
        seen.append(1)
        if len(seen) > 30:
            raise KeyboardInterrupt

    hook = llama.register_forward_pre_hook(stop)
    lm = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        ask(lm, "generate_until", arguments)
    hook.remove()
    assert "error" not in (tmp_path / "answers-0.jsonl").read_text()
