"""Needles at the target length while a model trains: the retrieval of `rope_patch.evaluation`."""

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
    """Looks for the same needles again and again, as a model learns.

    Args:
        tokenizer: The model's.
        length: Tokens of a sample.
        samples: How many.
        every: Steps between measurements.
        seed: Of the samples.
        folder: The run's folder; scores are kept there, in `retrieval.jsonl`.
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
        """Whether this is a step to measure after."""
        return step == last_step or step % self.every == 0

    def measure(self, model: Any, step: int) -> dict[str, float]:
        """Scores the model as it is now, and writes that down.

        Every process goes through all samples, since a sharded model needs them all.

        Args:
            model: The model, not wrapped by DDP; its mode is as before afterwards.
            step: Optimizer steps that were taken.

        Returns:
            retrieval_hits (share of needles found) and retrieval_probability (of the right answer,
            geometric mean over its tokens); nothing on other processes than the main one.
        """
        from rope_patch.evaluation.language_model import LongContextLM
        from rope_patch.evaluation.measures import lm_eval_tasks

        training, swaps = model.training, UndoLog()
        model.eval()
        try:
            # Where processes share sequences in training, each has the whole of these.
            for module in (hooks, sequence_lengths):
                swaps.set(module, "context_parallel_group", lambda: None)
            # lm-eval ties weights again, which does not find them behind LoRA.
            swaps.set(model, "tie_weights", lambda *_, **__: None)
            lm = LongContextLM(model, self.tokenizer, self.length, {})
            with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # its bars
                results = lm_eval_tasks.evaluate(lm, self.tasks)
        finally:
            swaps.undo()
            model.train(training)
        if not results:  # lm-eval gives them to the main process alone
            return {}
        rows = lm_eval_tasks.scores(results, lm.failures)
        if failed := [row["error"] for row in rows if row["score"] is None]:
            raise RuntimeError(f"{len(failed)} of {len(rows)} needles failed: {failed[0]}")
        scores = {
            "retrieval_hits": sum(row["score"] for row in rows) / len(rows),
            "retrieval_probability": lm_eval_tasks.answer_probability(rows),
        }
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
    """The needles that a `Run`'s recipe asks for, or None."""
    asked, prepared = run.settings.extension, run.prepared
    if not asked.retrieval_steps:
        return None
    return Needles(
        prepared.tokenizer,
        length=asked.retrieval_length or prepared.target_length,
        samples=asked.retrieval_samples,
        every=asked.retrieval_steps,
        seed=run.settings.training.seed,
        folder=run.folder,
        main=run.main,
    )


def read_scores(folder: Path) -> list[dict[str, Any]]:
    """What was measured, the last word on each step, in their order."""
    by_step = {said["step"]: said for said in read_lines(folder / SCORES)}
    return [by_step[step] for step in sorted(by_step)]


def drop_scores(folder: Path, done: int) -> None:
    """Drop what was measured after a step that a run goes on from; everything if that is 0."""
    path = folder / SCORES
    if path.is_file():
        lines = [line for line in read_lines(path) if done and line["step"] <= done]
        atomic_files.atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))
