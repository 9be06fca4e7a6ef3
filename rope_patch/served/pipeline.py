"""The evaluation of a server: its checks, its session, and the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from rope_patch.evaluation.entry_points import is_address
from rope_patch.evaluation.pipeline import add_write_advice, measure
from rope_patch.evaluation.report.merging import add_other_weights, relabelled
from rope_patch.evaluation.report.writer import write_report
from rope_patch.evaluation.request import SERVED, EvalRequest, check_request
from rope_patch.evaluation.results_schema import RunRecord
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_config, read_tokenizer
from rope_patch.served.completions import without_foreign_bars
from rope_patch.served.request import ServedRequest, check_served_request
from rope_patch.served.server import open_server
from rope_patch.served.session import ServedSession
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import Refused

_PROBE = "The quick brown fox jumps over the lazy dog."


def run(
    request: EvalRequest, served: ServedRequest, show: Callable[[str], object] | None = None
) -> RunRecord:
    """Evaluate a server, and write the report.

    Args:
        request: What to evaluate; its model is the address.
        served: How the server is asked.
        show: Called with the verdict, the summary and cautions as plain text.

    Returns:
        The results that the report shows (`report.json`).

    Raises:
        ValueError: See `evaluate_server`.
        OSError: See `evaluate_server`.
    """
    started = time.monotonic()
    if not is_address(request.model):
        raise Refused(
            f"expected a server's address such as http://localhost:8000, got {request.model!r}"
        )
    atomic_files.require_writable_folder(request.folder, "the report")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of intended settings
    check_served_request(request)
    path = demo.resolve_model_path(served.tokenizer)
    config = read_config(path, gguf_file=request.gguf_file)
    check_request(request, path, config)
    tokenizer = read_tokenizer(path, gguf_file=request.gguf_file)
    tokenizer.model_max_length = 10**9  # the server's limit counts
    ids = tokenizer(_PROBE).input_ids
    server = open_server(request.model, served.served_model, ids, served.timeout)
    with add_write_advice(request.folder), without_foreign_bars():
        session = ServedSession(request, path, config, tokenizer, server, served)
        return measure(session, started, show)


def run_two(
    request: EvalRequest,
    other: str,
    served: ServedRequest,
    show: Callable[[str], object] | None = None,
) -> RunRecord:
    """Evaluate two servers on the same questions, and write a report that compares them.

    Each has its own report and answers in the folders `a` and `b` of the request's.

    Args:
        request: What to evaluate; its model is the first server's address.
        other: The second server's address.
        served: How both are asked.
        show: See `run`.

    Returns:
        The results of both, labelled A and B.

    Raises:
        ValueError: See `evaluate_server`.
        OSError: See `evaluate_server`.
    """
    atomic_files.require_writable_folder(request.folder, "the report")
    first, second = (
        run(replace(request, model=url, folder=request.folder / label.lower()), served)
        for label, url in (("A", request.model), ("B", other))
    )
    both = add_other_weights(relabelled(first, {SERVED: "A"}), second, {SERVED: "B"})
    both["run"]["servers"] = {"A": first["run"]["server"], "B": second["run"]["server"]}
    both["run"]["name"] = f"{first['run']['name']} (A), {second['run']['name']} (B)"
    both["run"]["command"] = request.command
    overview: list[str] = []
    write_report(both, request.folder, overview.append)
    if show is not None:
        show(*overview)
    return both
