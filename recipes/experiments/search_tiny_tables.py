"""Tables and statements about search_tiny.py's results, all computed from the numbers."""

from __future__ import annotations

import math
from typing import Any

from train_tiny import STAGES, TRAINED_LENGTH

from rope_patch.methods.ntk_by_parts import yarn_mscale

AFTER = (10, 20, 40, 100, 200)  # evaluations
EVOLUTIONS = ("longrope2", "longrope")
SHARE = 5  # curve should need at most a fifth of an evolution's evaluations
EARLY = "curve early"  # curve's best after a fifth of the evaluations
LEVEL = 0.05

Case = dict[str, Any]
History = list[dict[str, Any]]


def best_after(history: History, count: int) -> float | None:
    """Return the best fitness of a strategy's first evaluations; None if all were stopped early.

    Entry 0, YaRN, is excluded: the search measures it for every strategy.
    """
    fitnesses = [e["fitness"] for e in history[1 : count + 1] if e["complete"]]
    return min(fitnesses, default=None)


def evaluations_until(history: History, fitness: float | None) -> int | None:
    """Return the number of evaluations until a strategy reached a fitness; None if never."""
    if fitness is None:
        return None
    numbers = (e["number"] for e in history[1:] if e["complete"] and e["fitness"] <= fitness)
    return next(numbers, None)


def verdict(against: dict[str, Any] | None, metric: str) -> str:
    """Return "better" or "worse" than YaRN with 95% confidence, "same", "open" or "failed"."""
    if against is None:
        return "failed"
    low, high = against["interval"]
    if None in (low, high) and metric == "nll":  # too few texts for a bound
        return "open"
    if metric == "nll" and low == high == 0:
        return "same"
    if metric == "nll":
        return "better" if high < 0 else "worse" if low > 0 else "open"
    if against["p"] >= LEVEL:
        return "open"
    return "better" if against["accuracy"] > 0 else "worse"


def summary(cases: dict[str, Case]) -> dict[str, Any]:
    """Return the numbers of the tables and statements by case."""
    summaries = {}
    for title, case in cases.items():
        strategies = {}
        for name, history in case["history"].items():
            count_all = len(history) - 1
            best = best_after(history, count_all)
            ended = next((n for n in AFTER if n >= count_all), count_all)
            strategies[name] = {
                "evaluations": count_all,
                "given up": sum(not entry["complete"] for entry in history[1:]),
                "best after": {n: best_after(history, n) for n in AFTER if n <= ended},
                "best": best,
                "best at": evaluations_until(history, best),
            }
        needs = {}
        for name in EVOLUTIONS:
            evolution = strategies[name]
            count = evaluations_until(case["history"]["curve"], evolution["best"])
            fifth = count is not None and SHARE * count <= evolution["evaluations"]
            needs[name] = {"evaluations": count, "at most a fifth": fifth}
        summaries[title] = {
            "yarn": case["history"]["curve"][0]["fitness"],
            "strategies": strategies,
            "curve needs": needs,
            "against yarn": {
                name: {kind: verdict(row["against yarn"], kind) for kind in ("nll", "recall")}
                for name, row in case["held_out"].items()
                if name != "yarn"
            },
        }
    return summaries


def format_nats(value: float | None) -> str:
    """Format nats."""
    return "given up" if value is None else f"{value:.4f}"


def markdown(rows: list[list[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    lines = [rows[0], [":--"] + ["--:"] * (len(rows[0]) - 1), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def progress_table(case_summary: dict[str, Any]) -> str:
    """Return the table of each strategy's best so far, and how soon curve was as good."""
    rows = [["", *(f"after {n}" for n in AFTER), "best", "at", "of", "given up", "curve needs"]]
    for name, strategy in case_summary["strategies"].items():
        after = [
            format_nats(strategy["best after"][n]) if n in strategy["best after"] else ""
            for n in AFTER
        ]
        needs = case_summary["curve needs"].get(name)
        needed_text = "" if needs is None else str(needs["evaluations"] or "not reached")
        counts = [strategy["best at"] or "", strategy["evaluations"], strategy["given up"]]
        rows.append([name, *after, format_nats(strategy["best"]), *map(str, counts), needed_text])
    return markdown(rows)


def held_out_table(case: Case) -> str:
    """Return the table of held-out results of the strategies and of unsearched methods."""
    rows = [
        ["", "nats", "95%", "right", "recall", "from YaRN, nats", "95%", "from YaRN, recall", "p"]
    ]
    for name, row in case["held_out"].items():
        if "error" in row:
            rows.append([name, row["error"]] + [""] * 7)
            continue
        low, high = row["interval"]
        cells = [f"{row['nll']:.4f}", f"{low:.4f} to {high:.4f}"]
        cells += [f"{row['hits']} of {row['answers']}", f"{row['accuracy']:.3f}"]
        against = row["against yarn"]
        if name == "yarn":
            cells += [""] * 4
        else:
            bounds = against["interval"]  # None where texts are too few for a bound
            interval = "none" if None in bounds else "{:+.4f} to {:+.4f}".format(*bounds)
            cells += [f"{against['nll']:+.4f}", interval]
            cells += [f"{against['accuracy']:+.3f}", f"{against['p']:.2g}"]
        rows.append([name, *cells])
    return markdown(rows)


def statements(cases: dict[str, Case], summaries: dict[str, Any]) -> str:
    """Return statements about what holds and what does not."""
    lines = ["With 95% confidence, each comparison by itself:", ""]
    for title, case in cases.items():
        yarn = case["held_out"]["yarn"]
        missed = yarn["answers"] - yarn["hits"]
        parts = [f"YaRN misses {missed} of {yarn['answers']} held-out answers"]
        for kind, name in (("nll", "loss"), ("recall", "recall")):
            verdicts = {s: summaries[title]["against yarn"][s][kind] for s in case["history"]}
            for word in ("better", "worse"):
                strategies = [s for s in verdicts if verdicts[s] == word]
                parts.append(f"{name} {word} than YaRN's: {', '.join(strategies) or 'none'}")
        lines.append(f"- **{title}**: {'; '.join(parts)}.")
    curve = [summaries[title]["against yarn"]["curve"] for title in cases]
    better_in_both = sum(set(verdicts.values()) == {"better"} for verdicts in curve)
    lines.append(
        "- What curve found beats YaRN in loss and in recall, both with 95% confidence, in "
        f"{better_in_both} of {len(curve)} cases."
    )
    pairs = [(title, name) for title, case in cases.items() for name in case["history"]]
    ahead = []
    for title, name in pairs:
        best = summaries[title]["strategies"][name]["best"]
        if best is not None and best < summaries[title]["yarn"]:
            ahead.append((title, name))
    against = [cases[title]["held_out"][name]["against yarn"] for title, name in ahead]
    still_better = sum(row is not None and row["nll"] < 0 for row in against)
    count = {
        word: sum(summaries[title]["against yarn"][name]["nll"] == word for title, name in ahead)
        for word in ("better", "worse")
    }
    lines.append(
        f"- Of {len(pairs)} searches, {len(ahead)} found something with less loss than YaRN on the "
        f"sequences they searched on. On held-out ones {still_better} of these have less loss than "
        f"YaRN, {count['better']} with 95% confidence; {count['worse']} have more with 95% "
        "confidence."
    )
    for name in EVOLUTIONS:
        needs = [summaries[title]["curve needs"][name] for title in cases]
        counts = [
            f"{need['evaluations'] or 'not reached'} ({title})"
            for title, need in zip(cases, needs, strict=True)
        ]
        lines.append(
            f"- Evaluations that curve needs to be as good as {name} ends: {', '.join(counts)}; at "
            f"most a fifth of {name}'s in {sum(need['at most a fifth'] for need in needs)} of "
            f"{len(needs)} cases."
        )
    lines += [f"- {early_statement(cases, name)}" for name in EVOLUTIONS]
    lines.append(f"- {attention_statement(cases)}")
    return "\n".join(lines)


def early_statement(cases: dict[str, Case], evolution: str) -> str:
    """Return a comparison of curve's early result with a finished evolution."""
    titles: dict[str, list[str]] = {"better": [], "worse": [], "open": [], "same": [], "failed": []}
    for title, case in cases.items():
        titles[verdict(case["held_out"][EARLY][f"against {evolution}"], "nll")].append(title)
    settings = next(iter(cases.values()))["settings"]
    return (
        f"On held-out sequences, what curve found in its first {settings['early']} evaluations has "
        f"less loss than what {evolution} found in {settings['budgets'][evolution]}, with 95% "
        f"confidence: {join_titles(titles['better'])}; more: {join_titles(titles['worse'])}."
    )


def join_titles(titles: list[str]) -> str:
    """Join cases, or say that there is none."""
    return "; ".join(titles) or "in no case"


def attention_statement(cases: dict[str, Case]) -> str:
    """Return curve's attention factors beside the formulas that the others follow."""
    factors = []
    for title, case in cases.items():
        factor = case["settings"]["length"] / TRAINED_LENGTH
        yarn = yarn_mscale(factor)
        longrope = math.sqrt(1 + math.log(factor) / math.log(TRAINED_LENGTH))
        ours = case["found"]["curve"]["options"].get("attention_factor", yarn)
        factors.append(f"{title}: {ours:.3f} ({yarn:.3f}, {longrope:.3f})")
    return (
        "Only curve searches the attention factor, so a part of its lead may be that number's. In "
        "brackets YaRN's law, which the yarn scan takes, and LongRoPE's, which both evolutions "
        f"take: {'; '.join(factors)}."
    )


def render_readme(cases: dict[str, Case], missing: list[str], command: str) -> str:
    """Return the README: tables, statements and definitions."""
    summaries = summary(cases)
    by_length = {case["settings"]["length"]: case["settings"] for case in cases.values()}
    settings = next(iter(by_length.values()))
    seed, held_out_seed = settings["seeds"]
    trained = STAGES[-1][1]
    harder = f", more than the {trained} of training" if settings["keys"] > trained else ""
    sizes = "; ".join(
        f"at {length:,} tokens {case['sizes']['search']} sequences to search on and "
        f"{case['sizes']['held_out']} held-out ones"
        for length, case in by_length.items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    budgets = ", ".join(f"{name} {budget}" for name, budget in settings["budgets"].items())
    sections = [
        f"## {title} tokens\n\n"
        f"YaRN on the sequences searched on: {summaries[title]['yarn']:.4f} nats.\n\n"
        f"{progress_table(summaries[title])}\n\nOn held-out sequences:\n\n{held_out_table(case)}"
        for title, case in cases.items()
    ]
    absent = f" Not measured here: {'; '.join(missing)}." if missing else ""
    return f"""# What searches find on the tiny models

The models of `recipes/experiments/train_tiny.py`, trained on 256 tokens at once, are taken to
4 and 8 times that by the strategies of `rope-patch search`. Every sequence has {settings["keys"]}
keys{harder}, that are asked for at its end, each query seeing the true earlier answers; a
candidate's fitness is the loss of the values, nats, smaller is better. All strategies of a case
search on the same sequences: {sizes}.

Evaluations at most: {budgets}, of which the last two need
fewer; seed {seed}, held-out sequences of seed {held_out_seed}. longrope searches
without start tokens, which no engine's config can say. One seed: another
may go otherwise.{absent}

- **after n**: the best of a strategy's first n evaluations, by itself. YaRN, which every search
  measures before anything else so that hopeless candidates are known, is not counted and left out.
  Candidates without hope of beating the best so far, YaRN included, are given up after a quarter, a
  half or three quarters of the sequences; **given up** in these columns means that all were.
  Empty: the strategy had ended.
- **best**, **at**, **of**, **given up**: the last of these, the evaluation it was found by, how
  many there were, and how many of them were given up.
- **curve needs**: curve's evaluations until it was as good as that evolution's best.
- **On held-out sequences**: what each search returns, beside YaRN, NTK, PI (linear) and the plain
  model (none). Intervals are 95% bootstrap intervals over sequences; the difference from YaRN is
  paired. p is McNemar's, of recall, by sequences. Nothing is corrected for the number of
  comparisons. A search that finds nothing better than YaRN returns YaRN: all differences are 0.
- **{EARLY}**: the best of curve's first {settings["early"]} evaluations.

![best so far against evaluations](history.png)

## What holds

{statements(cases, summaries)}

{(chr(10) * 2).join(sections)}

Made by `{command}` with {versions}.
"""
