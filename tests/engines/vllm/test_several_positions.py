"""Test models whose tokens have several positions (M-RoPE), by prompts of text."""

import math

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torchvision")  # vLLM imports the image processor with the model
import torch
import transformers
from engine import LONGEST, TRAINED, Reference, engine, generate, greedy, require_equal, text
from helpers.vision_models import vision_model

pytestmark = pytest.mark.engines

# vLLM's attention on CPUs takes heads of 32.
SIZES = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
REQUESTS = [(40, 6), (40, 300), (250, 6), (251, 6), (500, 6), (900, 100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a random Qwen2.5-VL."""
    path = tmp_path_factory.mktemp("qwen2_5_vl")
    model = vision_model(
        "qwen2_5_vl", rope_parameters=ROPE, max_position_embeddings=TRAINED, **SIZES
    )
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(path)
    return path


class VisionReference(Reference):
    """The same in transformers, by static YaRN with the factor that a request grows to."""

    kind = transformers.Qwen2_5_VLForConditionalGeneration

    def log_probabilities(self, prompt, output, max_tokens):
        steps = math.ceil(4 * math.log2((len(prompt) + max_tokens - 1) / TRAINED))
        if steps > 0 and self.method is not None:
            self.method, self.options = "yarn", {"factor": 2 ** (steps / 4)}
            return super().log_probabilities(prompt, output, max_tokens)
        ids = torch.tensor([[*prompt, *output]])
        with torch.no_grad():
            return self.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)


def test_a_batch_of_mixed_lengths_has_the_numbers_of_transformers(folder):
    parameters = ROPE | {
        "rope_type": "dynamic-yarn",
        "factor": LONGEST / TRAINED,
        "original_max_position_embeddings": TRAINED,
    }
    overrides = {"text_config": {"max_position_embeddings": TRAINED, "rope_parameters": parameters}}
    with engine(folder, hf_overrides=overrides, language_model_only=True) as llm:
        prompts = [text(length, seed=length % 3) for length, _ in REQUESTS]
        outputs = generate(llm, prompts, [greedy(new) for _, new in REQUESTS])
    reference = VisionReference(folder)
    assert {len(output.prompt_token_ids) for output in outputs} == {p for p, _ in REQUESTS}
    for output, (_, new) in zip(outputs, REQUESTS, strict=True):
        require_equal(output, reference, new)
    unscaled = VisionReference(folder, method=None)
    with pytest.raises(AssertionError):  # the test can tell the two rotations apart
        require_equal(outputs[-1], unscaled, REQUESTS[-1][1])
