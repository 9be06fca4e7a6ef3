"""Pictures of what attention makes of a sentence, with and without positions."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.encodings.tables import logit_terms, sinusoidal_table
from rope_patch.patching.torch_state import torch_defaults
from rope_patch.pictures.picture import PictureOptions, register_picture
from rope_patch.pictures.renderer import Curve, Curves, HeatMap, Picture
from rope_patch.transformers_api.models import model_file, set_attention_implementation

SENTENCE = ("the", "dog", "chased", "another", "dog")
_FIRST, _SECOND = (n for n, word in enumerate(SENTENCE) if word == "dog")
_SHOWN = 24  # components of an attention's output in its picture


@torch_defaults()
@torch.no_grad()
def dog_outputs(width: int, base: float) -> dict[str, torch.Tensor]:
    """Return what an untrained attention layer of Llama makes of the sentence.

    Args:
        width: Of embeddings; four heads share it.
        base: Theta of the rotation.

    Returns:
        Outputs `[5, width]` float64: without positions, without them behind a causal mask, and with
        RoPE. The layer, and an embedding for each word, are the same random ones.
    """
    from transformers import LlamaConfig

    llama = model_file("llama")

    config = LlamaConfig(
        hidden_size=width,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=max(2, width // 4 // 2 * 2),
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    set_attention_implementation(config, "eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = llama.LlamaAttention(config, layer_idx=0).double().eval()
        # Weights as large as trained ones, so that attention is not uniform.
        for weights in layer.parameters():
            torch.nn.init.normal_(weights, std=2 * width**-0.5)
        vectors = {
            word: torch.randn(width, dtype=torch.float64) for word in dict.fromkeys(SENTENCE)
        }
    words = torch.stack([vectors[word] for word in SENTENCE])[None]
    rotary = llama.LlamaRotaryEmbedding(config)
    everywhere, places = torch.zeros(1, len(SENTENCE)).long(), torch.arange(len(SENTENCE))[None]
    causal = torch.full((len(SENTENCE),) * 2, float("-inf")).double().triu(1)[None, None]

    def run(positions: torch.Tensor, mask: Any) -> torch.Tensor:
        return layer(words, position_embeddings=rotary(words, positions), attention_mask=mask)[0][0]

    return {
        "no positions": run(everywhere, None),
        "no positions, causal mask": run(everywhere, causal),
        "RoPE": run(places, None),
    }


@register_picture("dogs", width=64, base=10000.0)
def draw_dogs(options: PictureOptions) -> Picture:
    """Draw what attention returns for two equal words, with and without positions."""
    panels = []
    for name, outputs in dog_outputs(options.width, options.base).items():
        first, second = outputs[_FIRST], outputs[_SECOND]
        components = torch.arange(min(_SHOWN, options.width))
        gap = float((first - second).abs().max())
        # The same sums in another order leave the last bits.
        title = f"{name}: gap {gap:.2g}" if gap > 1e-12 else f"{name}: equal"
        panels.append(
            Curves(
                title,
                [
                    Curve("first dog", components, first[components]),
                    Curve("second dog", components, second[components], marked=True),
                ],
                "component",
                "output of attention",
            )
        )
    return Picture(
        panels,
        f'"{" ".join(SENTENCE)}" through one random attention layer of Llama. Without positions, '
        "both dogs see the same set of words, so their outputs are the same and nothing later can "
        "tell who chases whom. A causal mask alone tells them apart, because the first dog sees "
        "fewer words; RoPE does so without a mask.",
    )


@register_picture("four-terms", width=64, base=10000.0)
def draw_four_terms(options: PictureOptions) -> Picture:
    """Draw the four terms of the logits of embeddings to which positions were added."""
    generator = torch.Generator().manual_seed(0)
    width = options.width

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    vectors = {word: random(width) for word in dict.fromkeys(SENTENCE)}
    content = torch.stack([vectors[word] for word in SENTENCE])
    positions = sinusoidal_table(torch.arange(len(SENTENCE)), width, base=options.base)
    query, key = (random(width, width) / width**0.5 for _ in range(2))
    terms = {
        name: term / width**0.5
        for name, term in logit_terms(content, positions, query, key).items()
    }
    largest = max(float(term.abs().max()) for term in terms.values())
    panels = [
        HeatMap(
            name, term, "key", "query", (-largest, largest), "part of the logit", ticks=SENTENCE
        )
        for name, term in terms.items()
    ]
    return Picture(
        panels,
        "Positions that are added are multiplied with everything: the logit of query and key is "
        "the sum of these four terms. Content-content is the same for both dogs. Position-position "
        "knows no words, and the mixed terms ask for a word at a place. Embeddings and projections "
        "are random.",
        columns=4,
    )
