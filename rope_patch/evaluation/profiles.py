"""Fill in the request of a comparison: methods, lengths, tasks and samples that were not given.

`comparison_request` takes a model, methods and any fields of `EvalRequest`, and returns the whole
request. What is left out comes from a profile, `quick`, `standard` or `paper`: how thorough the
comparison is. Default lengths follow from the trained length and the target.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch import tasks
from rope_patch.evaluation.encoding_facts import model_lengths
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.evaluation.request import (
    BASELINE,
    KEY_TOKENS,
    PERPLEXITY,
    SHORT,
    SLIDING,
    SPEED,
    EvalRequest,
    check_methods,
)
from rope_patch.extension import resolve_factor_and_length
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_config, read_tokenizer
from rope_patch.tasks import chat_template
from rope_patch.tasks.samples import TooShort
from rope_patch.utils.errors import did_you_mean

logger = logging.getLogger("rope_patch")


@dataclass(frozen=True)
class Profile:
    """The defaults of a comparison.

    Attributes:
        tasks: See `EvalRequest.tasks`.
        samples: Of each retrieval task at each length.
        per_text: Of these, the samples that share a text.
        short_samples: Of each ordinary short task.
        texts: The long documents.
    """

    tasks: tuple[str, ...]
    samples: int
    per_text: int
    short_samples: int
    texts: tuple[str, ...]


# RULERv2's answers are scored and not written: its copies are hundreds of tokens long.
_RETRIEVAL = (
    *("rp_ruler", "rp_hard", "rp_hard_ll", "rp_choice"),
    *("rp_ruler2_ll", "rp_oolong", "rp_oolong_ll"),
)
_THOROUGH = (*_RETRIEVAL, PERPLEXITY, KEY_TOKENS, SHORT, SPEED)
_RECALL = ("rp_recall_ll", "rp_recall_mc")
_NOVELS = ("emma", "mansfield_park", "pride_and_prejudice", "sense_and_sensibility")
PROFILES = {
    "quick": Profile(
        # `_mc` already scores the target of `_ll`, so running both costs no more.
        ("rp_niah_multikey_1_ll", "rp_niah_multikey_1_mc", PERPLEXITY, SHORT, SPEED),
        # Texts decide, not questions: of four methods, eight texts can show one to gain, and ten
        # do so where plain models fail.
        samples=10,
        per_text=1,
        short_samples=60,
        texts=("emma",),
    ),
    "standard": Profile(_THOROUGH, samples=50, per_text=4, short_samples=200, texts=_NOVELS),
    "paper": Profile(
        ("rp_ruler2", *_THOROUGH, SLIDING),
        samples=500,
        per_text=4,
        short_samples=500,
        texts=_NOVELS,
    ),
}
DEFAULT_METHODS = ("linear", "ntk", "yarn", "dynamic-yarn")
_DEPTHS = (10, 30, 50, 70, 90)  # percent


def comparison_request(
    model: str,
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    factor: float | str | None = None,
    length: int | str | None = None,
    lengths: Sequence[int | str] = (),
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
    request = EvalRequest(model=model, methods=names, **{**fields, "lengths": tuple(lengths)})
    path = demo.resolve_model_path(model)
    # First, before the machine's profile is logged and a tokenizer is read.
    check_methods(request, path, read_config(path, gguf_file=request.gguf_file))
    chosen = choose_profile(profile)
    test_lengths = request.lengths or default_lengths(
        model,
        request.factor,
        request.length,
        request.trained_length,
        request.start,
        request.gguf_file,
        anyway=request.anyway,
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
        or fit_tasks(
            profile_tasks, model, request.gguf_file, min(test_lengths), request.chat_template
        ),
        **{**fields, **defaults, **given},
    )


def choose_profile(name: str | None) -> Profile:
    """Return the profile of that name, or else the one for this machine, and log it.

    Raises:
        ValueError: No profile has that name.
    """
    if name is None:
        name = "standard" if torch.cuda.is_available() else "quick"
        logger.info("profile: %s (--profile %s)", name, " | ".join(PROFILES))
    if name not in PROFILES:
        hint = did_you_mean(name, PROFILES)
        raise ValueError(f"unknown profile {name!r}{hint}; expected one of {', '.join(PROFILES)}")
    return PROFILES[name]


def default_lengths(
    model: str,
    factor: float | None,
    length: int | None,
    trained_length: int | None,
    start: str,
    gguf_file: str | None,
    *,
    anyway: bool = False,
) -> tuple[int, ...]:
    """Return half the trained length, its doubles up to the target, and the target.

    Without a factor or length (methods that follow the length need none) up to twice of it.
    """
    config = read_config(demo.resolve_model_path(model), gguf_file=gguf_file)
    _, trained = model_lengths(model, config, trained_length, start)
    longest = 2 * trained
    if factor is not None or length is not None:
        _, longest = resolve_factor_and_length(factor, length, trained, anyway=anyway)
    lengths = {trained // 2, trained, longest}
    doubled = 2 * trained
    while doubled < longest:
        lengths.add(doubled)
        doubled *= 2
    return tuple(sorted(lengths))


def fit_tasks(
    chosen: tuple[str, ...], model: str, gguf_file: str | None, shortest: int, chat: str = "auto"
) -> tuple[str, ...]:
    """Return a profile's tasks; those without room in the shortest length give way to recall.

    What gives way is then said on stderr.

    Args:
        chosen: Of a profile.
        model: A folder, a name, or `demo`.
        gguf_file: The GGUF file within the model's folder.
        shortest: Of the lengths, in tokens.
        chat: See `EvalRequest.chat_template`.
    """
    expanded = tasks.expand(list(chosen))
    tokenizer = read_tokenizer(demo.resolve_model_path(model), gguf_file=gguf_file)
    in_chat = chat_template.resolve(chat, tokenizer)
    least: dict[str, int] = {}
    for name in expanded:
        if name in tasks.names():
            try:
                lm_eval_tasks.build(name, tokenizer, [shortest], 1, [50], chat=in_chat)
            except TooShort as error:
                least[name] = error.least
    if not least:
        return chosen
    logger.warning(
        "at %s tokens there is no room for %s (%s tokens or more): asking for word pairs instead "
        "(%s)",
        f"{shortest:,}",
        ", ".join(least),
        f"{min(least.values()):,}",
        ", ".join(_RECALL),
    )
    return (*_RECALL, *(name for name in expanded if name not in least))
