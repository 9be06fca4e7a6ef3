"""Test questions in a chat template: the text that lm-eval makes, and its tokens."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.built_tasks import build_rows
from helpers.tokenizers import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.evaluation import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.tasks import chat_template

# ChatML, as SmolLM2's and Qwen's; a template with the tokenizer's first token, as Llama's; and one
# that prints the date unless it is given, as Llama 3's.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "first token": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "[end]{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}",
    "date": "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
    "{% endif %}{{ date_string }} {% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}",
    # Without a way to give it the date, as SmolLM3's, gpt-oss' and Mistral Small's.
    "clock": "{{ strftime_now('%d %B %Y') }} {% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}",
}
TASKS = ("rp_niah_multikey_1", "rp_niah_multikey_1_ll", "rp_niah_multikey_1_mc", "rp_vt", "rp_qa_1")


def tokenizer_with(template):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(params=TEMPLATES)
def chat_tokenizer(request):
    tokenizer = tokenizer_with(TEMPLATES[request.param])
    tokenizer.bos_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY).eval()


@pytest.mark.parametrize(
    ("chat_tokenizer", "name"),
    [*(("chatml", name) for name in TASKS), *((each, "rp_vt") for each in [*TEMPLATES][1:])],
    indirect=["chat_tokenizer"],
)
def test_a_sample_has_the_tokens_of_the_prompt_that_lm_eval_makes(model, chat_tokenizer, name):
    (task,) = lm_eval_tasks.build(name, chat_tokenizer, [2048], 2, [10, 90], chat=True)
    lm = LongContextLM(model, chat_tokenizer, 2048, {})
    task.build_all_requests(
        rank=0, world_size=1, apply_chat_template=True, chat_template=lm.apply_chat_template
    )
    room = 30 if name == "rp_vt" else 32 if name == "rp_qa_1" else 128
    # Choices are scored once more without a prompt, to take off how likely each is by itself.
    prompts = [(i.args[0], i.doc) for i in task.instances if i.args[0]]
    assert len(prompts) == len(task.instances) // (2 if name.endswith("_mc") else 1) > 0
    for prompt, doc in prompts:
        assert prompt.endswith(doc["gen_prefix"])
        assert doc["input"] in prompt
        assert len(lm.tok_encode(prompt)) + room == doc["tokens"] <= 2048


@pytest.mark.parametrize("chat_tokenizer", ["chatml", "first token"], indirect=True)
def test_lm_eval_answers_questions_in_the_template(model, chat_tokenizer):
    built = lm_eval_tasks.build("rp_recall_ll", chat_tokenizer, [256], 1, [50], chat=True)
    lm = LongContextLM(model, chat_tokenizer, 256, {})
    prompts = []
    encode = lm.tok_encode
    lm.tok_encode = lambda text, **options: prompts.append(text) or encode(text, **options)
    results = lm_eval_tasks.evaluate(lm, built, chat=True)
    row = built[0].dataset["test"][0]
    assert chat_template.render(chat_tokenizer, row["input"], row["gen_prefix"]) in prompts
    assert len(lm_eval_tasks.scores(results, lm.failures)) == 1
    assert not lm.failures


@pytest.mark.parametrize(("name", "date"), [("date", "26 Jul 2024"), ("clock", "26 July 2024")])
def test_the_date_in_a_prompt_does_not_change(model, name, date):
    tokenizer = tokenizer_with(TEMPLATES[name])
    text = chat_template.render(tokenizer, "Q?", "A")
    assert text == f"{date} user: Q?\nassistant: A"
    turns = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A"}]
    lm = LongContextLM(model, tokenizer, 2048, {})
    assert lm.apply_chat_template(turns, add_generation_prompt=False) == text
    assert lm.apply_chat_template(turns).startswith(date)


CONTENT = "{{ messages[0].content }}"
NESTED = CONTENT + "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            CONTENT + "{{ raise_exception('roles must\nalternate') }}",
            "TemplateError: roles must alternate",
        ),
        ("{% for m in %}", "TemplateSyntaxError"),
        ("{{ messages[9].content }}", "UndefinedError"),
        (CONTENT + "{{ 1 / 0 }}", "ZeroDivisionError"),
        (CONTENT + "{{ messages.append(1) }}", "SecurityError"),
        (CONTENT + "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'a' }}", "ValueError"),  # the last message is not in it
        (NESTED, "did not end within 0.5 s"),
        ({"a": "{{ 1 }}", "b": "{{ 2 }}"}, "ValueError"),  # neither is the default
    ],
)
def test_any_error_of_a_template_is_one_line_with_the_way_out(template, problem, monkeypatch):
    monkeypatch.setattr(chat_template, "_SECONDS", 0.5)
    tokenizer = tokenizer_with(template)
    with pytest.raises(ValueError, match=r"by --chat-template off") as error:
        lm_eval_tasks.build("rp_vt", tokenizer, [512], 1, [50], chat=True)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_may_be_rendered_in_a_thread_that_is_not_the_main_one(monkeypatch):
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    tokenizer = tokenizer_with(NESTED)
    with ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(chat_template.render, tokenizer, "Q?", "A").exception()
        assert "did not end within 0.2 s" in str(refusal)
        assert pool.submit(sum, range(100_000)).result() == 4999950000


def test_auto_follows_the_tokenizer(chat_tokenizer):
    plain, resolve = tokenizer_with(None), chat_template.resolve
    choices = ("auto", "on", "off")
    assert [resolve(choice, chat_tokenizer) for choice in choices] == [True, True, False]
    assert [resolve(choice, plain) for choice in ("auto", "off")] == [False, False]
    with pytest.raises(ValueError, match="--chat-template off"):
        resolve("on", plain)
    with pytest.raises(ValueError, match=r"'yes'.* auto, on"):
        resolve("yes", plain)
    with pytest.raises(ValueError, match="tokenizer has none"):
        build_rows("rp_vt", length=512, chat=True)


def test_templates_have_their_own_fingerprints():
    prints = {chat_template.fingerprint(tokenizer_with(each)) for each in TEMPLATES.values()}
    assert len(prints) == len(TEMPLATES)
