"""Monitoring of a training run: progress bar, log file, divergence guard, needles."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from rope_patch.patching import positions
from rope_patch.patching.dynamic import hooks
from rope_patch.patching.undo_log import UndoLog
from rope_patch.training.checkpoints import explain_write_errors, latest_complete
from rope_patch.utils import atomic_files
from rope_patch.utils.installation import install_hint
from rope_patch.utils.provenance import peak_memory
from rope_patch.utils.terminal import progress_bar

logger = logging.getLogger("rope_patch")

LOG = "log.jsonl"
_LOSS_WINDOW = 20  # steps in the mean loss that a rise is measured from
_MIN_STEPS = 5  # steps from which on the mean counts


class TrainingStopped(ValueError):
    """Training diverged; the last checkpoint holds the state before."""


class DivergenceGuard:
    """Stop a run whose loss explodes or is not finite, before the optimizer step.

    Args:
        max_rise: Stop if the loss exceeds the recent mean by more than this many nats.
        folder: The run's folder, to name the checkpoint to resume from.
        on_stop: Called before raising.
    """

    def __init__(
        self, max_rise: float, folder: Path, on_stop: Callable[[], Any] = lambda: None
    ) -> None:
        self.max_rise = max_rise
        self.folder = folder
        self.on_stop = on_stop
        self.recent_losses: collections.deque[float] = collections.deque(maxlen=_LOSS_WINDOW)

    def check(self, step: int, loss: float, norm: float, rows: Sequence[dict[str, Any]]) -> None:
        """Raise if a step's loss or gradients are bad, before they are applied.

        Args:
            step: The step's number, from 1.
            loss: The loss over all processes.
            norm: The gradient norm over all processes.
            rows: The `row` of each row that this process computed the loss from.

        Raises:
            TrainingStopped: Names the step and the data.
        """
        self.require_finite(step, loss, norm, rows)
        mean = (
            statistics.fmean(self.recent_losses)
            if len(self.recent_losses) >= _MIN_STEPS
            else math.inf
        )
        if loss > mean + self.max_rise:
            problem = (
                f"the loss rose to {loss:.4g}, from {mean:.4g} over the last "
                f"{len(self.recent_losses)} "
                f"steps (max_loss_rise: {self.max_rise:g})"
            )
            self._stop(step, problem, rows)
        self.recent_losses.append(loss)

    def require_finite(
        self, step: int, loss: float, norm: float, rows: Sequence[dict[str, Any]]
    ) -> None:
        """Raise if a step's loss or gradients are not finite; see `check`."""
        if not math.isfinite(loss):
            self._stop(step, f"the loss is {loss}", rows)
        if not math.isfinite(norm):
            self._stop(step, f"the gradients' norm is {norm} (the loss {loss:.4g})", rows)

    def _stop(self, step: int, problem: str, rows: Sequence[dict[str, Any]]) -> NoReturn:
        self.on_stop()
        last = latest_complete(self.folder)
        advice = "look at those rows, lower the learning rate, or warm up longer"
        if rows and all(row.get("targets") == 0 for row in rows):
            advice = (
                "no token of those rows has a loss, because all labels are -100: expected some "
                "that are tokens' ids; look at labels in the data, or leave them out"
            )
        raise TrainingStopped(
            f"step {step} was not taken: {problem}. Its rows: {_describe_rows(rows)}. "
            + (f"{last} is whole" if last else "There is no checkpoint yet")
            + f"; {advice}"
        )


class TrainingProgress:
    """Show progress on stderr, and log every step's numbers in the run's `log.jsonl`.

    Args:
        folder: The run's folder.
        steps: Total steps.
        steps_done: Steps taken before; log lines of later steps are deleted.
        tokens: Tokens per step, over all processes.
        main: Whether this process writes.
    """

    def __init__(self, folder: Path, steps: int, steps_done: int, tokens: int, main: bool) -> None:
        self.path = folder / LOG
        self.tokens = tokens
        self.main = main
        self._first, self._last = steps_done + 1, steps
        self.began = self.last_step_time = time.monotonic()
        self.bar = progress_bar(
            desc="fine-tuning",
            total=steps,
            initial=steps_done,
            unit="step",
            disable=not main,
        )
        if main:
            lines = [line for line in read_log(folder) if line["step"] <= steps_done]
            with explain_write_errors(folder, LOG):
                atomic_files.atomic_write(
                    self.path, "".join(json.dumps(line) + "\n" for line in lines)
                )

    def record_step(self, step: int, **metrics: float) -> dict[str, float]:
        """Record a step.

        Args:
            step: The step's number, from 1.
            **metrics: loss, its terms, grad_norm, learning_rate.

        Returns:
            These with the total tokens so far, tokens_per_second, and memory in GB.
        """
        now = time.monotonic()
        line = {
            "step": step,
            **metrics,
            "tokens": step * self.tokens,
            "tokens_per_second": round(self.tokens / max(now - self.last_step_time, 1e-9), 1),
            "memory_gb": round(peak_memory() / 1e9, 3),
        }
        self.last_step_time = now
        if self.main:
            with (
                explain_write_errors(self.path.parent, LOG),
                self.path.open("a", encoding="utf-8") as log,
            ):
                log.write(json.dumps(line) + "\n")
        postfix = {
            "loss": f"{metrics.get('loss', math.nan):.4f}",
            "tokens": f"{line['tokens']:,}",
            "tok/s": f"{line['tokens_per_second']:,.0f}",
            "GB": f"{line['memory_gb']:.1f}",
        }
        if self.main and step in (self._first, self._last) and not sys.stderr.isatty():
            # A log has a line of the bar a minute, and shorter runs would show no loss.
            logger.info("step %d of %d: loss %s", step, self._last, postfix["loss"])
        self.bar.set_postfix(postfix, refresh=False)
        self.bar.update()
        return line

    def pause(self) -> None:
        """Exclude the time since the last step from the next step's speed."""
        self.last_step_time = time.monotonic()

    def close(self) -> None:
        """Close the progress bar."""
        self.bar.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return a run's log without a truncated last line."""
    return read_lines(folder / LOG)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, without a truncated last line."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _describe_rows(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "unknown"
    return "; ".join(f"row {row['index']} of {', '.join(row['documents'])}" for row in rows)


SCORES = "retrieval.jsonl"
_TASK = "rp_niah_single_2_ll"  # its needles take one forward pass each
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
                f"{error.name} is not installed, which retrieval_steps needs: "
                f"{install_hint('eval')}"
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
            for module in (hooks, positions):
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
