"""Needle retrieval at the target length during training, by `rope_patch.evaluation`."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import torch

from rope_patch.patching.dynamic import hooks, sequence_lengths
from rope_patch.patching.undo_log import UndoLog
from rope_patch.training.checkpoints import explain_write_errors
from rope_patch.training.monitor import read_lines
from rope_patch.utils import atomic_files

SCORES = "retrieval.jsonl"
_TASK = "rp_niah_single_2_ll"  # one forward pass a needle
_DEPTHS = [10, 50, 90]


class Needles:
    """Measure the retrieval of the same needles repeatedly during training.

    Args:
        tokenizer: The model's tokenizer.
        length: Tokens per sample.
        samples: Number of samples.
        every: Steps between measurements.
        seed: Seed of the samples.
        folder: The run's folder; scores are appended to its `retrieval.jsonl`.
        main: Whether this process writes.

    Raises:
        ValueError: lm-eval is not installed, or nothing fits into the length.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        length: int,
        samples: int,
        every: int,
        seed: int,
        folder: Path,
        main: bool,
    ) -> None:
        try:
            from rope_patch.evaluation.measures import lm_eval_tasks
        except ImportError as error:
            raise ValueError(
                f"{error.name} is not installed, which retrieval_steps needs: pip install "
                "'rope-patch[eval]'"
            ) from error
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.tokenizer, self.length, self.samples = tokenizer, length, samples
        self.folder, self.main = folder, main
        self.tasks = lm_eval_tasks.build(_TASK, tokenizer, [length], samples, _DEPTHS, seed=seed)
        self.every = every

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether to measure after this step."""
        return step == last_step or step % self.every == 0

    def measure(self, model: Any, step: int) -> dict[str, float]:
        """Score the model as it is now, and append the scores to the file.

        Every process computes all samples, because a sharded model needs all processes.

        Args:
            model: The model without DDP's wrapper; its training mode is restored.
            step: Optimizer steps taken so far.

        Returns:
            retrieval_hits (share of needles found) and retrieval_probability (of the right answer,
            geometric mean over its tokens); empty on all but the main process.
        """
        from rope_patch.evaluation.language_model import LongContextLM
        from rope_patch.evaluation.measures import lm_eval_tasks

        training, swaps = model.training, UndoLog()
        model.eval()
        try:
            # These samples are not split, even if training splits sequences over processes.
            for module in (hooks, sequence_lengths):
                swaps.set(module, "context_parallel_group", lambda: None)
            # lm-eval ties weights again, which fails under PEFT's wrapper.
            swaps.set(model, "tie_weights", lambda *_, **__: None)
            lm = LongContextLM(model, self.tokenizer, self.length, {})
            with (
                torch.no_grad(),
                contextlib.redirect_stderr(io.StringIO()),
            ):  # lm-eval's progress bars
                results = lm_eval_tasks.evaluate(lm, self.tasks)
        finally:
            swaps.undo()
            model.train(training)
        if not results:  # lm-eval returns them on the main process only
            return {}
        rows = lm_eval_tasks.scores(results, lm.failures)
        if failed := [row["error"] for row in rows if row["score"] is None]:
            raise RuntimeError(f"{len(failed)} of {len(rows)} needles failed: {failed[0]}")
        hits = sum(score for row in rows if (score := row["score"]) is not None)
        probability = lm_eval_tasks.answer_probability(rows)
        assert probability is not None, f"{_TASK} measures every answer's likelihood"
        scores = {"retrieval_hits": hits / len(rows), "retrieval_probability": probability}
        if self.main:
            line = {"step": step, "length": self.length, "samples": len(rows), **scores}
            path = self.folder / SCORES
            with (
                explain_write_errors(self.folder, SCORES),
                path.open("a", encoding="utf-8") as file,
            ):
                file.write(json.dumps(line) + "\n")
        return scores


def needles_of(run: Any) -> Needles | None:
    """Return the needle measurement of a run's recipe, or None."""
    extension, prepared = run.settings.extension, run.prepared
    if not extension.retrieval_steps:
        return None
    length = extension.retrieval_length
    return Needles(
        prepared.tokenizer,
        length=prepared.target_length if length is None else length,
        samples=extension.retrieval_samples,
        every=extension.retrieval_steps,
        seed=run.settings.training.seed,
        folder=run.folder,
        main=run.is_main,
    )


def read_scores(folder: Path) -> list[dict[str, Any]]:
    """Return the latest scores of each step, in order of steps."""
    by_step = {row["step"]: row for row in read_lines(folder / SCORES)}
    return [by_step[step] for step in sorted(by_step)]


def drop_scores(folder: Path, steps_done: int) -> None:
    """Delete scores of later steps than the one resumed from; all scores if that is 0."""
    path = folder / SCORES
    if path.is_file():
        lines = [line for line in read_lines(path) if steps_done and line["step"] <= steps_done]
        atomic_files.atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))
