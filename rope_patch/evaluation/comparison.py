"""A comparison: an evaluation whose tasks, samples and lengths come from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rope_patch.evaluation import profiles
from rope_patch.evaluation.request import BASELINE, SPEED, EvalRequest, check_methods
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_config

DEFAULT_METHODS = ("linear", "ntk", "yarn", "dynamic-yarn")
_DEPTHS = (10, 30, 50, 70, 90)  # percent


def comparison_request(
    model: str,
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    factor: float | None = None,
    length: int | None = None,
    lengths: Sequence[int] = (),
    tasks: Sequence[str] = (),
    profile: str | None = None,
    **fields: Any,
) -> EvalRequest:
    """Return the evaluation that compares methods, what is left out taken from a profile.

    Args:
        model: A folder, a name on the Hub, or `demo`.
        methods: Their names; the plain model is always with them.
        factor: Target length / trained length.
        length: Target length in tokens.
        lengths: Lengths of the retrieval samples, in tokens; half the trained length and its
            doubles up to the target, if empty.
        tasks: See `EvalRequest.tasks`; the profile's, if empty, without the speed of a lone model.
        profile: `quick`, `standard` or `paper`; by the machine unless given.
        **fields: Fields of `EvalRequest`.

    Raises:
        ValueError: A method, an option or the profile is unknown, or the model does not exist.
    """
    fields = {"controls": True, **fields, "factor": factor, "length": length}
    names = tuple(dict.fromkeys([BASELINE, *methods]))
    request = EvalRequest(model=model, methods=names, **fields)
    path = demo.resolve_model_path(model)
    # First, before the machine's profile is logged and a tokenizer is read.
    check_methods(request, path, read_config(path, gguf_file=request.gguf_file))
    chosen = profiles.choose_profile(profile)
    test_lengths = tuple(lengths) or profiles.default_lengths(
        model, factor, length, request.trained_length, request.start, request.gguf_file
    )
    defaults: dict[str, Any] = {
        "depths": _DEPTHS,
        "short_samples": chosen.short_samples,
        "texts": tuple(chosen.texts),
        "samples": None if request.precision else chosen.samples,
        "per_text": chosen.per_text,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    # The plain model alone, as a trained one is measured: there is nothing to divide its times by.
    ratios = {SPEED} if names == (BASELINE,) else set()
    profile_tasks = tuple(task for task in chosen.tasks if task not in ratios)
    return EvalRequest(
        model=model,
        methods=names,
        lengths=test_lengths,
        tasks=tuple(tasks)
        or profiles.fit_tasks(
            profile_tasks, model, request.gguf_file, min(test_lengths), request.chat_template
        ),
        **{**fields, **defaults, **given},
    )
