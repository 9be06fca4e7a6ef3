"""Simulated results of an evaluation, in which each method's true scores are known."""

import math
import random

from rope_patch.evaluation import RunStatistics

TRAINED, BLOCK, WINDOW = 4096, 64, 512
LENGTHS = (2048, 4096, 6144, 8192)
LABELS = ("none", "yarn ×2", "linear ×2")

# How often each method is right: within the trained length, and beyond.
CHANCES = {"none": (0.98, 0.02), "yarn ×2": (0.97, 0.96), "linear ×2": (0.8, 0.5)}

# Perplexity of each method within the trained length, and beyond.
PERPLEXITIES = {"none": (16.0, 200.0), "yarn ×2": (16.2, 15.5), "linear ×2": (20.0, 21.0)}


def method(label):
    """Return a patched method's entry."""
    unscaled = [10000.0 ** (-i / 16) for i in range(16)]
    inv_freq = [f / (1 + i / 15) for i, f in enumerate(unscaled)]
    frequencies = {"unscaled": unscaled, "inv_freq": inv_freq, "attention_factor": 1.07}
    return {
        "label": label,
        "method": label.split()[0],
        "paper": "YaRN, arXiv:2309.00071",
        "factor": 2.0,
        "length": 8192,
        "follows_length": False,
        "options": {"factor": 2.0},
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
        "frequencies": {"all": frequencies},
    }


def samples(task, chances=(1.0, 1.0), *, lengths=LENGTHS, depths=(10, 50, 90), count=30, label=""):
    """Return a method's samples of a task, right with a chance within and beyond."""
    rows = []
    for length in lengths:
        rng = random.Random(f"{task}/{label}/{length}")
        for i in range(count):
            hit = rng.random() < chances[length > TRAINED]
            rows.append(
                {
                    "id": f"42/{task}/{length}/{i}",
                    "text": i // 2,
                    "length": length,
                    "depth": depths[i % len(depths)],
                    "score": float(hit),
                    "log_likelihood": -0.5 if hit else -12.0,
                    "target_tokens": 4,
                }
            )
    return rows


def retrieval(task, labels=LABELS, **options):
    """Return a task's entry with all methods."""
    lengths = options.get("lengths", LENGTHS)
    depths = options.get("depths", (10, 50, 90))
    return {
        "task": task,
        "lengths": list(lengths),
        "depths": [depth for depth in depths if depth is not None],
        "samples": {
            label: samples(task, CHANCES[label], label=label, **options) for label in labels
        },
    }


def losses(label, documents=2, tokens=8192):
    """Return mean losses of blocks: the same text for all methods, at the method's level."""
    documents_losses = []
    for i in range(documents):
        text_rng = random.Random(f"document {i}")
        method_rng = random.Random(f"{label} {i}")
        levels = [PERPLEXITIES[label][k * BLOCK >= TRAINED] for k in range(tokens // BLOCK)]
        documents_losses.append(
            [
                math.log(level) + text_rng.gauss(0, 0.25) + method_rng.gauss(0, 0.02)
                for level in levels
            ]
        )
    return documents_losses


def perplexity(labels=LABELS):
    """Return the entry of perplexity with all parts."""
    ends = range(2 * WINDOW, 8193, 2 * WINDOW)
    steps = {length: [[2.9 - length / 1e4] * 6] * 2 for length in LENGTHS}
    return {
        "documents": [
            {"name": "emma", "tokens": 8192, "sha256": "ab" * 32},
            {"name": "persuasion", "tokens": 8192, "sha256": "cd" * 32},
        ],
        "block": BLOCK,
        "losses": {label: losses(label) for label in labels},
        "window": WINDOW,
        "control": {
            "context": 2048,
            "losses": [{end: math.log(15.6) + 0.1 * i for end in ends} for i in range(2)],
        },
        "key_tokens": {
            "evaluator": "none",
            "short_context": 1024,
            "positions": [[1500, 3000, 5000, 7000], [2000, 6000]],
            "losses": {label: [[1.0, 1.1, 1.2, 1.3], [0.9, 1.4]] for label in labels},
        },
        "sliding": {
            "stride": 256,
            "lengths": list(LENGTHS),
            "losses": {
                label: {str(n): [list(d) for d in documents] for n, documents in steps.items()}
                for label in labels
            },
        },
    }


def short(task, labels=LABELS, count=80):
    """Return a short task's entry: nearly the same scores under every method."""
    rng = random.Random(task)
    base = [int(rng.random() < 0.6) for _ in range(count)]
    scores: dict[str, list[int | None]] = {}
    for label in labels:
        method_rng = random.Random(f"{task} {label}")
        flipped = 0 if label == "none" else 0.03
        scores[label] = [1 - x if method_rng.random() < flipped else x for x in base]
    scores[labels[-1]][0] = None
    return {"task": task, "n": count, "chance": 0.25, "samples": scores}


def cost(labels=LABELS):
    """Return the entry of time and memory."""
    one = {"prompt_seconds": 2.0, "prompt_tokens": 4096, "token_seconds": 0.041}
    one |= {"cache_bytes": 94371840, "peak_bytes": 3_000_000_000}
    ratios = {"prompt_ratio": [1.0, 1.01, 1.03], "token_ratio": [0.99, 1.0, 1.02]}
    first = {"prompt_ratio": [1.0, 1.0, 1.0], "token_ratio": [1.0, 1.0, 1.0]}
    return {label: one | (ratios if i else first) for i, label in enumerate(labels)}


def results():
    """Return a whole evaluation: the plain model, a good method and a poor one."""
    rotation = {"head_dim": 32, "rotary_dim": 16, "theta": 1e4, "trained_length": TRAINED}
    run = {
        "model": "tiny",
        "name": "Tiny-1B",
        "architecture": "LlamaForCausalLM",
        "parameters": 1234567,
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
        "trained_length": TRAINED,
        "geometry": {"all": rotation},
        "seed": 42,
        "date": "2026-11-21T09:30:00+00:00",
        "seconds": {"perplexity": 40.2, "total": 3731.9},
        "peak_memory": 2400000000,
        "weights": "sampled-sha256:0123",
        "versions": {"torch": "2.13.0"},
        "command": "rope-patch eval tiny --method none --method yarn",
        "git_revision": "abc123",
        "hardware": {"cpu": "a CPU", "cores": 2, "memory": 16e9, "gpu": ["a GPU"]},
        "precision": 0.05,
        "per_text": 2,
        "not_run": ["rp_qa_1: its data set is not there"],
    }
    control = {
        "task": "rp_niah_single_1",
        "lengths": [2048],
        "depths": [10, 50, 90],
        "samples": {"none": samples("rp_niah_single_1", (0.0, 0.0), lengths=(2048,), count=12)},
    }
    return {
        "run": run,
        "methods": [{"label": "none", "method": None}, method("yarn ×2"), method("linear ×2")],
        "perplexity": perplexity(),
        "retrieval": [
            retrieval("rp_niah_single_1"),
            retrieval("rp_niah_multikey_1_ll"),
            retrieval("rp_vt", depths=(None,)),
        ],
        "control": [
            control,  # without a kind, as in older results
            control | {"kind": "closed book"},
        ],
        "short": [short("arc"), short("cloze")],
        "cost": cost(),
        "harness": [
            {
                "task": "lambada",
                "metrics": {label: {"acc": {"value": 0.5, "stderr": 0.02}} for label in LABELS},
            }
        ],
    }


def many(count=14):
    """Return a small evaluation of many methods, each a bit worse than the one before.

    The last one has the first one's numbers everywhere.
    """
    measured = results()
    labels = [f"method {i}" for i in range(count)]
    base = retrieval("rp_niah_single_1", lengths=(2048, 8192), count=12)
    plain, good = base["samples"]["none"], base["samples"]["yarn ×2"]
    base["samples"] = {"none": plain} | {
        label: [s | {"log_likelihood": s["log_likelihood"] - i % (count - 1)} for s in good]
        for i, label in enumerate(labels)
    }
    losses_of = {"none": losses("none")} | {
        label: [[x + 0.01 * (i % (count - 1)) for x in d] for d in losses("yarn ×2")]
        for i, label in enumerate(labels)
    }
    scores = short("arc")["samples"]
    arc = short("arc") | {
        "samples": {"none": scores["none"]} | dict.fromkeys(labels, scores["yarn ×2"])
    }
    measured["perplexity"] |= {"losses": losses_of, "key_tokens": None, "sliding": None}
    return measured | {
        "methods": [measured["methods"][0], *(method(label) for label in labels)],
        "retrieval": [base],
        "short": [arc],
        "cost": cost(("none", *labels)),
        "harness": [],
    }


def statistics_of(tasks, trained, control=(), **run):
    """Return the statistics of a run with these samples by task and method.

    Args:
        tasks: The samples of each method, by task; `none` is the plain model.
        trained: The trained length.
        control: Entries of questions without their answers in the text.
        **run: More of what is known of the run.
    """
    labels = next(iter(tasks.values()))
    return RunStatistics(
        {
            "run": {"trained_length": trained, **run},
            "methods": [{"label": m, "method": None if m == "none" else m} for m in labels],
            "retrieval": [
                {
                    "task": task,
                    "lengths": sorted({row["length"] for rows in of.values() for row in rows}),
                    "depths": [50],
                    "samples": of,
                }
                for task, of in tasks.items()
            ],
            "control": list(control),
        }
    )
