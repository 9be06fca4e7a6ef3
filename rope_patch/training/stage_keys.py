"""The key `stages` of a recipe: what each stage's keys come to, and what stages must share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STAGES = "stages"
ABOUT = (
    "A list of stages, in the file alone: each a mapping of keys that differ from the rest of the "
    "recipe, such as {length: 65536, max_steps: 1000}."
)
# Of these, a stage's own key takes the place of the recipe's other one.
_ALTERNATIVES = (("factor", "length"), ("max_steps", "tokens"))
_OF_THE_RECIPE = {
    "output_dir": "each stage gets a folder in the recipe's",
    "resume": "a run goes on in the stage that it was in",
    "plugin": "files with methods are loaded for all stages",
}
# The weights, the adapter and the devices of a stage are those of the stage before.
SHARED = (
    *("model", "trained_length", "dtype", "seed", "full_determinism", "bf16", "fp16", "tf32"),
    *("lora_rank", "lora_alpha", "lora_targets", "lora_trains", "use_liger_kernel"),
    *("use_cpu", "fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config"),
    "ddp_backend",
)


def split_stages(recipe: dict[str, Any], path: Any) -> list[dict[str, Any]] | None:
    """Take the stages out of a recipe.

    Args:
        recipe: The file's keys and values; loses the key `stages`.
        path: The file, for errors.

    Returns:
        The keys of each stage alone; None if the recipe has no stages.

    Raises:
        ValueError: They are no list of mappings, or the list is empty.
    """
    if STAGES not in recipe:
        return None
    stages = recipe.pop(STAGES)
    if not isinstance(stages, list) or not stages:
        got = "an empty list" if stages == [] else f"{stages!r:.60}"
        raise ValueError(
            f"{STAGES} in {path} takes a list with the keys of each stage, got {got}: leave it out "
            "for a recipe of one stage"
        )
    for number, keys in enumerate(stages, start=1):
        if not isinstance(keys, dict):
            raise ValueError(
                f"stage {number} in {path}: expected keys and values, got {keys!r:.60}"
            )
        for key, reason in _OF_THE_RECIPE.items():
            if key in keys:
                raise ValueError(
                    f"stage {number} in {path}: {key} goes beside {STAGES}, not into it: {reason}"
                )
    return stages


def stage_recipe(recipe: dict[str, Any], stage: dict[str, Any]) -> dict[str, Any]:
    """Return the whole recipe of a stage: the stage's keys over those beside `stages`."""
    replaced = {
        other
        for pair in _ALTERNATIVES
        for key, other in (pair, pair[::-1])
        if key in stage and other not in stage
    }
    return {key: value for key, value in recipe.items() if key not in replaced} | stage


def join_stages(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a recipe with stages from the whole recipe of each stage."""
    first, *rest = stages
    common = {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in rest)
    }
    own = [{k: v for k, v in keys.items() if k not in common} for keys in stages]
    return {**common, STAGES: own}


def require_shared(stages: Sequence[dict[str, Any]]) -> None:
    """Raise if stages differ in a key that they must share.

    Args:
        stages: The resolved values of each stage.

    Raises:
        ValueError: They differ; names the stage, the key and both values.
    """
    for number, values in enumerate(stages[1:], start=2):
        for key in SHARED:
            if values.get(key) != stages[0].get(key):
                raise ValueError(
                    f"stage {number}: {key} must be the same in all stages, it was "
                    f"{stages[0].get(key)!r} in stage 1, got {values.get(key)!r}: say it beside "
                    f"{STAGES}"
                )
