"""The function `evaluate_server`: what `rope-patch eval URL` does, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rope_patch.evaluation.entry_points import Evaluation


def evaluate_server(
    url: str,
    tokenizer: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] = "out",
    show: Callable[[str], object] | None = None,
    **options: Any,
) -> Evaluation:
    """Measure a model that a server holds, and write a report, as `rope-patch eval URL` does.

    The server has OpenAI's completions and takes prompts of token ids, as vLLM, SGLang and
    llama.cpp's server do. It is measured as it is: how it rotates was decided when it was started.
    The folder keeps every answer: the same call continues an earlier one, also at another address.

    Args:
        url: The server's address, such as http://localhost:8000.
        tokenizer: The model's tokenizer, with its config: a folder, a name on the Hub, or `demo`.
        out: The folder of the report and of everything measured.
        show: Called with the verdict, the first table and cautions as text, such as `print`.
        **options: Fields of `ServedRequest` (`concurrency`, `timeout`, `tries`, `served_model`,
            `verify`, `against`) and of `EvalRequest` (`lengths`, `tasks`, `samples`, ...).

    Returns:
        What was measured.

    Raises:
        ValueError: The request is invalid, or more than the server can do, found out before any
            sample is asked; or the server stops answering, cuts prompts, or answers otherwise.
        TypeError: An option is unknown.
        OSError: The folder cannot be written to.
    """
    return _evaluate([url], tokenizer, out, show, options)


def compare_servers(
    first: str,
    second: str,
    tokenizer: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] = "out",
    show: Callable[[str], object] | None = None,
    **options: Any,
) -> Evaluation:
    """Compare the models of two servers question by question, as `rope-patch compare A B` does.

    They are served with one tokenizer: the same model with two rotations, on two engines, or
    quantised in two ways.

    Args:
        first: The address of the server that the other one is compared with, A.
        second: The address of the other server, B.
        tokenizer: See `evaluate_server`.
        out: See `evaluate_server`.
        show: See `evaluate_server`.
        **options: See `evaluate_server`.

    Returns:
        What was measured of both.

    Raises:
        ValueError: See `evaluate_server`.
        TypeError: See `evaluate_server`.
        OSError: See `evaluate_server`.
    """
    return _evaluate([first, second], tokenizer, out, show, options)


def _evaluate(
    urls: list[str],
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    show: Callable[[str], object] | None,
    options: dict[str, Any],
) -> Evaluation:
    from rope_patch.evaluation.entry_points import Evaluation, request_fields
    from rope_patch.evaluation.request import BASELINE, EvalRequest
    from rope_patch.served.pipeline import run, run_two
    from rope_patch.served.request import ServedRequest

    names = {each.name for each in fields(ServedRequest)} - {"tokenizer"}
    own = {name: options.pop(name) for name in list(options) if name in names}
    served = ServedRequest(tokenizer=os.fspath(tokenizer), **own)
    request = EvalRequest(**request_fields(urls[0], [BASELINE], out, options))
    overview: list[str] = []
    if len(urls) == 1:
        results = run(request, served, overview.append)
    else:
        results = run_two(request, urls[1], served, overview.append)
    if show is not None and overview:
        show(*overview)
    return Evaluation(results, request.folder, "".join(overview))
