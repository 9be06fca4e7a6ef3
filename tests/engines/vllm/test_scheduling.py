"""Test that a request keeps its rotation however vLLM schedules it."""

import json
import shutil

import pytest

pytest.importorskip("vllm")
import torch
from engine import (
    ASSETS,
    LONGEST,
    Reference,
    engine,
    generate,
    greedy,
    require_equal,
    rope_parameters,
    text,
)
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

pytestmark = pytest.mark.engines

MODEL = ASSETS / "tiny-llama"
REQUESTS = [(200, 6), (300, 6), (450, 20), (700, 6), (1000, 6), (40, 900), (256, 40), (30, 6)]

# More new tokens, so that n-grams repeat.
DRAFTED = [(200, 6), (300, 60), (450, 20), (1000, 6), (40, 600), (256, 40), (30, 6), (100, 300)]


@pytest.fixture(scope="module")
def reference():
    return Reference("llama")


def require_all_equal(llm, reference, seed=0):
    """Run a batch of mixed lengths twice, the second time on cached prefixes."""
    prompts = [text(length, seed) for length, _ in REQUESTS]
    for prompt_logprobs in (0, None):
        parameters = [greedy(new, prompt_logprobs=prompt_logprobs) for _, new in REQUESTS]
        for output, (_, new) in zip(generate(llm, prompts, parameters), REQUESTS, strict=True):
            require_equal(output, reference, new)


def preemptions(llm):
    """Return how often the engine took a request's memory away."""
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def test_prompts_in_chunks(reference):
    with engine(rope=rope_parameters("llama"), max_num_batched_tokens=128, max_num_seqs=4) as llm:
        require_all_equal(llm, reference)


def test_preempted_requests_resume_under_their_profile(reference):
    options = {"num_gpu_blocks_override": 14, "block_size": 128}  # two of the long requests
    with engine(rope=rope_parameters("llama"), enable_prefix_caching=False, **options) as llm:
        prompts = [text(120 + 20 * i, seed=i) for i in range(8)]
        parameters = [greedy(760 - 90 * i, prompt_logprobs=None) for i in range(8)]
        outputs = generate(llm, prompts, parameters)
        assert preemptions(llm) > 0
        for output, each in zip(outputs, parameters, strict=True):
            require_equal(output, reference, each.max_tokens)


def test_parallel_samples_share_a_profile(reference):
    parameters = SamplingParams(
        n=4, temperature=1.0, seed=0, max_tokens=150, logprobs=0, ignore_eos=True
    )
    with engine(rope=rope_parameters("llama")) as llm:
        for output in generate(llm, [text(200), text(300), text(100)], parameters):
            assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
            require_equal(output, reference, 150, is_greedy=False)


def test_requests_without_max_tokens_count_for_the_longest_length(reference):
    with engine(rope=rope_parameters("llama"), longest=512) as llm:
        (output,) = generate(llm, [text(200)], greedy(None, prompt_logprobs=None))
        assert len(output.outputs[0].token_ids) == 512 - 200
        require_equal(output, reference, 512 - 200)


def test_a_compiled_model_follows_the_batch(reference):
    with engine(rope=rope_parameters("llama"), enforce_eager=False) as llm:
        for seed in range(2):  # what the compiler saw first must not stay
            require_all_equal(llm, reference, seed)


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_workers_share_a_model(reference, split):
    # On CPUs, vLLM 0.32 splits layers of compiled models only.
    is_eager = split == "tensor_parallel_size"
    with engine(rope=rope_parameters("llama"), enforce_eager=is_eager, **{split: 2}) as llm:
        require_all_equal(llm, reference)


def longer_copy(folder):
    """Write the model with a config that lets it draft for every length, by its plain rotation."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = LONGEST
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle_head(folder):
    """Write an EAGLE head that drafts nearly as the model does: its layers on the token's input.

    vLLM's head leaves out the first norm, so its scale goes into the weights that read it, and the
    last one, whose weights change few choices.
    """
    longer_copy(folder)
    weights = load_file(MODEL / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    scale = weights["model.layers.0.input_layernorm.weight"] / embedding.pow(2).mean().sqrt()
    size = embedding.shape[1]
    head = {
        "fc.weight": torch.cat([torch.eye(size), torch.zeros(size, size)], 1),
        "embed_tokens.weight": embedding.clone(),
    }
    for name, weight in weights.items():
        if name.startswith("model.layers."):
            inner = name.removeprefix("model.")
            if inner == "layers.0.input_layernorm.weight":
                continue
            reads_input = inner.startswith("layers.0.self_attn.") and "o_proj" not in inner
            head[inner] = (weight * scale if reads_input else weight).clone()
    (folder / "model.safetensors").unlink()
    save_file(head, folder / "model.safetensors")
    return folder


DRAFTS = {
    "ngram": lambda folder: {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "draft_model": lambda folder: {"model": str(longer_copy(folder))},
    "eagle": lambda folder: {"model": str(eagle_head(folder))},
}


@pytest.mark.parametrize("method", DRAFTS)
def test_verified_drafts_leave_every_request_its_numbers(method, tmp_path, reference):
    drafts = {
        "method": method,
        "num_speculative_tokens": 3,
        **DRAFTS[method](tmp_path / "draft"),
    }
    prompts = [text(length) for length, _ in DRAFTED]
    with engine(rope=rope_parameters("llama"), speculative_config=drafts) as llm:
        for _ in range(2):  # the second time on cached prefixes
            parameters = [greedy(new, prompt_logprobs=None) for _, new in DRAFTED]
            outputs = generate(llm, prompts, parameters)
            for output, (_, new) in zip(outputs, DRAFTED, strict=True):
                require_equal(output, reference, new)
        counts = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    # EAGLE reads no cached prefix of one block, whose last keys depend on the token after it.
    assert sum(output.num_cached_tokens > 0 for output in outputs) >= 3
    assert counts["vllm:spec_decode_num_accepted_tokens"] > 100, counts
