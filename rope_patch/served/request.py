"""What is asked of a server beside an evaluation's own request, and what cannot be asked of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rope_patch.evaluation.request import BASELINE, SPEED, EvalRequest
from rope_patch.utils.errors import Refused

_START_IT = (
    "start the server with what `rope-patch export MODEL --method METHOD --factor FACTOR` prints, "
    "and evaluate it as it is"
)
# Fields of EvalRequest that are about a model in this process, and what to do instead.
_OF_LIVE_MODELS = {
    **dict.fromkeys(("factor", "length", "options", "arguments", "start"), _START_IT),
    "quantization": "serve the quantised weights, and evaluate that server",
    "until_decided": "it compares methods, and a server has one: give --precision instead",
    "share": "the server's own prefix caching decides what is read once",
}


@dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """How a server is asked.

    Attributes:
        tokenizer: The model's tokenizer: a folder, a name on the Hub, or `demo`. Its config says
            the trained length.
        served_model: The served model's name, where a server has several.
        concurrency: Requests at once.
        timeout: Seconds that the server may take for one request.
        tries: How often a request is sent at most, with growing waits between.
        verify: Whether to find out first how the server rotates.
        against: The model with the weights to verify against; the tokenizer's folder if None.
    """

    tokenizer: str
    served_model: str | None = None
    concurrency: int = 8
    timeout: int = 600
    tries: int = 8
    verify: bool = True
    against: str | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "timeout", "tries"):
            if (value := getattr(self, name)) < 1:
                raise Refused(f"{name} must be at least 1, got {value}")


def check_served_request(request: EvalRequest) -> None:
    """Raise if an evaluation asks for what a server cannot do.

    Raises:
        Refused: What was asked for, and what to do instead.
    """
    if set(request.methods) != {BASELINE}:
        names = ", ".join(name for name in request.methods if name != BASELINE)
        raise Refused(
            f"method {names} cannot be applied to a server, which rotates as it was started: "
            f"{_START_IT}"
        )
    for each in fields(EvalRequest):
        if each.name in _OF_LIVE_MODELS:
            usual = each.default_factory() if callable(each.default_factory) else each.default
            if getattr(request, each.name) != usual:
                raise Refused(
                    f"{each.name} cannot be asked of a server, which computes as it was started: "
                    f"{_OF_LIVE_MODELS[each.name]}"
                )
    if SPEED in request.tasks:
        raise Refused(
            f"{SPEED} compares methods on a model in this process: expected other tasks for a "
            "server; its own benchmark measures its speed"
        )
