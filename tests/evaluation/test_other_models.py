"""Test evaluations of quantised weights, of chat models, and of decoders that do not rotate."""

import copy
import json
import shlex
import shutil

import pytest
import torch
from helpers.encoding_models import encoding_model, token_logits
from helpers.evaluations import TINY, answer_lines, measured_numbers, request
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation import RowsGuard, add_other_weights, engine_commands, evaluate
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.tasks import chat_template

pytestmark = pytest.mark.usefixtures("never_drawn")

# -- quantised weights -----------------------------------------------------------------------------


def run_small(folder, **changes):
    fields = {"tasks": ("rp_json_kv_ll", "perplexity"), "lengths": (336,), "depths": (50,)}
    return evaluate(request(folder, **{**fields, "per_text": 1, **changes}))


def test_quantised_weights_have_their_own_answers(tmp_path):
    pytest.importorskip("gguf")
    plain = run_small(tmp_path)
    before = answer_lines(tmp_path)
    quantised = run_small(tmp_path, quantization="q4_0")
    assert plain["run"]["quantization"] is None
    assert quantised["run"]["quantization"] == "Q4_0"
    assert quantised["run"]["name"] == "tiny-llama, Q4_0"
    assert plain["run"]["weights"] != quantised["run"]["weights"]
    assert measured_numbers(plain) != measured_numbers(quantised)
    # No answer was taken over, and the same command finds all of its own.
    after = answer_lines(tmp_path)
    assert len(after) == 2 * len(before)
    again = run_small(tmp_path, quantization="Q4_0")
    assert answer_lines(tmp_path) == after
    assert measured_numbers(again) == measured_numbers(quantised)
    assert again["run"]["continued"]
    page = (tmp_path / "report.md").read_text()
    assert "Weights quantised to" in page
    assert "# tiny-llama, Q4\\_0" in page


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_bitsandbytes(tmp_path, name):
    pytest.importorskip("bitsandbytes")
    plain = run_small(tmp_path, tasks=("perplexity",))
    quantised = run_small(tmp_path, tasks=("perplexity",), quantization=name)
    assert quantised["run"]["quantization"] == name
    assert quantised["run"]["weights"] != plain["run"]["weights"]
    assert quantised["run"]["not_run"] == []
    assert measured_numbers(quantised) != measured_numbers(plain)


def test_quantisations_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="'int3'"):
        run_small(tmp_path, quantization="int3")
    with pytest.raises(ValueError, match="vllm quantises by itself"):
        engine_commands("vllm", request(tmp_path, quantization="Q4_0"))


# -- chat models -----------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}({{ m.role }}) {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant) {% endif %}"
)
LENGTH = 320


@pytest.fixture(scope="module")
def make_instruct(tmp_path_factory):
    """Return a function that writes the tiny model with a chat template."""

    def write(template=TEMPLATE):
        folder = tmp_path_factory.mktemp("instruct") / "tiny-instruct"
        shutil.copytree(TINY, folder)
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture(scope="module")
def instruct_folder(make_instruct):
    return make_instruct()


def recall_request(folder, model, **changes):
    asked = {"methods": ("none",), "factor": None, "lengths": (LENGTH,), "model": model}
    return request(folder, tasks=("rp_recall_ll", "perplexity"), **asked, **changes)


@pytest.fixture(scope="module")
def chat_run(instruct_folder, tmp_path_factory):
    return evaluate(recall_request(tmp_path_factory.mktemp("chat"), instruct_folder))


def test_questions_stand_in_the_template_and_nothing_else_does(chat_run, instruct_folder, tmp_path):
    plain = evaluate(recall_request(tmp_path, instruct_folder, chat_template="off"))
    tokenizer = AutoTokenizer.from_pretrained(instruct_folder)
    model = AutoModelForCausalLM.from_pretrained(instruct_folder)
    assert chat_run["run"]["chat_template"] == chat_template.fingerprint(tokenizer)
    assert plain["run"]["chat_template"] is None
    assert chat_run["perplexity"] == plain["perplexity"]
    (task,) = lm_eval_tasks.build(
        "rp_recall_ll", tokenizer, [LENGTH], 2, [20, 80], seed=42, per_text=2, chat=True
    )
    rows = chat_run["retrieval"][0]["samples"]["none"]
    for doc, row in zip(task.dataset["test"], rows, strict=True):
        assert row["id"] == doc["id"]
        text = f"(user) {doc['input']}\n(assistant) {doc['gen_prefix']}"
        prompt = tokenizer(text).input_ids
        both = tokenizer(f"{text} {doc['target']}").input_ids
        assert len(prompt) < LENGTH
        with torch.no_grad():
            scores = model(torch.tensor([both])).logits[0].log_softmax(-1)
        total = sum(scores[i - 1, both[i]].item() for i in range(len(prompt), len(both)))
        assert row["log_likelihood"] == pytest.approx(total, abs=1e-3)
    plain_rows = plain["retrieval"][0]["samples"]["none"]
    assert [row["log_likelihood"] for row in rows] != [row["log_likelihood"] for row in plain_rows]


def test_a_model_without_a_template_is_asked_in_plain_text_or_refused(tmp_path, caplog):
    caplog.set_level("INFO", "rope_patch")
    result = evaluate(recall_request(tmp_path, TINY))
    assert result["run"]["chat_template"] is None
    assert "chat template" not in caplog.text
    with pytest.raises(ValueError, match="--chat-template off"):
        evaluate(recall_request(tmp_path, TINY, chat_template="on"))


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
def test_commands_for_vllm_apply_the_template(instruct_folder, tmp_path, choice):
    asked = recall_request(tmp_path, instruct_folder, chat_template=choice)
    (line,) = (line for line in engine_commands("vllm", asked) if not line.startswith("#"))
    words = shlex.split(line)
    assert ("--apply_chat_template" in words) == (choice != "off")
    metadata = json.loads(words[words.index("--metadata") + 1])
    assert metadata["chat"] == (choice != "off")


def test_questions_of_other_prompts_are_not_paired(chat_run):
    run, other = copy.deepcopy(chat_run), copy.deepcopy(chat_run)
    rows = run["retrieval"][0]["samples"]["none"]
    assert len({row["prompt"] for row in rows}) == len(rows)
    labels = {"none": "trained"}
    both = add_other_weights(run, other, labels)
    assert set(both["retrieval"][0]["samples"]) == {"none", "trained"}
    other["retrieval"][0]["samples"]["none"][0]["prompt"] = "0" * 64
    with pytest.raises(ValueError, match="differ in prompts"):
        add_other_weights(run, other, labels)
    for results in (run, other):
        for row in results["retrieval"][0]["samples"]["none"]:
            del row["prompt"]  # as an older version left it out
    with pytest.raises(ValueError, match="older version"):
        add_other_weights(run, other, labels)
    for results in (run, other):
        results["run"]["chat_template"] = None
    assert add_other_weights(run, other, labels)


def test_a_finished_run_is_not_measured_again_on_another_day(make_instruct, tmp_path):
    # A clock of microseconds: each rendering would be another prompt.
    folder = make_instruct("{{ strftime_now('%f') }}" + TEMPLATE)
    runs = [evaluate(recall_request(tmp_path, folder)) for _ in range(2)]
    assert [run["run"]["continued"] for run in runs] == [False, True]
    assert runs[0]["retrieval"] == runs[1]["retrieval"]


# -- decoders that do not rotate -------------------------------------------------------------------


def evaluate_encoding(tmp_path, family, methods, trained_length=None, **fields):
    """Evaluate a tiny model of another encoding; return the results."""
    encoding_model(family, vocab_size=512, **fields).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "model")
    options = {"lengths": (128, 256), "samples": 1, "documents": 1, "factor": 2}
    options |= {} if trained_length is None else {"trained_length": trained_length}
    tasks = ("perplexity", "rp_recall_ll")
    done = rope_patch.evaluate(
        tmp_path / "model", methods, out=tmp_path / "out", tasks=tasks, **options
    )
    return done.results


def test_gpt2_is_measured_plain_and_extended(tmp_path, caplog):
    caplog.set_level("INFO", "rope_patch")
    methods = ("none", "linear", "tile")
    results = evaluate_encoding(tmp_path, "GPT2LMHeadModel", methods, n_positions=128)
    # The timed pass is one that the plain model can read.
    assert "plan: takes about" in caplog.text
    assert [m["label"] for m in results["methods"]] == ["none", "linear ×2", "tile ×2"]
    assert results["run"]["trained_length"] == 128
    assert results["run"]["geometry"] == {}
    assert set(results["perplexity"]["losses"]) == {"linear ×2", "tile ×2"}
    assert "128 positions" in str(results["run"]["not_run"])
    (retrieval,) = results["retrieval"]
    failed = {
        label: [row["score"] is None for row in rows]
        for label, rows in retrieval["samples"].items()
    }
    assert failed == {"none": [False, True], "linear ×2": [False, False], "tile ×2": [False, False]}


@pytest.mark.parametrize(
    ("family", "method", "trained_length", "fact"),
    [
        ("BloomForCausalLM", "dynamic-ntk", 40, "ntk with a factor"),
        ("BloomForCausalLM", "yarn", 40, "linear, ntk"),
        ("BloomForCausalLM", "ntk", None, "trained_length=2048"),
        ("BertForMaskedLM", "linear", 40, "a decoder"),
        ("BartForConditionalGeneration", "linear", 40, "a decoder"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, family, method, trained_length, fact):
    with pytest.raises(rope_patch.Refused, match=fact):
        evaluate_encoding(tmp_path, family, (method,), trained_length)


@torch.no_grad()
def test_the_guard_follows_a_patch():
    model = encoding_model("OPTForCausalLM")
    expected = token_logits(model, 40)
    RowsGuard.install(model)
    assert torch.equal(token_logits(model, 40), expected)
    with pytest.raises(rope_patch.Refused, match="40 positions apart"):
        token_logits(model, 41)
    with rope_patch.patch(model, "linear", factor=2):
        assert token_logits(model, 80).isfinite().all()
    with pytest.raises(rope_patch.Refused, match="40 positions apart"):
        token_logits(model, 80)
