"""What a run's log and card say of its rows."""

from __future__ import annotations

from typing import Any

from rope_patch.training.data.arguments import DataArguments


def summarize(arguments: DataArguments, state: dict[str, Any]) -> dict[str, str]:
    """Return what packing, filter and aggregation tasks did, by name; those that the run has.

    Args:
        arguments: The recipe's keys for data.
        state: The last row's `state`; empty before the first row.
    """
    summaries: dict[str, str] = {}
    counts, sources = state.get("row_yield", {}), state.get("long", [])
    if counts.get("documents"):
        padding = counts["padding"] / (counts["tokens"] + counts["padding"])
        summaries["rows"] = (
            f"{counts['cut'] / counts['documents']:.2%} of {counts['documents']:,} documents cut, "
            f"{padding:.2%} padding"
        )
    if arguments.compression_ratio is not None and sources:
        bounds = arguments.compression_ratio
        low, high, kept = (
            sum(source[key] for source in sources) for key in ("repetitive", "noisy", "documents")
        )
        summaries["filter"] = (
            f"compression ratio {bounds[0]:g} to {bounds[1]:g}: {low:,} documents left out below, "
            f"{high:,} above, {kept:,} kept"
        )
    if arguments.aggregation_share and sources:
        summaries["aggregation tasks"] = (
            f"{sum(source['questions'] for source in sources):,} questions "
            f"({', '.join(arguments.aggregation_tasks)}) in {arguments.aggregation_share:.0%} of "
            "the long documents"
        )
    return summaries
