"""Requests to the language model, and reference answers from plain transformers."""

from pathlib import Path

import torch
from lm_eval.api.instance import Instance

import rope_patch
from rope_patch.evaluation import LongContextLM

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
CONTEXT = "It is a truth universally acknowledged, that a single man in possession of a fortune"
LONG = f"{CONTEXT} {CONTEXT} {CONTEXT}, and so on"  # its answer needs no other rotation
TARGET = "1234567"
SETTINGS = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 10, "until": ["\n"]}
METHODS = {
    "none": {},
    "yarn": {"method": "yarn", "factor": 4},
    "dynamic-yarn": {"method": "dynamic-yarn"},
    "admission": {"method": "dynamic-yarn", "growth": "admission"},
    "mixed-yarn": {"method": "mixed-yarn", "factor": 4},
    "nope": {"method": "nope", "temperature": "drope:1.2"},
    "self-extend": {"method": "self-extend", "trained_length": 24},
}


def lm_for(model, tokenizer, max_length=1024, **options):
    return LongContextLM(model, tokenizer, max_length, {"weights": "w"}, **options)


def instances(request_type, arguments, docs=None):
    docs = docs or [{"id": f"s/{i}"} for i in range(len(arguments))]
    return [
        Instance(
            request_type=request_type,
            doc=doc,
            arguments=request_arguments,
            idx=0,
            metadata=("task", i, 1),
        )
        for i, (request_arguments, doc) in enumerate(zip(arguments, docs, strict=True))
    ]


def ask(lm, request_type, arguments, docs=None):
    return getattr(lm, request_type)(instances(request_type, arguments, docs), disable_tqdm=True)


def record_inputs(model):
    """Return a list that gets the shape of each input's tokens."""
    shapes = []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    return shapes


def sample(target=TARGET, answers=(TARGET,), number=0):
    """Return the record of a sample as rope_patch's tasks write it."""
    return {"id": f"s/{number}", "target": target, "target_tokens": 3, "answers": list(answers)}


@torch.no_grad()
def generate_greedily(model, ids, count):
    """Return what transformers generates, with a cache."""
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


@torch.no_grad()
def score_in_one_pass(model, ids, target, room=0):
    """Return the target's log-likelihood in one pass, and whether greedy decoding gives it.

    A model that was admitted with an answer of `room` tokens rotates the target for that length,
    less the last token, which is never read.
    """
    handle = rope_patch.current(model)
    admitted = room > 0 and handle is not None and handle.method.fixed_at_admission
    if admitted:
        handle.fix_length(len(ids) + max(room - 1, len(target) - 1))
    logits = model(torch.tensor([[*ids, *target[:-1]]]), use_cache=False).logits[0]
    if admitted:
        handle.fix_length(None)
    log_probs = logits[len(ids) - 1 :].log_softmax(-1)
    total = sum(log_probs[i, token].item() for i, token in enumerate(target))
    return total, log_probs.argmax(-1).tolist() == target


def encode_pair(tokenizer, context, continuation):
    ids = tokenizer(context).input_ids
    return ids, tokenizer(context + continuation).input_ids[len(ids) :]
