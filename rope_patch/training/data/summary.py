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
    counts, read = state.get("row_yield", {}), state.get("long_counts")
    if counts.get("documents"):
        padding = counts["padding"] / (counts["tokens"] + counts["padding"])
        summaries["rows"] = (
            f"{counts['cut'] / counts['documents']:.2%} of {counts['documents']:,} documents cut, "
            f"{padding:.2%} padding"
        )
    if arguments.compression_ratio is not None and read:
        bounds = arguments.compression_ratio
        summaries["filter"] = (
            f"compression ratio {bounds[0]:g} to {bounds[1]:g}: {read['repetitive']:,} documents "
            f"left out below, {read['noisy']:,} above, {read['documents']:,} kept"
        )
    if arguments.aggregation_share and read:
        summaries["aggregation tasks"] = (
            f"{read['questions']:,} questions "
            f"({', '.join(arguments.aggregation_tasks)}) in {arguments.aggregation_share:.0%} of "
            "the long documents"
        )
    return summaries
