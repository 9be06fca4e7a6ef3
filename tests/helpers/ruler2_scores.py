"""Write tests/assets/ruler2_scores/scores.json.gz: RULERv2's own scores of made-up answers.

`python tests/helpers/ruler2_scores.py REPOSITORY`, by hand, in a clone, with a git repository of
https://github.com/NVIDIA-NeMo/Skills that has the commit below. Its two files of scoring are run as
they are. What they import beside is replaced here: helpers that open files, a package for sympy
that the functions do not call, and `editdistance`, whose edit distance is nltk's.
"""

import argparse
import dataclasses
import gzip
import json
import logging
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

COMMIT = "991a7432a1e3e6374b402a96cdd8614026714a1d"  # branch chsieh/ruler2, 2025-10-08
FOLDER = "nemo_skills/evaluation"
FILE = Path(__file__).parents[1] / "assets" / "ruler2_scores" / "scores.json.gz"
COUNT = 1000  # answers for each rule

WORDS = "Which city lies north of 47 and 38 loaves? The old Baker's façade ſtraße İzmir B. 1,200"
NOISE = ["", " ", "\n", "\n\n", "\t", "\x00", "…", "，", "🙂", "Answer:", "answer: ", "</think>"]
NOISE += ["<think>", "Document 12:", "Document 7654321:\n", "Question 12:", "\\boxed{", "}", "{"]
NOISE += ["**Answer**: ", "Answer: C", "\\boxed", "\\boxed{A}", "\\fbox{B}", "ANSWER:\n_d_", "J"]


def load(repository, path, **modules):
    """Return the names of one of their files, run with stand-ins for what it imports."""
    command = ["git", "-C", repository, "show", f"{COMMIT}:{FOLDER}/{path}"]
    source = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, members in modules.items():
        sys.modules[name.replace("__", ".")] = module = ModuleType(name)
        vars(module).update(members)
    names = {"__name__": path, "__file__": path}
    exec(compile(source, path, "exec"), names)
    return names


def their_rules(repository):
    """Return a function for each rule: their evaluator, which scores a file of JSON lines."""
    import nltk

    unused = dict.fromkeys(["NormalizationConfig", "normalize_latex", "LatexExtractionConfig"])
    unused |= dict.fromkeys(["StringExtractionConfig", "parse", "verify"])
    utils = {"get_logger_name": str, "nested_dataclass": dataclasses.dataclass}
    utils |= {"unroll_files": list}  # the patterns are paths
    modules = {"nemo_skills": {}, "nemo_skills__utils": utils, "math_verify": unused}
    modules |= {"latex2sympy2_extended": unused, "editdistance": {"eval": nltk.edit_distance}}
    grader = load(repository, "math_grader.py", **modules)
    modules = {"nemo_skills__evaluation": {}, "nemo_skills__evaluation__math_grader": grader}
    choice = load(repository, "evaluator/mcq.py", **modules)["eval_mcq"]
    ruler = load(repository, "evaluator/ruler.py")["eval_ruler2"]
    return {
        **{kind: (ruler, {"match_type": kind}, "is_correct") for kind in ("all", "part", "2steps")},
        "multichoice": (choice, {}, "symbolic_correct"),
    }


def edited(text, rng):
    """Return a text with up to four random changes."""
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 4])):
        words, at = text.split(" "), rng.randrange(len(text) + 1)
        i, j = rng.randrange(len(words)), rng.randrange(len(words))
        kind = rng.randrange(7)
        if kind == 0:
            text = text[:at] + rng.choice(NOISE) + text[at:]
        elif kind == 1:
            text = " ".join(words[:i] + words[i + 1 :])
        elif kind == 2:
            words[i], words[j] = words[j], words[i]
            text = " ".join(words)
        elif kind == 3:
            text = rng.choice([text.upper(), text.lower(), text.title(), text.swapcase()])
        elif kind == 4:
            text = text[:at] if rng.random() < 0.5 else text[at:]
        elif kind == 5:
            text = " ".join([*words[:i], rng.choice(WORDS.split()), *words[i:]])
        else:
            text = text.replace(" ", rng.choice(["  ", "\n", "\u00a0", " "]), 2)
    return text


def made_up(rule, rng):
    """Return an answer and its references."""
    vocabulary = WORDS.split()
    references = [
        " ".join(rng.choices(vocabulary, k=rng.choice([1, 1, 2, 8, 20])))
        for _ in range(rng.choice([1, 1, 2, 4]))
    ]
    if rule == "multichoice":
        references = rng.choice("ABCD")
        letter = references if rng.random() < 0.8 else rng.choice("ABCDEKb")
        inner = rng.choice([letter, f"\\text{{{letter}}}", f"{letter}. 47", f"A or {letter}", ""])
        box = f"\\boxed{{{inner}}}"
        forms = [box, box, box, f"${box}$.", f"Answer: {letter}", f"**Answer**: {letter}", letter]
        parts = [rng.choice(vocabulary), rng.choice(forms), rng.choice(["", "", rng.choice(forms)])]
    else:
        parts = rng.sample(references, rng.randint(rng.random() < 0.95, len(references)))
        if rule == "part" and rng.random() < 0.5:
            copied = " ".join(rng.choices(vocabulary, k=9))
            parts = [f"Document {rng.randrange(10**7)}:\n{copied}\n{rng.choice(parts or [''])}\n\n"]
            parts += [rng.choice(references)] if rng.random() < 0.5 else []
    if rng.random() < 0.2:
        parts.insert(rng.randint(0, len(parts)), rng.choice(["Answer:", "</think>", "\n\n"]))
    return edited(rng.choice([" ", "\n", "\n\n", ", "]).join(parts), rng), references


def main():
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", help="a git repository of NVIDIA-NeMo/Skills")
    rules, scores = their_rules(parser.parse_args().repository), {}
    logging.disable()
    for rule, (evaluate, options, key) in rules.items():
        rng = random.Random(rule)
        answers = [made_up(rule, rng) for _ in range(COUNT)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "answers.jsonl")
            rows = [{"generation": text, "expected_answer": refs} for text, refs in answers]
            path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
            evaluate(SimpleNamespace(input_files=[str(path)], eval_config=options))
            scored = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        scores[rule] = [[*pair, float(row[key])] for pair, row in zip(answers, scored, strict=True)]
    text = json.dumps(scores, ensure_ascii=False, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
