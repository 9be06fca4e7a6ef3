"""The function `extend`: what the command of this name does, from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.extending.request import Extended, ExtendRequest, parse_duration
from rope_patch.units import parse_tokens

if TYPE_CHECKING:
    from rope_patch.evaluation.decision_plan import RunPlan


def extend(
    model: str | os.PathLike[str],
    to: str | float,
    *,
    out: str | os.PathLike[str],
    budget: str | float = "8h",
    train: bool = False,
    data: Sequence[str] = (),
    recipe: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
    search: bool = True,
    samples: int = 96,
    engines: str | Sequence[str] = (),
    trained_length: int | str | None = None,
    start: str = "auto",
    anyway: bool = False,
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 42,
    plan: bool = False,
    command: str = "",
) -> Extended | RunPlan:
    """Extend a checkpoint, prove it, and write a folder to publish, as `rope-patch extend` does.

    Args:
        model: A folder, a name on the Hub, or `demo`.
        to: The target: a factor such as `4x`, or tokens such as 32768 or `32k`. A number without a
            unit is a factor up to 64, and tokens beyond.
        out: The folder of everything that is written; the same call continues there.
        budget: Wall time of all steps together, such as `8h` or `90m`, or seconds.
        train: Whether to fine-tune, too, where memory and time allow it.
        data: Documents to train on, as in a recipe; the package's novels that are not for
            measuring, if empty.
        recipe: Other keys of a recipe, for training.
        texts: What questions and documents are made of; the package's novels if empty.
        search: Whether the recommendation searches, too.
        samples: Samples of each kind at most.
        engines: Names as in `rope_patch.export`, such as `("vllm", "llama.cpp")`: what is published
            runs in all of them without this package. Any method may be published if empty.
        trained_length: Tokens of pretraining, if the config gives another number.
        start: Where the config scales already: see `rope_patch.patch`.
        anyway: See `rope_patch.patch`.
        dtype: The dtype to measure in; "auto" is float32 on a CPU.
        device_map: As in transformers.
        trust_remote_code: Whether to execute Python code that the checkpoint brings.
        seed: Seed of samples, search and training.
        plan: Time one short pass, and return what fits into the budget and what it can decide
            (a `rope_patch.evaluation.decision_plan.RunPlan`); nothing is measured or written.
        command: The command line to record.

    Returns:
        What became of it; print it to read it.

    Raises:
        ValueError: A request that cannot be met, a budget too small to compare anything, or a
            folder that holds something else.
        OSError: A file could not be written, with how to go on.
    """
    # The steps import packages that a plain installation lacks, such as those for statistics.
    from rope_patch.exporting import serving_engines
    from rope_patch.extending import pipeline

    request = ExtendRequest(
        model=os.fspath(model),
        to=str(to),
        out=Path(out),
        budget=parse_duration(budget) if isinstance(budget, str) else float(budget),
        train=train,
        data=tuple(data),
        recipe={key: str(value) for key, value in (recipe or {}).items()},
        texts=tuple(texts),
        search=search,
        samples=samples,
        engines=serving_engines(engines),
        trained_length=parse_tokens("trained_length", trained_length),
        start=start,
        anyway=anyway,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        seed=seed,
        command=command,
    )
    return pipeline.plan(request) if plan else pipeline.run(request)
