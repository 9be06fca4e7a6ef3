"""Test the tasks of rp_reasoning: each answer is found anew by reading the prompt back."""

import ast
import json
import platform
import random
import re
import sysconfig
from collections import Counter, defaultdict, deque
from pathlib import Path

import pytest
from helpers import built_tasks
from helpers.built_tasks import build_rows, score_of

from rope_patch import tasks


def planted_and_control(name, **request):
    """Return pairs of a sample and the control's."""
    both = (built_tasks.rows(name, planted=planted, **request) for planted in (True, False))
    return zip(*both, strict=True)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("rp_graph_bfs", {"hops": 0}, "hops must be at least 1 edge, got 0"),
        ("rp_latent_list", {"per_text": 10}, "at most 9 questions .* got per_text 10"),
        ("rp_latent_list", {"operations": 7}, "at least 8 lines .* got 7"),
        ("rp_icl", {"classes": 7}, "8 to 16, got 7"),
        ("rp_icl", {"classes": 17}, "8 to 16, got 17"),
        ("rp_icl", {"classes": 8, "per_text": 9}, "8 classes .* got per_text 9"),
        ("rp_mrcr_2", {"per_text": 41}, "40 questions, got per_text 41"),
    ],
)
def test_options_beyond_what_there_is_are_refused(name, options, named):
    with pytest.raises(ValueError, match=named):
        build_rows(name, length=2000, **options)


# --- Latent lists: Python runs the program --------------------------------------------------------


def latent_lists(length=1500, tokenizer="tiny", **kwargs):
    return built_tasks.rows("rp_latent_list", tokenizer, length=length, **kwargs)


def program(row):
    return re.search(r"```python\n(.*)\n```", row["input"], re.S)[1]


def printed(row):
    return re.search(r"the line `print\((.+)\)` is", row["input"])[1]


def run(lines):
    """Return the variables that a program leaves; what it prints is dropped."""
    variables = {"print": lambda *_: None}
    exec(lines, variables)
    return variables


@pytest.mark.parametrize(("per_text", "operations"), [(1, 12), (9, 12), (3, 8), (2, 31)])
def test_the_answer_is_what_python_prints(per_text, operations):
    for row in latent_lists(2500, samples=18, per_text=per_text, operations=operations):
        value = eval(printed(row), run(program(row)))
        assert row["answers"] == [row["target"]] == [str(value)]
        assert row["depth"] is None
        name = re.search(r"\w+_?(?=\)|\[|$)", printed(row)).group()
        changes = re.findall(rf"^{name}\.\w+\(", program(row), re.M)
        assert len(changes) == operations


def test_every_line_of_filler_runs_and_none_changes_the_list():
    """Also where the filler goes on much longer; and operations stand all over the program."""
    (row,) = latent_lists(20_000, "words", samples=1)
    lines = program(row).splitlines()
    name = re.search(
        "alpha|beta|gamma|delta|kappa|lambda_|omega|sigma|theta|zeta", printed(row)
    ).group()
    own = re.compile(rf"{name}( = |\.(?:append|insert|remove|pop|sort|reverse)\()")
    without = "\n".join(line for line in lines if own.match(line))
    assert run(without)[name] == run("\n".join(lines))[name]
    places = [i / len(lines) for i, line in enumerate(lines) if own.match(line)]
    assert len(places) == 13
    assert min(places[1:]) < 0.4
    assert max(places) > 0.6
    assert sum(line.startswith("print(") for line in lines) > 0.15 * len(lines)
    longest = max(len(v) for v in run("\n".join(lines)).values() if isinstance(v, list))
    assert longest <= 12


def test_each_kind_of_question_comes_before_any_comes_twice():
    built = latent_lists(samples=9, per_text=9)
    assert {row["question"] for row in built[:5]} == {"list", "sum", "length", "item", "slice"}
    assert len({printed(row) for row in built}) == 9


def test_the_control_is_a_program_without_the_list():
    for _, without in planted_and_control("rp_latent_list", length=1500, samples=5, per_text=5):
        with pytest.raises(NameError):
            eval(printed(without), run(program(without)))


def test_chance_is_the_score_of_the_best_constant():
    counts, chances = defaultdict(Counter), {}
    for row in build_rows("rp_latent_list", "words", length=700, samples=2000, per_text=5):
        counts[row["question"]][row["target"]] += 1
        assert row["chance"] == row["target_chance"]
        assert chances.setdefault(row["question"], row["chance"]) == row["chance"]
    for kind, counter in counts.items():
        ((_, most),) = counter.most_common(1)
        # The most frequent of 400 is more frequent by luck than on average.
        assert most / 400 < (chances[kind] or 0) + 0.06
    assert set(counts["length"]) == {str(n) for n in range(4, 12)}
    assert chances["length"] == 1 / 8


# --- Graphs: edges are read back and searched -----------------------------------------------------

each_graph = pytest.mark.parametrize("name", ["rp_graph_bfs", "rp_graph_parents"])


def edges(row):
    listed = re.findall(r"^(\S{8}) -> (\S{8})$", row["input"], re.M)
    assert len(listed) == len(set(listed))  # no edge twice
    return listed


def asked_node(row):
    return re.search(r"(?:from the node|parents of) (\w{8})", row["input"])[1]


def distances(listed, start):
    """Return those of every node that a search from `start` reaches."""
    depth, queue = {start: 0}, deque([start])
    while queue:
        node = queue.popleft()
        for source, target in listed:
            if source == node and target not in depth:
                depth[target] = depth[node] + 1
                queue.append(target)
    return depth


def solve(row):
    listed, node = edges(row), asked_node(row)
    if row["task"] == "rp_graph_parents":
        return {source for source, target in listed if target == node}
    (hops,) = re.findall(r"to them has (\d+) edges?\?", row["input"])
    return {n for n, depth in distances(listed, node).items() if depth == int(hops)}


def named_nodes(target):
    return re.findall(r"[0-9a-f]{8}", target)


@each_graph
@pytest.mark.parametrize("per_text", [1, 3])
def test_the_answer_is_what_a_search_of_the_listed_edges_finds(name, per_text):
    for row in built_tasks.rows(name, length=2000, samples=9, per_text=per_text):
        answers = named_nodes(row["target"])
        assert set(answers) == solve(row)
        assert 2 <= len(answers) == len(set(answers)) <= 6
        assert row["answers"] == [row["target"]] == [f"[{', '.join(answers)}]"]
        assert row["depth"] is None


@pytest.mark.parametrize("hops", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_the_depth_of_the_search_may_be_given(hops):
    for row in built_tasks.rows("rp_graph_bfs", length=3000, samples=4, hops=hops):
        assert f"at a depth of exactly {hops}," in row["input"]
        assert set(named_nodes(row["target"])) == solve(row)


def test_the_text_and_what_is_asked_do_not_stand_out():
    """Nodes of the answer have other edges, too; those on the way to it have edges that mislead."""
    entered, back = [], 0
    for row in built_tasks.rows("rp_graph_bfs", length=6000, samples=12):
        listed, depth = edges(row), distances(edges(row), asked_node(row))
        for answer in named_nodes(row["target"]):
            sources = [source for source, target in listed if target == answer]
            entered.append(sum(depth.get(source) != 1 for source in sources))
        back += sum(depth.get(s) == 1 and depth[t] <= 1 for s, t in listed)
    assert sum(count > 0 for count in entered) > len(entered) / 2
    assert back > 12


@each_graph
def test_no_node_of_the_answer_is_one_in_the_control(name):
    for _, without in planted_and_control(name, length=1500, samples=4, per_text=2):
        assert not solve(without) & set(named_nodes(without["target"]))


@each_graph
def test_chance_is_the_score_of_naming_all_nodes_and_no_random_set_does_better(name):
    rng = random.Random(0)
    for row in built_tasks.rows(name, length=1500, samples=3):
        nodes = sorted({node for edge in edges(row) for node in edge})
        assert row["chance"] == pytest.approx(score_of(name, row, str(nodes)))
        for size in (1, 5, len(nodes) // 2):
            scores = [score_of(name, row, str(rng.sample(nodes, size))) for _ in range(300)]
            assert sum(scores) / 300 < row["chance"] + 0.02


# --- Labelled examples: a classifier of words learns from them ------------------------------------

LABELLED = json.loads(Path(tasks.__file__).with_name("labelled_examples.json").read_text())
TOPICS = {topic: halves for topic, halves in LABELLED.items() if topic != "endings"}


def labelled(length=2000, tokenizer="tiny", **kwargs):
    return built_tasks.rows("rp_icl", tokenizer, length=length, **kwargs)


def examples(row):
    return re.findall(r"^Sentence: (.+) Label: (\d+)$", row["input"], re.M)


def asked_sentence(row):
    return row["input"].split("\nSentence: ")[-1]


def classify(row):
    """Return the label whose examples share most content with the question, by naive Bayes."""
    counts, words_of = Counter(), defaultdict(Counter)
    for sentence, label in examples(row):
        counts[label] += 1
        words_of[label].update(set(re.findall(r"\w+", sentence.lower())))
    words = set(re.findall(r"\w+", asked_sentence(row).lower()))
    everywhere = Counter(word for found in words_of.values() for word in found)
    share = {
        label: sum(
            words_of[label][w] / counts[label] / everywhere[w] for w in words if everywhere[w]
        )
        for label in counts
    }
    return max(share, key=share.get)


def test_the_label_can_be_learned_from_the_examples_alone():
    pairs = [
        *planted_and_control("rp_icl", tokenizer="words", length=6000, samples=32, per_text=16)
    ]
    assert sum(classify(row) == row["target"] for row, _ in pairs) >= 31
    assert sum(classify(without) == without["target"] for _, without in pairs) < 10


@pytest.mark.parametrize("classes", [8, pytest.param(11, marks=pytest.mark.slow), 16])
def test_labels_are_arbitrary_and_each_class_has_as_many_examples(classes):
    seen = set()
    for row in labelled(3000, samples=6, classes=classes):
        counts = Counter(label for _, label in examples(row))
        assert len(counts) == classes
        assert max(counts.values()) - min(counts.values()) <= 1
        assert row["target"] in counts
        assert row["answers"] == [row["target"]]
        assert row["depth"] is None
        assert asked_sentence(row) not in {sentence for sentence, _ in examples(row)}
        assert row["chance"] == row["target_chance"] == 1 / classes
        seen |= set(counts)
    assert len(seen) > 2 * classes  # other labels in every text


def test_sentences_of_a_class_share_their_topic_and_no_two_classes_a_predicate():
    parts = [part for halves in TOPICS.values() for half in halves for part in half]
    assert len(parts) == len(set(parts)) == 16 * 14
    for row in labelled(3000, samples=3):
        by_label = defaultdict(set)
        for sentence, label in examples(row):
            (topic,) = (
                topic
                for topic, (subjects, predicates) in TOPICS.items()
                if any(sentence.startswith(f"{subject} ") for subject in subjects)
                and any(f" {predicate} " in sentence for predicate in predicates)
            )
            by_label[label].add(topic)
        assert all(len(topics) == 1 for topics in by_label.values())
        assert len({next(iter(topics)) for topics in by_label.values()}) == 16


def test_the_choice_is_among_all_labels_of_the_text():
    chosen = built_tasks.rows("rp_icl_mc", length=2000, samples=3, per_text=1)
    for row, same in zip(chosen, labelled(samples=3), strict=True):
        assert set(row["choices"]) == {label for _, label in examples(row)}
        assert row["choices"][row["gold"]] == row["target"] == same["target"]
        assert row["input"] == same["input"]


# --- Repeated replies: the dialogue is read back --------------------------------------------------

each_dialogue = pytest.mark.parametrize("needles", [2, pytest.param(4, marks=pytest.mark.slow), 8])


def dialogues(needles, length=6000, tokenizer="tiny", **kwargs):
    return built_tasks.rows(f"rp_mrcr_{needles}", tokenizer, length=length, **kwargs)


def turns(row):
    """Return requests and replies in their order."""
    return re.findall(r"^User: Write a ([^.]+)\. Assistant: (.+)$", row["input"], re.M)


def last_message(row):
    """Return its random string, number and request."""
    last = row["input"].split("\n\n")[-1]
    code, number, request = re.search(
        r"Write (\w{10}), .* the (\d)(?:st|nd|rd|th) (.+) that you wrote", last
    ).groups()
    return code, int(number), request


@each_dialogue
@pytest.mark.parametrize("per_text", [1, 5])
def test_the_target_is_the_reply_that_the_number_says(needles, per_text):
    for row in dialogues(needles, samples=6, per_text=per_text):
        code, number, request = last_message(row)
        replies = [reply for other, reply in turns(row) if other == request]
        assert len(replies) == len(set(replies)) == needles
        assert row["target"] == f"{code} {replies[number - 1]}"
        assert row["answers"] == [f"{row['target']}\n"]
        assert row["gen_prefix"] == "Assistant:"
        assert 200 <= len(replies[number - 1]) <= 400


@each_dialogue
def test_a_reply_stands_at_its_depth_among_other_turns(needles):
    for row in dialogues(needles, 20_000, "words", depths=(0, 25, 75, 100), samples=4):
        _, number, request = last_message(row)
        listed = turns(row)
        places = [i for i, (other, _) in enumerate(listed) if other == request]
        at = places[number - 1] - (number - 1)
        assert at == round(row["depth"] * (len(listed) - needles) / 100)
        near = [other for other, _ in listed if other != request]
        kind, topic = request.split(" about ")
        assert sum(kind in other or topic in other for other in near) > 0.3 * len(near)


def test_every_number_is_asked_for_at_every_depth():
    built = dialogues(4, 2500, "words", samples=120, depths=(0, 50, 100))
    counts = Counter((row["depth"], last_message(row)[1]) for row in built)
    assert len(counts) == 12
    assert max(counts.values()) < 22  # ten each on average


def test_the_control_is_a_dialogue_without_the_replies():
    for _, without in planted_and_control("rp_mrcr_4", length=6000, samples=4, per_text=2):
        assert last_message(without)[2] not in {request for request, _ in turns(without)}
        assert without["target"].split(" ", 1)[1] not in without["input"]


@pytest.mark.parametrize(("needles", "floor"), [(2, 0.53), (4, 0.30), (8, 0.19)])
def test_chance_is_the_score_of_a_random_one_of_the_replies(needles, floor):
    chances = []
    for row in dialogues(needles, samples=6, per_text=1):
        code, _, request = last_message(row)
        replies = [reply for other, reply in turns(row) if other == request]
        scores = [score_of(row["task"], row, f"{code} {reply}") for reply in replies]
        assert sorted(scores)[-1] == 1
        assert sorted(scores)[-2] < 0.4  # a wrong reply is clearly wrong
        assert row["chance"] == pytest.approx(sum(scores) / needles)
        assert row["target_chance"] == 1 / needles
        chances.append(row["chance"])
    assert sum(chances) / len(chances) == pytest.approx(floor, abs=0.05)


# --- Code of the standard library: the prompt's functions are parsed ------------------------------

each_code = pytest.mark.parametrize("name", ["rp_code", "rp_code_next"])


def code_samples(name, length=3000, **kwargs):
    return built_tasks.rows(name, "words", length=length, **kwargs)


def code(row):
    return re.search(r"```python\n(.*)\n```\nOne of", row["input"], re.S)[1]


def asked_line(row):
    return re.search(r"contains this line:\n(.+)\nWhich", row["input"])[1]


def blocks(row):
    """Return functions under the comments with their files: comment, lines."""
    parts = re.split(r"^(# [\w/]+\.py(?:, class \w+)?)$", code(row), flags=re.M)
    return [
        (head, body.strip("\n").split("\n"))
        for head, body in zip(parts[1::2], parts[2::2], strict=True)
    ]


def function_of(row):
    """Return the comment and the lines of the one function that has the line in question."""
    (block,) = (b for b in blocks(row) if asked_line(row) in [line.strip() for line in b[1]])
    return block


@each_code
@pytest.mark.parametrize("per_text", [1, 3])
def test_the_answer_is_what_the_text_says_about_its_only_such_line(name, per_text):
    for row in code_samples(name, samples=9, per_text=per_text):
        assert code(row).count(asked_line(row)) == 1
        _, lines = function_of(row)
        tree = ast.parse("\n".join(lines))  # a whole function
        stripped = [line.strip() for line in lines]
        if name == "rp_code":
            expected = tree.body[0].name
            assert expected.strip("_") not in asked_line(row)
        else:
            expected = stripped[stripped.index(asked_line(row)) + 1]
        assert row["answers"] == [row["target"]] == [expected]
        assert row["python"] == platform.python_version()


def test_functions_are_those_of_the_library_on_this_machine():
    library = Path(sysconfig.get_path("stdlib"))
    for row in code_samples("rp_code", samples=2):
        for head, lines in blocks(row)[:-1]:
            source = (library / re.match(r"# ([\w/]+\.py)", head)[1]).read_text("utf-8")
            text = [line.strip() for line in source.split("\n")]
            start = text.index(lines[0].strip())
            assert any(
                text[i : i + len(lines)] == [line.strip() for line in lines]
                for i in range(start, len(text))
            )


@each_code
def test_functions_stand_at_their_depths(name):
    for row in code_samples(name, 8000, depths=(0, 30, 60, 100), samples=4, per_text=4):
        listed = code(row).split("\n")
        (at,) = (i for i, line in enumerate(listed) if line.strip() == asked_line(row))
        assert at / len(listed) == pytest.approx(row["depth"] / 100, abs=0.2)


@each_code
def test_the_control_is_a_text_without_the_function(name):
    for _, without in planted_and_control(
        name, tokenizer="words", length=3000, samples=4, per_text=2
    ):
        assert asked_line(without) not in code(without)
        assert len(code(without)) > 2000


def test_chance_is_a_random_function_or_line_of_the_text():
    for row in code_samples("rp_code", samples=4, per_text=2):
        assert row["chance"] == row["target_chance"] == pytest.approx(1 / len(blocks(row)))
    for row in code_samples("rp_code_next", samples=2):
        lines = code(row).count("\n") + 1
        assert row["chance"] == row["target_chance"] == pytest.approx(1 / lines, rel=0.02)


def write_library(folder, monkeypatch, names):
    """Write files of a function with a line of its own each, as those of a standard library."""
    for number, name in enumerate(names):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"    value_{number} = compute({number}, {n})" for n in range(9)]
        file.write_text("\n".join([f"def function_{number}():", *lines, ""]))
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(folder))


@each_code
def test_a_python_without_sources_is_refused(name, monkeypatch, tmp_path):
    write_library(tmp_path, monkeypatch, ["os.py"])
    with pytest.raises(ValueError, match=r"sources of Python's standard library, .* has 1 of"):
        build_rows(name, "words", length=3000, samples=1)


def test_more_questions_than_files_are_refused(monkeypatch, tmp_path):
    write_library(tmp_path, monkeypatch, [f"m{number}.py" for number in range(60)])
    assert build_rows("rp_code", "words", length=9000, samples=60, per_text=60)
    with pytest.raises(ValueError, match=r"60 of the standard library's files .* per_text 61"):
        build_rows("rp_code", "words", length=9000, samples=61, per_text=61)


def test_tests_and_installed_packages_are_no_part_of_it(monkeypatch, tmp_path):
    names = [f"m{number}.py" for number in range(60)] + ["json/decoder.py"]
    others = ["site-packages/torch.py", "test/test_os.py", "config-3.11/x.py", "encodings/a.py"]
    write_library(tmp_path, monkeypatch, [*names, *others])
    (row,) = build_rows("rp_code", "words", length=12_000, samples=1)
    assert {head.removeprefix("# ") for head, _ in blocks(row)} == {*names}
