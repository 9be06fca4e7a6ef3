"""Graph walks, solved again from the prompt: edges are read back and searched."""

import random
import re
from collections import deque

import pytest
from helpers.tokenizers import KINDS, check_length, check_lm_eval, load

from rope_patch import tasks
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.tasks import graphs

NAMES = ["rp_graph_bfs", "rp_graph_parents"]


def rows(name, length=1500, tokenizer="tiny", **kwargs):
    build = tasks.config(name)["custom_dataset"]
    return build(tokenizer=load(tokenizer), length=length, **kwargs)["test"].to_list()


def edges(row):
    listed = re.findall(r"^(\S{8}) -> (\S{8})$", row["input"], re.M)
    assert len(listed) == len(set(listed))  # no edge twice
    return listed


def asked(row):
    """The node in the question, after the last edge."""
    return re.search(r"(?:from the node|parents of) (\w{8})", row["input"]).group(1)


def distances(listed, start):
    """Of every node that a search from `start` reaches."""
    depth, queue = {start: 0}, deque([start])
    while queue:
        node = queue.popleft()
        for source, target in listed:
            if source == node and target not in depth:
                depth[target] = depth[node] + 1
                queue.append(target)
    return depth


def solve(row):
    listed, node = edges(row), asked(row)
    if row["task"] == "rp_graph_parents":
        return {source for source, target in listed if target == node}
    (hops,) = re.findall(r"to them has (\d+) edges\?", row["input"])
    return {n for n, depth in distances(listed, node).items() if depth == int(hops)}


def named(target):
    return re.findall(r"[0-9a-f]{8}", target)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per_text", [1, 3])
def test_the_answer_is_what_a_search_of_the_listed_edges_finds(name, per_text):
    for row in rows(name, 2000, samples=9, per_text=per_text):
        answers = named(row["target"])
        assert set(answers) == solve(row)
        assert 2 <= len(answers) == len(set(answers)) <= 6
        assert row["answers"] == [row["target"]] == [f"[{', '.join(answers)}]"]
        assert row["depth"] is None


@pytest.mark.parametrize("hops", [1, 3, 4])
def test_the_depth_of_the_search_may_be_given(hops):
    for row in rows("rp_graph_bfs", 3000, samples=4, hops=hops):
        assert f"at a depth of exactly {hops}," in row["input"]
        assert set(named(row["target"])) == solve(row)


def test_the_text_and_what_is_asked_do_not_stand_out():
    """Nodes of the answer have other edges, too; those on the way to it have edges that mislead."""
    entered, back = [], 0
    for row in rows("rp_graph_bfs", 6000, samples=12):
        listed, depth = edges(row), distances(edges(row), asked(row))
        for answer in named(row["target"]):
            sources = [source for source, target in listed if target == answer]
            entered.append(sum(depth.get(source) != 1 for source in sources))
        back += sum(depth.get(s) == 1 and depth[t] <= 1 for s, t in listed)
    assert sum(count > 0 for count in entered) > len(entered) / 2
    assert back > 12


@pytest.mark.parametrize("name", NAMES)
def test_the_control_asks_the_same_of_a_graph_without_the_answer(name):
    planted, control = (rows(name, samples=4, per_text=2, planted=p) for p in (True, False))
    for with_it, without in zip(planted, control, strict=True):
        assert (asked(without), without["target"]) == (asked(with_it), with_it["target"])
        assert not solve(without) & set(named(without["target"]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planted", [True, False])
def test_prompts_fill_the_length_to_less_than_an_edge(name, kind, planted):
    for length in (1024, 2500):
        built = rows(name, length, kind, samples=2, per_text=2, planted=planted)
        check_length(built, load(kind), graphs.ROOM, length, 24)


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_the_same_however_many_are_built_and_share_their_text(name):
    random.seed(8)
    state = random.getstate()
    built = rows(name, samples=5, per_text=3)
    assert random.getstate() == state
    assert rows(name, samples=3, per_text=3) == built[:3]
    assert rows(name, samples=3, per_text=3, seed=1) != built[:3]
    assert len({tuple(edges(row)) for row in built[:3]}) == 1
    assert len({row["input"] for row in built}) == 5
    assert edges(built[0]) != edges(built[3])


@pytest.mark.parametrize(
    ("written", "score"),
    [
        ("[aaaaaaaa, bbbbbbbb]", 1),
        (" [bbbbbbbb, aaaaaaaa] and then [cccccccc]", 1),
        ("[AAAAAAAA,bbbbbbbb", 1),
        ("aaaaaaaa, bbbbbbbb\ncccccccc", 1),
        ("[aaaaaaaa]", 2 / 3),
        ("[aaaaaaaa, cccccccc]", 1 / 2),
        ("[aaaaaaaa, aaaaaaaa, bbbbbbbb, cccccccc, dddddddd]", 2 / 3),
        ("[aaaaaaaabbbbbbbb]", 0),
        ("[]", 0),
        ("", 0),
    ],
)
def test_the_score_is_the_f1_of_the_set(written, score):
    doc = {"target": "[aaaaaaaa, bbbbbbbb]", "answers": ["[aaaaaaaa, bbbbbbbb]"]}
    assert graphs.node_f1(doc, [written])["score"] == pytest.approx(score)


@pytest.mark.parametrize("name", NAMES)
def test_chance_is_the_score_of_naming_all_nodes_and_no_random_set_does_better(name):
    rng = random.Random(0)
    for row in rows(name, samples=3):
        nodes = sorted({node for edge in edges(row) for node in edge})
        assert row["chance"] == pytest.approx(graphs.node_f1(row, [str(nodes)])["score"])
        for size in (1, 5, len(nodes) // 2):
            scores = [graphs.node_f1(row, [str(rng.sample(nodes, size))]) for _ in range(300)]
            assert sum(s["score"] for s in scores) / 300 < row["chance"] + 0.02


def test_scores_carry_the_chance_of_generated_lists_alone():
    (doc,) = rows("rp_graph_bfs", samples=1)
    sample = {"doc": doc, "doc_id": 0, "score": 0.5, "prompt_hash": "a"}
    for name, chance in (("rp_graph_bfs", doc["chance"]), ("rp_graph_bfs_ll", None)):
        (row,) = lm_eval_tasks.scores({"samples": {f"{name}@1500": [sample]}}, {})
        assert row.get("chance") == chance


@pytest.mark.parametrize("name", NAMES)
def test_plain_lm_eval_builds_the_same_samples(name):
    expected = rows(name, 1000, samples=2)
    check_lm_eval([name, f"{name}_ll"], expected, 1000, samples=2)


def test_a_search_of_no_edges_is_refused():
    with pytest.raises(ValueError, match="hops must be at least 1 edge, got 0"):
        rows("rp_graph_bfs", hops=0)
