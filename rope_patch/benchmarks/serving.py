"""Benchmark of the plugin for vLLM: what it costs, and what it gives, beside static YaRN.

    python -m rope_patch.benchmarks.serving speed demo --trained-length 512 --out FILE
    python -m rope_patch.benchmarks.serving quality demo --out FILE

Both servers of `speed` are children of this one process and answer the same batches in turns,
because times of different runs do not compare. CPU time is that of a server's own processes: other
work on the machine disturbs it less than the time that passes. `quality` asks the plain model,
static YaRN and the plugin the same short questions and the same questions on a long text.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoConfig, AutoTokenizer

from rope_patch import tasks
from rope_patch.pretrained import demo
from rope_patch.statistics.bootstrap import bootstrap_mean
from rope_patch.statistics.intervals import Interval, accuracy
from rope_patch.tasks import chat_template, short
from rope_patch.utils import atomic_files, provenance
from rope_patch.utils.terminal import progress_bar

PLAIN, STATIC, PLUGIN = "plain", "yarn", "dynamic-yarn"
FACTOR = 4
# Prompts of a batch in parts of the longest length; most requests of a mixed batch are short.
_SHARES = (0.01, 0.01, 0.02, 0.02, 0.03, 0.05, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.35, 0.5)
_NEW_TOKENS = 32
_ANSWER_TOKENS = 32  # a number and the words around it

app = typer.Typer(add_completion=False)
Model = Annotated[str, typer.Argument(help="A folder, a name on the Hub, or `demo`.")]
TrainedLength = Annotated[
    int | None,
    typer.Option(help="Tokens; the config's max_position_embeddings if left out.", min=1),
]
Out = Annotated[Path | None, typer.Option(help="A file for the results as JSON.")]


@app.command()
def speed(
    model: Model,
    trained_length: TrainedLength = None,
    pairs: Annotated[int, typer.Option(help="Batches that both servers answer.", min=5)] = 8,
    out: Out = None,
) -> None:
    """Time mixed batches under the plugin and under vLLM's own static YaRN, in turns."""
    path = demo.resolve_model_path(model)
    trained = _trained_length(path, trained_length)
    times: dict[str, dict[str, list[float]]] = {
        method: {"seconds": [], "cpu_seconds": []} for method in (STATIC, PLUGIN)
    }
    servers, processes = {}, {}
    with ExitStack() as stack:
        for method in times:
            others = _children()
            servers[method] = stack.enter_context(
                _serve(path, method, trained, FACTOR * trained, enable_prefix_caching=False)
            )
            processes[method] = _children() - others
        rounds = progress_bar(range(-1, pairs), desc="pairs of batches")
        for round_number in rounds:  # the first one warms both up
            order = list(servers) if round_number % 2 else list(servers)[::-1]
            for method in order:
                cpu_before = _cpu_seconds(processes[method])
                taken = _time_batch(servers[method], round_number, FACTOR * trained)
                if round_number >= 0:
                    times[method]["seconds"].append(taken)
                    cpu = _cpu_seconds(processes[method]) - cpu_before
                    times[method]["cpu_seconds"].append(cpu)
    ratios = {}
    for unit, name in (("seconds", "time"), ("cpu_seconds", "CPU time")):
        mean = _log_ratio(times[PLUGIN][unit], times[STATIC][unit])
        ratios[unit] = ratio = {
            bound: math.exp(getattr(mean, bound)) for bound in ("estimate", "low", "high")
        }
        print(
            f"{PLUGIN} takes {ratio['estimate']:.3f} times (95%: {ratio['low']:.3f} to "
            f"{ratio['high']:.3f}) the {name} of {STATIC}, {pairs} pairs of batches"
        )
    _write(out, model, {"trained_length": trained, "times": times, "ratios": ratios})


@app.command()
def quality(
    model: Model,
    trained_length: TrainedLength = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of the long texts; 1.5 times the trained length.", min=1),
    ] = None,
    questions: Annotated[int, typer.Option(help="Of each short task.", min=1)] = 40,
    texts: Annotated[int, typer.Option(help="Long texts, with four questions each.")] = 3,
    out: Out = None,
) -> None:
    """Compare short tasks and retrieval from long texts: plain, static YaRN, the plugin."""
    path = demo.resolve_model_path(model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    trained = _trained_length(path, trained_length)
    length = trained * 3 // 2 if length is None else length
    retrieval = "rp_niah_multikey_1"
    tests = {name: _rows(short.config(name), samples=questions) for name in short.names()}
    documents = _rows(
        tasks.config(retrieval),
        tokenizer=tokenizer,
        length=length,
        samples=4 * texts,
        per_text=4,
        depths=[10, 30, 50, 70, 90],
        chat=True,
    )
    results: dict[str, Any] = {}
    for method in (PLAIN, STATIC, PLUGIN):
        with _serve(path, method, trained, length) as server:
            hits = {name: _choose(server, tokenizer, rows) for name, rows in tests.items()}
            answers = _answer(server, tokenizer, documents, tasks.config(retrieval))
        results[method] = {"short": hits, "long": answers}
        choices = accuracy([float(hit) for each in hits.values() for hit in each])
        retrievals = accuracy(answers, [row["text"] for row in documents])
        print(
            f"{method}: short tasks {_as_text(choices)}, retrieval at {length:,} tokens "
            f"{_as_text(retrievals)}",
            flush=True,
        )
        request = {"trained_length": trained, "length": length}
        _write(out, model, {**request, "results": results})


def _children() -> set[Any]:
    """Return the processes that this one has started, and theirs."""
    import psutil

    return set(psutil.Process().children(recursive=True))


def _cpu_seconds(processes: set[Any]) -> float:
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(each.user + each.system for each in times)


def _log_ratio(ours: list[float], others: list[float]) -> Interval:
    return bootstrap_mean([[math.log(a / b) for a, b in zip(ours, others, strict=True)]])


@contextmanager
def _serve(path: str, method: str, trained: int, longest: int, **options: Any) -> Iterator[Any]:
    """Start vLLM with a method that can reach `FACTOR` times the trained length, and end it."""
    from vllm import LLM

    theta = AutoConfig.from_pretrained(path).rope_parameters["rope_theta"]
    extended = {
        "rope_type": method,
        "rope_theta": theta,
        "factor": float(FACTOR),
        "original_max_position_embeddings": trained,
    }
    # vLLM multiplies it by the factor of methods that it does not know.
    positions = trained if method == PLUGIN else FACTOR * trained
    overrides: dict[str, Any] = {"max_position_embeddings": positions}
    if method != PLAIN:
        overrides["rope_parameters"] = extended
    server = LLM(path, dtype="float32", max_model_len=longest, hf_overrides=overrides, **options)
    try:
        yield server
    finally:
        server.llm_engine.engine_core.shutdown()
        gc.collect()


def _time_batch(server: Any, seed: int, longest: int) -> float:
    """Return the seconds that a batch of random texts takes."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [rng.randrange(100, 10_000) for _ in range(int(share * longest))]}
        for share in _SHARES
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    before = time.perf_counter()
    server.generate(prompts, greedy, use_tqdm=False)
    return time.perf_counter() - before


def _trained_length(path: str, given: int | None) -> int:
    config = AutoConfig.from_pretrained(path)
    return config.max_position_embeddings if given is None else given


def _rows(config: dict[str, Any], **metadata: Any) -> list[dict[str, Any]]:
    return list(config["custom_dataset"](**{**config["metadata"], **metadata})["test"])


def _choose(server: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> list[bool]:
    """Return for each question whether the right choice is the likeliest."""
    from vllm import SamplingParams

    prompts, starts = [], []
    for row in rows:
        start = len(tokenizer(row["input"])["input_ids"])
        for choice in row["choices"]:
            prompts.append(tokenizer(f"{row['input']} {choice}")["input_ids"])
            starts.append(start)
    outputs = server.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        use_tqdm=progress_bar,
    )
    sums = iter(
        [
            sum(output.prompt_logprobs[i][prompt[i]].logprob for i in range(start, len(prompt)))
            for output, prompt, start in zip(outputs, prompts, starts, strict=True)
        ]
    )
    likelihoods = [[next(sums) for _ in row["choices"]] for row in rows]
    return [
        each.index(max(each)) == row["gold"] for each, row in zip(likelihoods, rows, strict=True)
    ]


def _answer(
    server: Any, tokenizer: Any, rows: list[dict[str, Any]], config: dict[str, Any]
) -> list[float]:
    """Return the scores of greedy answers."""
    from vllm import SamplingParams

    prompts = [chat_template.render(tokenizer, row["input"], row["gen_prefix"]) for row in rows]
    greedy = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS)
    scores = []
    # One by one, so that a text is read once.
    for row, prompt in progress_bar(zip(rows, prompts, strict=True), total=len(rows), desc="texts"):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        (output,) = server.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        scores.append(config["process_results"](row, [output.outputs[0].text])["score"])
    return scores


def _as_text(interval: Interval) -> str:
    return (
        f"{interval.estimate:.0%} ({interval.low:.0%} to {interval.high:.0%}, n = {interval.n:.0f})"
    )


def _write(out: Path | None, model: str, results: dict[str, Any]) -> None:
    if out is None:
        return
    facts = {"versions": provenance.versions(), "hardware": provenance.hardware()}
    atomic_files.write_json(out, {"model": model, **results, **facts, "date": provenance.now()})


if __name__ == "__main__":
    app()
