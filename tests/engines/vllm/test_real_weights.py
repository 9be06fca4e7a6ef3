"""Test that trained weights have the numbers of transformers, in a batch of mixed lengths."""

import pytest

pytest.importorskip("vllm")
import torch
from engine import Reference, engine, generate, greedy, require_equal
from transformers import AutoTokenizer

from rope_patch.pretrained import demo_folder
from rope_patch.tasks import read_text

pytestmark = pytest.mark.engines

# A trained length of 1,024, so that requests beyond it take seconds.
TRAINED, LONGEST = 1024, 4096
# Length and text of 16 prompts; those of one text share their beginning.
PROMPTS = [
    *((40, 0), (200, 0), (500, 0), (1000, 0), (1100, 0), (1400, 0), (2300, 0)),
    *((100, 1), (300, 1), (700, 1), (1018, 1), (1019, 1), (1700, 1)),
    *((150, 2), (600, 2), (1200, 2)),
]
ROPE = {
    "rope_type": "dynamic-yarn",
    "rope_theta": 100000.0,
    "factor": LONGEST / TRAINED,
    "original_max_position_embeddings": TRAINED,
}


@pytest.fixture(scope="module")
def folder():
    try:
        return demo_folder()
    except ValueError as error:
        pytest.skip(str(error))


def test_smollm2_has_the_numbers_of_transformers(folder):
    words = AutoTokenizer.from_pretrained(folder)(read_text("emma"))["input_ids"]
    prompts = [words[20_000 * text :][:length] for length, text in PROMPTS]
    # All log-probabilities first; prompts that want them read no cached prefix, so then without.
    asked = (greedy(6), greedy(6, prompt_logprobs=None))
    overrides = {"max_position_embeddings": TRAINED, "rope_parameters": ROPE}
    with engine(folder, hf_overrides=overrides, longest=LONGEST) as llm:
        outputs, again = (generate(llm, prompts, each) for each in asked)
    assert sum(output.num_cached_tokens > 0 for output in again) >= 10
    reference = Reference(folder, trained_length=TRAINED)
    for output, repeated in zip(outputs, again, strict=True):
        require_equal(output, reference, 6)
        assert list(repeated.outputs[0].token_ids) == list(output.outputs[0].token_ids)
        first, second = (
            torch.tensor(
                [row[token].logprob for row, token in zip(o.logprobs, o.token_ids, strict=True)]
            )
            for o in (output.outputs[0], repeated.outputs[0])
        )
        torch.testing.assert_close(first, second, atol=2e-3, rtol=0)
