"""Questions to the language model, and references for its answers."""

from pathlib import Path

import torch
from lm_eval.api.instance import Instance

from rope_patch.evaluation.language_model import LongContextLM

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
CONTEXT = "It is a truth universally acknowledged, that a single man in possession of a fortune"
LONG = f"{CONTEXT} {CONTEXT} {CONTEXT}, and so on"  # one rotation serves it and its answer
TARGET = "1234567"
SETTINGS = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 24, "until": ["\n"]}
METHODS = {
    "none": {},
    "yarn": {"method": "yarn", "factor": 4},
    "dynamic-yarn": {"method": "dynamic-yarn"},
    "mixed-yarn": {"method": "mixed-yarn", "factor": 4},
    "nope": {"method": "nope", "temperature": 1.2},
}


def lm_for(model, tokenizer, max_length=1024, **options):
    return LongContextLM(model, tokenizer, max_length, {"weights": "w"}, **options)


def instances(kind, arguments, docs=None):
    docs = docs or [{"id": f"s/{i}"} for i in range(len(arguments))]
    return [
        Instance(request_type=kind, doc=doc, arguments=given, idx=0, metadata=("task", i, 1))
        for i, (given, doc) in enumerate(zip(arguments, docs, strict=True))
    ]


def ask(lm, kind, arguments, docs=None):
    return getattr(lm, kind)(instances(kind, arguments, docs), disable_tqdm=True)


def sample(target=TARGET, answers=(TARGET,), number=0):
    """A sample of ours."""
    return {"id": f"s/{number}", "target": target, "target_tokens": 3, "answers": list(answers)}


@torch.no_grad()
def greedy(model, ids, room):
    """transformers' own generation, with a cache."""
    given = {"max_new_tokens": room, "do_sample": False, "eos_token_id": None}
    return model.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist()


@torch.no_grad()
def direct(model, ids, target):
    """The target's log-likelihood from one pass, and whether greedy decoding would write it."""
    logits = model(torch.tensor([[*ids, *target[:-1]]]), use_cache=False).logits[0]
    part = logits[len(ids) - 1 :].log_softmax(-1)
    total = sum(part[i, token].item() for i, token in enumerate(target))
    return total, part.argmax(-1).tolist() == target


def encoded(tokenizer, context, continuation):
    ids = tokenizer(context).input_ids
    return ids, tokenizer(context + continuation).input_ids[len(ids) :]
