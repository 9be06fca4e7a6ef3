"""Test that vLLM rotates each request as `rope_patch.patch` does in transformers."""

import pytest

pytest.importorskip("vllm")
from engine import (
    TRAINED,
    Reference,
    engine,
    generate,
    greedy,
    require_equal,
    rope_parameters,
    text,
)

pytestmark = pytest.mark.engines

# Prompt and new tokens of 16 requests; texts of one seed share their beginnings.
REQUESTS = [
    *((200, 6, 0), (250, 6, 0), (251, 6, 0), (300, 6, 0), (450, 6, 0), (700, 6, 0), (1000, 6, 0)),
    *((40, 6, 1), (40, 300, 1), (40, 900, 1), (256, 1, 1), (255, 1, 1)),
    *((512, 6, 2), (506, 6, 2), (900, 100, 2), (3, 2, 2)),
]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def served(request):
    """Serve a tiny model by dynamic-yarn."""
    with engine(request.param, rope_parameters(request.param)) as llm:
        yield llm, Reference(request.param)


def test_a_batch_of_mixed_lengths_has_the_numbers_of_transformers(served):
    llm, reference = served
    prompts = [text(length, seed) for length, _, seed in REQUESTS]
    outputs = generate(llm, prompts, [greedy(new) for _, new, _ in REQUESTS])
    for output, (_, new, _) in zip(outputs, REQUESTS, strict=True):
        require_equal(output, reference, new)


def test_cached_prefixes_are_hit_within_a_profile_and_never_across(served):
    llm, reference = served
    prompt = text(200, seed=7)
    cached = []
    for new in (6, 40, 200, 200, 800, 40):  # profiles of 256, 256, 430, 430, 1024 and 256 tokens
        (output,) = generate(llm, [prompt], greedy(new, prompt_logprobs=None))
        require_equal(output, reference, new)
        cached.append(output.num_cached_tokens)
    first, again = 0, max(cached)
    assert again > 0
    assert cached == [first, again, first, again, first, again]


def test_users_salts_stay_apart_beside_the_profiles(served):
    llm, _ = served
    prompt = text(200, seed=8)
    cached = []
    for new, salt in ((6, None), (6, "a"), (6, "a"), (6, "b"), (300, "a"), (300, "a"), (6, "1:")):
        request = {"prompt_token_ids": prompt}
        request |= {} if salt is None else {"cache_salt": salt}
        (output,) = generate(llm, [request], greedy(new, prompt_logprobs=None))
        cached.append(output.num_cached_tokens)
    assert [count > 0 for count in cached] == [False, False, True, False, False, True, False]


def test_requests_are_counted_by_profile(served):
    llm, _ = served
    from prometheus_client import REGISTRY

    def count(longest):
        return sum(
            sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == "rope_patch:requests_total"
            and sample.labels["longest"] == str(longest)
        )

    before = count(TRAINED), count(512)
    generate(llm, [text(100), text(100), text(500)], greedy())
    assert (count(TRAINED), count(512)) == (before[0] + 2, before[1] + 1)
