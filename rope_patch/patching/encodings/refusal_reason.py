"""Say in plain words why a model's encoding of positions is not extended."""

from __future__ import annotations

from torch import nn

# Attributes of the modules that such encodings are made of, and the reason.
_REASONS = {
    "rel_embeddings": (
        "its queries and keys meet learned vectors of distances (disentangled attention), each of "
        "which serves one distance or bucket"
    ),
    "distance_embedding": "its queries meet a learned vector for each distance",
    "r_r_bias": (
        "its attention computes sinusoids of distances for a text of any length, so it has no end "
        "to move"
    ),
    "pe_k": "its encoder's queries meet a learned vector for each distance",
    "gru_rel_pos_linear": "its biases by distance are gated by what each query holds",
    "relative_pos_embeddings": (
        "it adds a table of positions and biases by distance that are computed from hidden states, "
        "and the one cannot be stretched without the other"
    ),
    "rel_pos_bias": "its biases by distance are columns of a linear map, one for each bucket",
    "position_bias": "its buckets depend on the segments of the prompt as well as on distances",
    "axial_pos_shape": "its positions are places on a grid of fixed shape, which holds all of them",
    "rel_logits_proj": (
        "its biases are computed from the tokens, up to a fixed distance, and are zero beyond it"
    ),
    "relative_position_bias": (  # the same under another name, from transformers 5.24 on
        "its biases are computed from the tokens, up to a fixed distance, and are zero beyond it"
    ),
    "latents": "it reads a text into a fixed number of vectors, and writes a fixed length",
    "char_position_embeddings": (
        "its table of positions has a row for each hash bucket, whatever the length of texts"
    ),
    "rotary_value": ("it rotates queries and keys by a fixed table, which no method reaches"),
    "rotary_dim": (
        "it rotates queries and keys by a table in each attention, which no method reaches"
    ),
    "time_decay": "it tells order by recurrence alone, and reads any length",
    "mlstm_layer": "it tells order by recurrence alone, and reads any length",
    "max_scale": "it computes sinusoids for a text of any length, so there is no table to stretch",
}


def refusal_reason(model: nn.Module) -> str | None:
    """Return why a model's positions cannot be extended; None if its parts do not tell."""
    for attribute, reason in _REASONS.items():
        for name, module in model.named_modules():
            if getattr(module, attribute, None) is not None:
                return f"{reason} ({f'{name}.' if name else ''}{attribute})"
    return None
