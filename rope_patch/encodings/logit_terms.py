"""What attention computes from positions that are added to embeddings."""

from __future__ import annotations

import torch


def logit_terms(
    content: torch.Tensor, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the four terms of the logits of embeddings to which positions were added.

    (x + p) W_q W_k^T (x + p)^T is the sum of content with content, content with position, position
    with content, and position with position, of query and key in this order (TENER,
    arXiv:1911.04474; Transformer-XL, arXiv:1901.02860, section 3.3). Not divided by sqrt(D).

    Args:
        content: Embeddings x, `[N, D]`.
        positions: Encodings p, `[N, D]`.
        query: W_q, `[D, H]`; queries are x W_q.
        key: W_k, `[D, H]`.

    Returns:
        Each term, `[N, N]`, queries in rows.
    """
    parts = {"content": content, "position": positions}
    return {
        f"{asking}-{asked}": (parts[asking] @ query) @ (parts[asked] @ key).T
        for asking in parts
        for asked in parts
    }
