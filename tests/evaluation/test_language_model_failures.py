"""Test the language model's failures: of single samples, of memory, and interrupts."""

import pytest
import torch
from language_models import CONTEXT, SETTINGS, ask, lm_for

from rope_patch.inference import AnswerStore

pytestmark = pytest.mark.usefixtures("small_chunks")


def fail_on_input(model, should_fail, error):
    """Make the model raise an error for some inputs; return a list of all input sizes."""
    sizes = []

    def check_input(_, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        sizes.append(ids.numel())
        if should_fail(ids):
            raise error

    model.register_forward_pre_hook(check_input, with_kwargs=True)
    return sizes


@pytest.mark.parametrize(
    ("request_type", "short", "error"),
    [
        *(
            (request_type, short, RuntimeError("boom\nand more"))
            for request_type in ("generate_until", "loglikelihood")
            for short in (0, 512)
        ),
        ("generate_until", 512, torch.OutOfMemoryError("no memory")),
        ("loglikelihood", 0, torch.OutOfMemoryError("no memory")),
    ],
)
def test_a_failed_sample_leaves_the_others_unchanged(
    llama, tokenizer, batch_up_to, tmp_path, request_type, error, short
):
    batch_up_to(short)
    continuation = SETTINGS if request_type == "generate_until" else " of"
    arguments = [
        (f"{CONTEXT} {end}", continuation) for end in ("one", "two", "\u00a3 three", "four")
    ]
    expected = ask(lm_for(llama, tokenizer), request_type, arguments)
    failing_token = tokenizer("\u00a3", add_special_tokens=False).input_ids[-1]
    assert all(
        (failing_token in tokenizer(context).input_ids) == (i == 2)
        for i, (context, _) in enumerate(arguments)
    )
    fail_on_input(llama, lambda ids: bool((ids == failing_token).any()), error)
    lm = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    got = ask(lm, request_type, arguments)
    assert lm.failures == {("task", 2): f"{type(error).__name__}: {' '.join(str(error).split())}"}
    for i in (0, 1, 3):
        if request_type == "generate_until":
            assert str(got[i]) == str(expected[i])
        else:
            assert got[i] == (pytest.approx(expected[i][0], abs=1e-4), expected[i][1])
    if request_type == "generate_until":
        assert got[2].error == lm.failures["task", 2]
    llama._forward_pre_hooks.clear()  # the next run retries the failed sample alone
    retry = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    sizes = fail_on_input(llama, lambda ids: False, None)
    retried_answers = ask(retry, request_type, arguments)
    assert not retry.failures
    assert retried_answers[2] == expected[2]
    assert sizes
    if short == 0 or request_type == "generate_until":
        assert retry.prompt_tokens == len(tokenizer(arguments[2][0]).input_ids)
    lines = (tmp_path / "answers-0.jsonl").read_text().splitlines()
    assert len(lines) == 5  # the failure, and four answers


def test_a_failure_does_not_change_the_answers_after_it(trained_llama, tokenizer, batch_up_to):
    """Bit for bit, since the chunks stay the same."""
    batch_up_to(0)
    arguments = [(f"{i} {CONTEXT} {CONTEXT}", " of") for i in range(4)]
    expected = ask(lm_for(trained_llama, tokenizer), "loglikelihood", arguments)
    first = tokenizer(arguments[1][0]).input_ids
    hook = trained_llama.register_forward_pre_hook(
        lambda _, args: (
            (_ for _ in ()).throw(RuntimeError("boom"))
            if args and args[0][0, :4].tolist() == first[:4]
            else None
        )
    )
    lm = lm_for(trained_llama, tokenizer)
    got = ask(lm, "loglikelihood", arguments)
    hook.remove()
    assert lm.failures.keys() == {("task", 1)}
    assert [got[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_out_of_memory_makes_chunks_smaller(llama, tokenizer, batch_up_to, monkeypatch):
    batch_up_to(0)
    monkeypatch.setattr("rope_patch.inference.prefix_reader._CHUNK", 256)
    arguments = [(" ".join([CONTEXT] * 6), " of"), (" ".join([CONTEXT] * 7), SETTINGS)]
    expected = [
        ask(lm_for(llama, tokenizer), request_type, [request_arguments])[0]
        for request_type, request_arguments in zip(
            ("loglikelihood", "generate_until"), arguments, strict=True
        )
    ]
    sizes = fail_on_input(llama, lambda ids: ids.numel() > 100, torch.OutOfMemoryError("no memory"))
    lm = lm_for(llama, tokenizer)
    ((got, is_greedy),) = ask(lm, "loglikelihood", [arguments[0]])
    (text,) = ask(lm, "generate_until", [arguments[1]])
    assert not lm.failures
    assert got == pytest.approx(expected[0][0], abs=1e-4)
    assert is_greedy == expected[0][1]
    assert str(text) == str(expected[1])
    assert {256, 128, 64} <= set(sizes)


def test_out_of_memory_makes_batches_smaller(llama, tokenizer):
    arguments = [(" ".join(CONTEXT.split()[: 8 + i]), " of") for i in range(8)]
    expected = ask(lm_for(llama, tokenizer), "loglikelihood", arguments)
    sizes = fail_on_input(llama, lambda ids: ids.numel() > 120, torch.OutOfMemoryError("no memory"))
    lm = lm_for(llama, tokenizer)
    got = ask(lm, "loglikelihood", arguments)
    assert not lm.failures
    assert [a for a, _ in got] == pytest.approx([a for a, _ in expected], abs=1e-4)
    assert max(sizes) > 120


def test_an_interrupt_is_not_stored_as_a_failure(llama, tokenizer, tmp_path):
    arguments = [(f"{i} {CONTEXT}", SETTINGS) for i in range(3)]
    calls = []

    def stop(*_):
        calls.append(1)
        if len(calls) > 30:
            raise KeyboardInterrupt

    hook = llama.register_forward_pre_hook(stop)
    lm = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        ask(lm, "generate_until", arguments)
    hook.remove()
    assert "error" not in (tmp_path / "answers-0.jsonl").read_text()


@pytest.mark.parametrize("request_type", ["generate_until", "loglikelihood"])
def test_out_of_memory_makes_fewer_questions_go_together(
    llama, tokenizer, batch_up_to, request_type
):
    batch_up_to(0)
    ends = ("one", "two", "three", "four")  # of 2, 3, 3 and 2 tokens
    arguments = [(f"{i} {CONTEXT} {end}", SETTINGS) for i in range(2) for end in ends]
    if request_type == "loglikelihood":
        arguments = [(f"{i} and {CONTEXT}", f" {end}") for i in range(2) for end in ends]
    expected = ask(lm_for(llama, tokenizer), request_type, arguments)
    shapes = []

    def is_too_large(ids):
        shapes.append(tuple(ids.shape))
        return ids.shape[0] > 2 or ids.shape[1] == 10

    fail_on_input(llama, is_too_large, torch.OutOfMemoryError("no memory"))
    lm = lm_for(llama, tokenizer)
    got = ask(lm, request_type, arguments)
    assert not lm.failures
    if request_type == "generate_until":
        assert [str(text) for text in got] == [str(text) for text in expected]
        assert [rows for rows, _ in shapes].count(4) == 1  # the second text has batches of two
        assert (2, 1) in shapes
    else:
        assert [x for x, _ in got] == pytest.approx([x for x, _ in expected], abs=1e-4)
        assert shapes.count((1, 10)) == 1
        assert shapes.count((1, 5)) == 4
