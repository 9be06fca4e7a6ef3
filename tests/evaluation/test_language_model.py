"""Test the language model for lm-eval against transformers and lm-eval's HFLM."""

from types import SimpleNamespace

import pytest
from helpers.tiny_models import make_model
from language_models import (
    CONTEXT,
    LONG,
    METHODS,
    SETTINGS,
    TARGET,
    ask,
    encode_pair,
    generate_greedily,
    lm_for,
    record_inputs,
    sample,
    score_in_one_pass,
)
from lm_eval.models.huggingface import HFLM

import rope_patch
from rope_patch import tasks
from rope_patch.inference import AnswerStore

pytestmark = pytest.mark.usefixtures("small_chunks")
UNSTOPPED = SETTINGS | {"until": []}


def first_line(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True).split("\n")[0]


def answers_of(responses):
    return [(str(response), response.target_log_likelihood) for response in responses]


# -- generation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [1, 3])  # within the trained length, and beyond
def test_generation_equals_that_of_transformers(model, tokenizer, repeats):
    contexts = [" ".join([CONTEXT] * repeats), " ".join([CONTEXT] * repeats) + " has"]
    got = ask(lm_for(model, tokenizer), "generate_until", [(c, SETTINGS) for c in contexts])
    for context, text in zip(contexts, got, strict=True):
        ids = tokenizer(context).input_ids
        expected_ids = generate_greedily(model, ids, SETTINGS["max_gen_toks"])
        assert str(text) == first_line(tokenizer, expected_ids)
        assert (text.error, text.target_log_likelihood) == (None, None)


def test_a_prompt_one_token_past_the_trained_length_is_rotated_for_its_length(
    trained_llama, tokenizer
):
    """The cache holds all tokens but the last one: exactly the trained length."""
    context = " ".join((CONTEXT.split() * 30)[:160])
    ids = tokenizer(context).input_ids
    with rope_patch.patch(trained_llama, "dynamic-yarn", trained_length=len(ids) - 1):
        (got,) = ask(lm_for(trained_llama, tokenizer), "generate_until", [(context, SETTINGS)])
        expected_ids = generate_greedily(trained_llama, ids, SETTINGS["max_gen_toks"])
    assert str(got) == first_line(tokenizer, expected_ids)


def test_generation_ends_at_the_end_of_sequence(llama, tokenizer):
    greedy_ids = generate_greedily(llama, tokenizer(CONTEXT).input_ids, 24)
    eos_token = next(t for i, t in enumerate(greedy_ids) if i > 3 and t not in greedy_ids[:i])
    expected = tokenizer.decode(greedy_ids[: greedy_ids.index(eos_token)], skip_special_tokens=True)
    for eos_token_id in (eos_token, [511, eos_token]):
        llama.generation_config.eos_token_id = eos_token_id
        (got,) = ask(lm_for(llama, tokenizer), "generate_until", [(CONTEXT, UNSTOPPED)])
        assert str(got) == expected


def test_generation_ends_before_the_first_stop(llama, tokenizer):
    (full_text,) = ask(lm_for(llama, tokenizer), "generate_until", [(CONTEXT, UNSTOPPED)])
    stop = full_text[5:8]
    for until in (stop, ["\u2603", stop]):
        settings = SETTINGS | {"until": until}
        (got,) = ask(lm_for(llama, tokenizer), "generate_until", [(CONTEXT, settings)])
        assert str(got) == full_text.split(stop)[0]


def force_text(llama, tokenizer, text):
    """Make the model generate a text; return the hook and a list with an entry per decode step."""
    ids = tokenizer(f"x{text}").input_ids[len(tokenizer("x").input_ids) :]
    decode_steps = []

    def write(_, args, output):
        if args[0].shape[1] == 1:  # a decode step
            decode_steps.append(1)
            output.logits[:] = 0
            output.logits[0, -1, ids[min(len(decode_steps), len(ids)) - 1]] = 9
        return output

    return llama.register_forward_hook(write), decode_steps


TEXTS = [  # test_scoring.py has more, of the rules alone
    ("no number but 3, 000 and so on and on", ["3"], tasks.first_number),
    ("3. Then came the others, one by one", ["3"], tasks.first_number),
    ("1234567 and 7654321 and more", ["1234567", "7654321"], tasks.all_answers),
    ("The Answer is PEMBERLEY of course", ["Pemberley", "Rosings"], tasks.any_answer),
]


@pytest.mark.parametrize(("text", "answers", "score"), TEXTS)
def test_stopping_early_changes_no_score(llama, tokenizer, text, answers, score):
    settings, scores, steps = SETTINGS | {"max_gen_toks": 60}, [], []
    ours = sample(answers[0], answers)
    for doc in (ours, {"id": "s/0"}):
        hook, decode_steps = force_text(llama, tokenizer, text + " word" * 40)
        (got,) = ask(lm_for(llama, tokenizer), "generate_until", [(CONTEXT, settings)], [doc])
        hook.remove()
        scores.append(score(ours, [got])["score"])
        steps.append(len(decode_steps))
    assert scores[0] == scores[1] == score(ours, [text])["score"]
    assert steps[0] <= steps[1]


def test_generation_stops_early_once_the_answer_is_there(llama, tokenizer):
    _, decode_steps = force_text(llama, tokenizer, "1234567 and so on" + " word" * 60)
    settings = SETTINGS | {"max_gen_toks": 24}
    ask(lm_for(llama, tokenizer), "generate_until", [(CONTEXT, settings)], [sample()])
    assert len(decode_steps) < 16


@pytest.mark.parametrize("sampling_settings", [{"do_sample": True}, {"temperature": 0.7}])
def test_tasks_that_sample_are_refused(llama, tokenizer, sampling_settings):
    settings = {"max_gen_toks": 4, "until": [], **sampling_settings}
    with pytest.raises(ValueError, match="do_sample: false"):
        ask(lm_for(llama, tokenizer), "generate_until", [(CONTEXT, settings)])


def test_a_temperature_without_sampling_is_greedy_as_in_transformers(llama, tokenizer):
    lm = lm_for(llama, tokenizer)
    greedy = ask(lm, "generate_until", [(CONTEXT, SETTINGS)])
    assert ask(lm, "generate_until", [(CONTEXT, SETTINGS | {"temperature": 0.7})]) == greedy


def test_columns_of_other_tasks_are_ignored(llama, tokenizer):
    """Many tasks of lm-eval have a column `target`."""
    (plain,) = ask(lm_for(llama, tokenizer), "generate_until", [(CONTEXT, UNSTOPPED)], [{"q": 1}])
    for doc in ({"target": "x"}, {"target": ["x"], "answers": plain[:2]}, "a string"):
        (got,) = ask(lm_for(llama, tokenizer), "generate_until", [(CONTEXT, UNSTOPPED)], [doc])
        assert answers_of([got]) == [(plain, None)]


# -- likelihoods -----------------------------------------------------------------------------------


def test_scoring_the_target_leaves_generation_unchanged(model, tokenizer):
    ids, target = encode_pair(tokenizer, LONG, f" {TARGET}")
    lm = lm_for(model, tokenizer)
    (got,) = ask(lm, "generate_until", [(LONG, SETTINGS)], [sample()])
    expected = score_in_one_pass(model, ids, target, SETTINGS["max_gen_toks"])[0]
    assert got.target_log_likelihood == pytest.approx(expected, abs=1e-4)
    (plain,) = ask(lm_for(model, tokenizer), "generate_until", [(LONG, SETTINGS)])
    assert str(plain).startswith(str(got))  # scoring left the cache as it was


def questions():
    """Return prompts below and above 64 tokens, some with several continuations."""
    contexts = [CONTEXT, CONTEXT[:12], f"{CONTEXT} {CONTEXT}", " ".join([CONTEXT] * 5)]
    contexts += [" ".join(CONTEXT.split()[: n % 15 + 2]) for n in range(6)]
    continuations = (" of a wife", " and", " is not so very well acquainted with the neighbourhood")
    pairs = [(contexts[i], c) for i in range(4) for c in continuations]
    return pairs + [(context, " must") for context in contexts[4:]]


def check_likelihoods(model, tokenizer):
    got = ask(lm_for(model, tokenizer), "loglikelihood", questions())
    for question, (log_likelihood, is_greedy) in zip(questions(), got, strict=True):
        expected = score_in_one_pass(model, *encode_pair(tokenizer, *question))
        assert (log_likelihood, is_greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])


@pytest.mark.parametrize("short", [0, 10**6], ids=["alone", "in batches"])
def test_likelihoods_equal_those_of_one_pass(model, tokenizer, batch_up_to, short):
    batch_up_to(short)
    check_likelihoods(model, tokenizer)


@pytest.mark.parametrize("short", [0, 10**6], ids=["alone", "in batches"])
@pytest.mark.parametrize("method", ["dynamic-yarn", "mixed-yarn"])
def test_likelihoods_are_right_on_both_sides_of_the_trained_length(
    llama, tokenizer, batch_up_to, method, short
):
    """One prompt's continuations end on both sides of the trained length, in one batch."""
    batch_up_to(short)
    trained_length = len(tokenizer(CONTEXT).input_ids) + 4
    lengths = [sum(map(len, encode_pair(tokenizer, *question))) for question in questions()]
    assert min(lengths) < trained_length < max(lengths[:3])
    options = {"factor": 4} if method == "mixed-yarn" else {}
    rope_patch.patch(llama, method, trained_length=trained_length, **options)
    check_likelihoods(llama, tokenizer)


@pytest.mark.parametrize("short", [0, 512])
def test_greedy_continuations_are_recognised(llama, tokenizer, batch_up_to, short):
    batch_up_to(short)
    ids = tokenizer(CONTEXT).input_ids
    greedy_ids = generate_greedily(llama, ids, 3)
    other_ids = [*greedy_ids[:2], (greedy_ids[2] + 1) % 512]
    got = lm_for(llama, tokenizer)._loglikelihood_tokens(
        [(("", ""), ids, continuation) for continuation in (greedy_ids, other_ids)]
    )
    assert [is_greedy for _, is_greedy in got] == [True, False]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_likelihoods_equal_those_of_hflm(family, tokenizer):
    model = make_model(family, vocab_size=512)
    arguments = [(CONTEXT, f" {TARGET}"), ("", CONTEXT)]
    ours = ask(lm_for(model, tokenizer), "loglikelihood", arguments)
    expected = ask(HFLM(pretrained=model, tokenizer=tokenizer), "loglikelihood", arguments)
    assert [a for a, _ in ours] == pytest.approx([a for a, _ in expected], abs=1e-3)
    assert [b for _, b in ours] == [b for _, b in expected]


# -- questions on one text -------------------------------------------------------------------------


def questions_on_one_text():
    """Return prompts with a common beginning and ends of different lengths, and their samples."""
    ends = ("one", "two of the many", "three", "four and five and six")
    return [(f"{LONG} {end}", SETTINGS) for end in ends], [sample(number=i) for i in range(4)]


def test_shared_prefixes_are_read_once_and_change_no_answer(model, tokenizer):
    arguments = [(f"{LONG} {end}", SETTINGS) for end in ("one", "two", "three")]
    shared, unshared = lm_for(model, tokenizer), lm_for(model, tokenizer, share=False)
    docs = [sample(number=i) for i in range(3)]
    answers = [ask(lm, "generate_until", arguments, docs) for lm in (shared, unshared)]
    assert answers_of(answers[0]) == answers_of(answers[1])
    assert shared.prompt_tokens == unshared.prompt_tokens
    assert shared.computed_tokens < unshared.computed_tokens


def test_answers_to_questions_on_one_text_are_those_of_each_alone(model, tokenizer):
    """To the bit."""
    arguments, docs = questions_on_one_text()
    got = ask(lm_for(model, tokenizer), "generate_until", arguments, docs)
    for question, doc, expected in zip(arguments, docs, got, strict=True):
        alone = ask(lm_for(model, tokenizer), "generate_until", [question], [doc])
        assert answers_of(alone) == answers_of([expected])


@pytest.mark.parametrize("method", ["none", "yarn"])
def test_questions_on_one_text_are_decoded_in_one_batch(llama, tokenizer, method):
    shapes = record_inputs(llama)
    if METHODS[method]:
        rope_patch.patch(llama, **METHODS[method])
    ask(lm_for(llama, tokenizer), "generate_until", questions_on_one_text()[0])
    decode_steps = [shape for shape in shapes if shape[1] == 1 and shape[0] > 1]
    assert decode_steps[0] == (4, 1)
    assert len([shape for shape in shapes if shape[1] == 1]) <= 1 + SETTINGS["max_gen_toks"]


@pytest.mark.parametrize("method", ["dynamic-yarn", "admission", "mixed-yarn"])
def test_questions_are_answered_one_by_one_if_the_rotation_follows_the_length(
    llama, tokenizer, method, caplog
):
    shapes = record_inputs(llama)
    rope_patch.patch(llama, **METHODS[method])
    ask(lm_for(llama, tokenizer), "generate_until", questions_on_one_text()[0])
    assert {rows for rows, _ in shapes} == {1}
    assert not [line for line in caplog.messages if "one by one" in line]


def test_choices_are_scored_in_one_pass(llama, tokenizer, batch_up_to):
    batch_up_to(0)
    choices = (" of a wife", " and", " is not so very well acquainted with the neighbourhood")
    shapes, lm = record_inputs(llama), lm_for(llama, tokenizer)
    scored = ask(lm, "loglikelihood", [(CONTEXT, choice) for choice in choices])
    prompt = len(tokenizer(CONTEXT).input_ids)
    targets = sum(len(encode_pair(tokenizer, CONTEXT, choice)[1]) for choice in choices)
    assert shapes[-1] == (1, targets)
    assert sum(length for _, length in shapes[:-1]) == prompt - 1
    assert lm.prompt_tokens == prompt  # a choice is no new prompt
    for choice, (got, _) in zip(choices, scored, strict=True):
        ((alone, _),) = ask(lm_for(llama, tokenizer), "loglikelihood", [(CONTEXT, choice)])
        assert got == pytest.approx(alone, abs=1e-4)


def test_batches_fit_into_their_memory(llama, tokenizer, monkeypatch):
    arguments, _ = questions_on_one_text()
    expected = ask(lm_for(llama, tokenizer), "generate_until", arguments)
    config = llama.config
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    longest = (
        max(len(tokenizer(text).input_ids) for text, _ in arguments) + SETTINGS["max_gen_toks"]
    )
    limit = {"cpu": 2 * longest * token_bytes}
    monkeypatch.setattr("rope_patch.evaluation.answers._MAX_CACHE", limit)
    shapes = record_inputs(llama)
    assert ask(lm_for(llama, tokenizer), "generate_until", arguments) == expected
    assert max(rows for rows, _ in shapes) == 2


def test_only_needed_logits_are_computed(llama, tokenizer, batch_up_to):
    batch_up_to(0)
    shapes = []
    llama.lm_head.register_forward_hook(lambda _, __, out: shapes.append(out.shape[1]))
    lm = lm_for(llama, tokenizer)
    ask(lm, "loglikelihood", [(CONTEXT * 3, f" {TARGET}")])
    ask(lm, "generate_until", [(CONTEXT * 3, SETTINGS)], [sample()])
    assert max(shapes) < 12


# -- stored answers, refusals ----------------------------------------------------------------------


def test_what_an_earlier_run_left_changes_no_answer(llama, tokenizer, tmp_path):
    """To the bit: the same questions are computed together."""
    arguments, docs = questions_on_one_text()
    whole = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    expected = ask(whole, "generate_until", arguments, docs)
    path = tmp_path / "answers-0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))  # a kill
    second = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    assert answers_of(ask(second, "generate_until", arguments, docs)) == answers_of(expected)
    assert len(path.read_text().splitlines()) == 4


def test_stored_answers_are_not_computed_again(llama, tokenizer, tmp_path):
    arguments = [(CONTEXT, SETTINGS), (CONTEXT, SETTINGS), (CONTEXT[:40], SETTINGS)]
    pairs = questions()
    first = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    expected = ask(first, "generate_until", arguments), ask(first, "loglikelihood", pairs)
    lines = len((tmp_path / "answers-0.jsonl").read_text().splitlines())
    assert lines == 2 + len(set(pairs))
    llama.register_forward_pre_hook(lambda *_: pytest.fail("asked again"))
    second = lm_for(llama, tokenizer, answers=AnswerStore(tmp_path))
    got = ask(second, "generate_until", arguments), ask(second, "loglikelihood", pairs)
    assert got == expected


def test_stored_answers_are_keyed_by_identity(llama, tokenizer, tmp_path):
    answers, pairs = AnswerStore(tmp_path), questions()[:3]

    def ask_as(name):
        lm = lm_for(llama, tokenizer, answers=answers, identity=lambda *_: name)
        return ask(lm, "loglikelihood", pairs)

    plain = ask_as("plain")
    with rope_patch.patch(llama, "yarn", factor=4):
        assert ask_as("yarn") != plain


@pytest.mark.parametrize("short", [0, 512])
@pytest.mark.parametrize(
    ("request_type", "asked"), [("generate_until", SETTINGS), ("loglikelihood", f" {TARGET}")]
)
def test_a_prompt_that_does_not_fit_is_refused_instead_of_truncated(
    llama, tokenizer, request_type, asked, short, batch_up_to
):
    batch_up_to(short)
    arguments = [(CONTEXT[:12], asked), (CONTEXT, asked)]
    prompt_length = len(tokenizer(CONTEXT).input_ids)  # without the answer
    with pytest.raises(ValueError, match="longest"):
        ask(lm_for(llama, tokenizer, prompt_length), request_type, arguments)
    ask(lm_for(llama, tokenizer, prompt_length + SETTINGS["max_gen_toks"]), request_type, arguments)


def test_results_record_the_patch_without_contacting_the_hub(llama, tokenizer, monkeypatch):
    # Without the method that lm-eval would call.
    monkeypatch.setattr("lm_eval.models.huggingface.HfApi", SimpleNamespace)
    lm = lm_for(llama, tokenizer)
    assert lm.get_model_info()["rope_patch"] is None
    with rope_patch.patch(llama, "yarn", factor=4):
        info = lm.get_model_info()
    assert info["weights"] == "w"
    assert info["rope_patch"] == "yarn ×4, 64 → 256 tokens"
    assert info["max_position_embeddings"] == 256
    assert "yarn" in str(info["rope_parameters"])
