"""Start vLLM on the tiny trained models, and compute what transformers makes of its requests."""

import gc
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

import rope_patch

ASSETS = Path(__file__).parents[2] / "assets"
TRAINED, FACTOR = 256, 4
LONGEST = FACTOR * TRAINED
VOCABULARY = 512
# A difference in float32: vLLM's kernels add in another order than transformers'.
TOLERANCE = 2e-3


def rope_parameters(name, rope_type="dynamic-yarn", **options):
    """Return the override that extends a tiny model, or its full-attention layers."""
    extended = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": float(FACTOR),
        "original_max_position_embeddings": TRAINED,
        **options,
    }
    if name != "gemma3":
        return extended
    windows = {"rope_type": "default", "rope_theta": 1000.0}
    return {"full_attention": extended, "sliding_attention": windows}


def model_folder(name):
    """Return the folder of a tiny model, or the folder that is given."""
    return name if isinstance(name, Path) else ASSETS / f"tiny-{name}"


@contextmanager
def engine(name="llama", rope=None, longest=LONGEST, **options):
    """Start vLLM on a tiny model, or one of a folder, and end it."""
    overrides = {"max_position_embeddings": TRAINED if name != "gemma3" else LONGEST}
    if rope is not None:
        overrides["rope_parameters"] = rope
    llm = LLM(
        str(model_folder(name)),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=longest,
        **{
            "hf_overrides": overrides,
            "enforce_eager": True,
            "disable_log_stats": False,
            **options,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def text(length, seed=0):
    """Return random token ids; texts of one seed share their beginning."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (LONGEST,), generator=generator)[:length].tolist()


def greedy(max_tokens=6, **options):
    """Return parameters of a greedy request that asks for all log-probabilities."""
    options = {"temperature": 0.0, "prompt_logprobs": 0, "logprobs": 0, **options}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def generate(llm, prompts, parameters):
    """Return the outputs of one batch of requests."""
    if not isinstance(parameters, list):
        parameters = [parameters] * len(prompts)
    return llm.generate(
        [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts],
        parameters,
        use_tqdm=False,
    )


class Reference:
    """A tiny model in transformers, patched by rope_patch for each request's length."""

    kind = AutoModelForCausalLM

    def __init__(self, name="llama", method="dynamic-yarn", **options):
        self.model = self.kind.from_pretrained(model_folder(name), dtype=torch.float32)
        self.method = method
        self.options = {**({"growth": "admission"} if method == "dynamic-yarn" else {}), **options}

    @torch.no_grad()
    def log_probabilities(self, prompt, output, max_tokens):
        """Return the log-probabilities that each token but the first is chosen from."""
        ids = torch.tensor([[*prompt, *output]])
        if self.method is None:
            return self.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        with rope_patch.patch(self.model, self.method, kernels="hf", **self.options) as handle:
            if self.method.startswith(("dynamic", "mixed")):
                handle.fix_length(len(prompt) + max_tokens - 1)  # the last token is never read
            return self.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)


def token_log_probabilities(request, output):
    """Return vLLM's log-probability of each token of the prompt but the first, and the output."""
    prompt = request.prompt_token_ids
    known = [
        row[token]
        for row, token in zip(request.prompt_logprobs or [], prompt, strict=False)
        if row is not None
    ]
    made = [row[token] for row, token in zip(output.logprobs, output.token_ids, strict=True)]
    return torch.tensor([each.logprob for each in [*known, *made]])


def require_equal(request, reference, max_tokens, is_greedy=True):
    """Raise unless a request's log-probabilities and greedy tokens are transformers'."""
    prompt = list(request.prompt_token_ids)
    for output in request.outputs:
        made = list(output.token_ids)
        expected = reference.log_probabilities(prompt, made, max_tokens)
        got = token_log_probabilities(request, output)
        chosen = expected.gather(1, torch.tensor([*prompt, *made])[1:, None])[:, 0]
        difference = (chosen[-len(got) :] - got).abs().max().item()
        assert difference < TOLERANCE, (len(prompt), max_tokens, difference)
        if is_greedy:
            assert expected[len(prompt) - 1 :].argmax(-1).tolist() == made
