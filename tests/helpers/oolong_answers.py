"""Made-up answers, and what OOLONG's own scorer gives for them.

In the folder tests, `python -m helpers.oolong_answers FOLDER` runs the scorer of a clone of
abertsch72/oolong, which lies outside this project, and writes what the tests compare with.
"""

import datetime
import hashlib
import json
import lzma
import random
import subprocess
import sys
import types
from pathlib import Path

FILE = Path(__file__).parents[1] / "assets" / "oolong_scores.json.xz"
PER_KIND = 1000
COMPARISONS = ["more common than", "less common than", "same frequency as"]
TOPICS = ["cooking", "chess", "law", "railways", "school", "astronomy"]
SPELLS = ["Amber Veil", "Hollow Lance", "Moon Gate", "Thorn Chain", "Glass Storm", "Ember Mirror"]


def right_number(rng):
    return str(rng.choice([0, 1, 3, 7, 12, 40, 123, 2750]))


def written_number(rng, right):
    near = int(right) + rng.choice([0, 0, 1, -1, 2, -3, 5, 20, -40, 10**7])
    forms = ["{}", "**{}**", "[{}]", "{}.", "0{}", "+{}", "{},0", "{} lines", "about {}", "{}.0"]
    forms += ["There are {} such lines in all", "{} (of 30)", "1_{}", "count: {}", "** {} **"]
    return rng.choice([*["{}"] * 8, *forms, "none", "seven", "", "9" * 500]).format(near)


def right_topic(rng):
    return rng.choice(TOPICS)


def written_topic(rng, right):
    name = rng.choice([right, right, rng.choice(TOPICS)])
    forms = ["{}", "{}.", "**{}**", "[{}]", "Label: {}", "{} ", "the {}", "{}, chess", "{} [{}]"]
    forms += ["The most frequent topic of all is {}", "more common", "topic:{}", "", "{}\tor law"]
    return rng.choice([*forms, "{}"]).replace("{}", rng.choice([name, name, name.title()]))


def right_comparison(rng):
    return rng.choice(COMPARISONS)


def written_comparison(rng, right):
    words = rng.choice([right, rng.choice(COMPARISONS)])
    core = words.rpartition(" ")[0]
    forms = [words, core, f"law is {words} chess", f"is {words}", f"it is {core}", f"{core}.", ""]
    forms += [f"**{words}**", f"[{core}]", words.title(), "neither of the two, I would say"]
    forms += [f"less common, not more common, {words}", f"Answer: chess is {words} law", "same"]
    return rng.choice(forms)


def right_user(rng):
    return str(rng.randrange(10_000, 100_000))


def written_user(rng, right):
    name = rng.choice([right, right, str(int(right) + 1), right_user(rng)])
    return rng.choice(["{}", "{}", "user {}", "User: {}", "[{}]", "{}.", "0{}", ""]).format(name)


def right_date(rng):
    return (datetime.date(2023, 1, 1) + datetime.timedelta(rng.randrange(730))).isoformat()


def written_date(rng, right):
    date = datetime.date.fromisoformat(right)
    date += datetime.timedelta(rng.choice([0, 0, 0, 1, -31, 365]))
    forms = ["%Y-%m-%d", "%b %d, %Y", "%B %d, %Y", "%d %B %Y", "%m/%d/%Y", "%Y/%m/%d", "%Y%m%d"]
    forms += ["%A, %B %d, %Y", "%d.%m.%Y", "%Y-%m-%d 00:00", "%Y-%m-%d.", "**%Y-%m-%d**", "%m-%d"]
    forms += ["on %Y-%m-%d", "%b %d", "%Y", "%Y-%m", "2023-13-40", "no date", "", "%Y-%m-%dT05"]
    return date.strftime(rng.choice([*forms, "%Y-%m-%d"]))


def written_events_number(rng, right):
    return boxed(rng, written_number(rng, right))


def right_spell(rng):
    return rng.choice(SPELLS)


def written_spell(rng, right):
    name = rng.choice([right, right, rng.choice(SPELLS)])
    forms = ["{}", "{}.", " {} ", "the {}", "{}, {}", "12", "", name.upper(), name.lower()]
    return boxed(rng, rng.choice(forms).replace("{}", name))


def right_spells(rng):
    return ", ".join(rng.sample(SPELLS, rng.randint(2, 5)))


def written_spells(rng, right):
    names = right.split(", ")
    rng.shuffle(names)
    names = names[: rng.randint(0, len(names))] + rng.sample(SPELLS, rng.randint(0, 3))
    separator = rng.choice([", ", ", ", ",", " , ", ",,", "; ", " and "])
    end = rng.choice(["", "", "", ".", ","])
    return boxed(rng, separator.join(names) + end)


def boxed(rng, words):
    """Return an answer in OOLONG's box in one of its forms, or as it is."""
    forms = ["\\boxed{%s}", "\\boxed{\\text{%s}}", "\\boxed{{%s}}", "I get \\boxed{%s} in all"]
    return rng.choice([*["%s"] * 4, *forms]).replace("%s", words)


# Kind: the right answer, what is written, and the type that OOLONG's scorer is told; None if that
# of OOLONG-real scores, which needs none.
KINDS = {
    "number": (right_number, written_number, "ANSWER_TYPE.NUMERIC"),
    "topic": (right_topic, written_topic, "ANSWER_TYPE.LABEL"),
    "comparison": (right_comparison, written_comparison, "ANSWER_TYPE.COMPARISON"),
    "user": (right_user, written_user, "ANSWER_TYPE.USER"),
    "date": (right_date, written_date, "ANSWER_TYPE.DATE"),
    "events_number": (right_number, written_events_number, None),
    "events_name": (right_spell, written_spell, None),
    "events_list": (right_spells, written_spells, None),
}


def their_score(scorer, answer_type, right, words):
    """Return the score of OOLONG's scorer; None where it fails."""
    point = {"id": 0, "context_window_id": 0, "dataset": "", "answer_type": answer_type}
    if answer_type is None:
        # Their prompt asks for a box; ours has "Answer:" before what is written.
        reply = words if "\\boxed" in words else f"\\boxed{{{words}}}"
        score = lambda: scorer.dnd_process_response({**point, "answer": right}, reply, "")  # noqa: E731
    else:
        gold = [int(right) if answer_type == "ANSWER_TYPE.NUMERIC" else right]
        if answer_type == "ANSWER_TYPE.DATE":
            gold = [datetime.date.fromisoformat(right)]
        point["answer"] = repr(gold)
        score = lambda: scorer.synth_process_response(point, f"Answer: {words}", "")  # noqa: E731
    try:
        return round(float(score()["score"]), 9)
    except OverflowError:
        return None


def load_scorer(source):
    """Return their module without its clients of servers, which scoring does not touch."""
    import dateutil.parser  # noqa: F401  theirs takes for granted that somebody imported it

    for name, attributes in {"litellm": [], "jsonlines": [], "tiktoken": []}.items():
        sys.modules.setdefault(name, types.SimpleNamespace(**dict.fromkeys(attributes)))
    scorer = types.ModuleType("eval_helpers")
    exec(source, scorer.__dict__)
    return scorer


def main(folder):
    git = ["git", "-C", folder]
    path = "src/eval/eval_helpers.py"
    source = subprocess.run([*git, "show", f"HEAD:{path}"], capture_output=True, check=True).stdout
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True).stdout
    scorer = load_scorer(source.decode())
    rows = {}
    for kind, (right_of, write, answer_type) in KINDS.items():
        rng = random.Random(kind)
        rows[kind] = []
        for _ in range(PER_KIND):
            right = right_of(rng)
            words = write(rng, right)
            rows[kind].append([right, words, their_score(scorer, answer_type, right, words)])
    whole = {
        "source": f"https://github.com/abertsch72/oolong/blob/{commit.decode().strip()}/{path}",
        "sha256": hashlib.sha256(source).hexdigest(),
        "command": "python -m helpers.oolong_answers FOLDER",
        "day": datetime.date.today().isoformat(),
        "rows": rows,
    }
    FILE.write_bytes(lzma.compress(json.dumps(whole).encode(), preset=9))


if __name__ == "__main__":
    main(*sys.argv[1:])
