"""Graph walks: a list of directed edges, and a question whose answer is a set of nodes.

After OpenAI's GraphWalks (https://huggingface.co/datasets/openai/graphwalks), with both of its
questions and its score, F1 of the set. The differences: the wording is this project's own and has
no worked example, names have 8 hexadecimal digits, an answer has 2 to 6 nodes and never none,
prompts are made to the token, several questions may share a graph, and the answer follows a prefix
at once, without a chain of thought before it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from rope_patch.tasks import samples, scoring

ROOM = 96  # six names of 8 digits, even where a digit is a token

PROMPT = (
    "Below is a directed graph as a list of its edges, one on each line: `a -> b` is an edge from "
    "a to b. I will ask for some of its nodes afterwards.\n{edges}\n{question} Answer with a list "
    "in square brackets, the nodes separated by commas."
)
BFS_QUESTION = (
    "Run a breadth-first search from the node {node}. Which nodes does it find at a depth of "
    "exactly {hops}, so that a shortest path from {node} to them has {hops} edges?"
)
PARENTS_QUESTION = "Which nodes are the parents of {node}, so that they have an edge to it?"
PREFIX = "Final answer:"

_ANSWERS = range(2, 7)
_WIDTHS = range(2, 4)  # nodes of each level between the start and the answers
_NODE = re.compile(r"\b[0-9a-f]{8}\b")

_Edge = tuple[str, str]


class _Question(NamedTuple):
    """A question about a graph."""

    text: str
    answers: list[str]  # names of the nodes in the answer
    edges: list[_Edge]  # edges from which the answer follows
    last: list[_Edge]  # those of `edges` that lead to the answer: without them it is empty


def breadth_first_search(**metadata: Any) -> dict[str, Any]:
    """Build rp_graph_bfs; the arguments are those of `samples.build` and `hops`.

    `hops` (2 unless given) is the depth that is asked for. Prompts grow by whole edges.
    """
    return samples.build(_generate_bfs, "rp_graph_bfs", ROOM, **metadata)


def parents(**metadata: Any) -> dict[str, Any]:
    """Build rp_graph_parents; the arguments are those of `samples.build`."""
    return samples.build(_generate_parents, "rp_graph_parents", ROOM, **metadata)


def _generate_bfs(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one graph: each asks for the search from another node."""
    hops = int(text.options.get("hops", 2))
    if hops < 1:
        raise ValueError(f"hops must be at least 1 edge, got {hops}")
    graph = _Graph(text)
    questions = []
    for _ in text.depths:
        widths = [text.rng.choice(_WIDTHS) for _ in range(hops - 1)] + [text.rng.choice(_ANSWERS)]
        levels = [[graph.new_node()], *([graph.new_node() for _ in range(w)] for w in widths)]
        edges = _connect_levels(text.rng, levels)
        # Edges that leave the last level change no depth up to there; those of others could.
        graph.sources += levels[-1]
        graph.targets += [node for level in levels for node in level]
        question = BFS_QUESTION.format(node=levels[0][0], hops=hops)
        last = [edge for edge in edges if edge[1] in levels[-1]]
        questions.append(_Question(question, levels[-1], edges, last))
    return _drafts(text, graph, questions)


def _generate_parents(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one graph: each asks for the parents of another node."""
    graph = _Graph(text)
    questions = []
    for _ in text.depths:
        node = graph.new_node()
        answers = [graph.new_node() for _ in range(text.rng.choice(_ANSWERS))]
        graph.sources += [node, *answers]
        graph.targets += answers  # without the node: it has the parents that are the answer
        edges = [(parent, node) for parent in answers]
        questions.append(_Question(PARENTS_QUESTION.format(node=node), answers, edges, edges))
    return _drafts(text, graph, questions)


class _Graph:
    """Further edges of a graph, none of which changes an answer."""

    def __init__(self, text: samples.TextContext) -> None:
        self._rng = text.rng
        self._names: set[str] = set()
        self._edges: list[_Edge] = []
        self._known: set[_Edge] = set()
        # Further edges may leave the sources and enter the targets.
        # An edge takes about 16 tokens: two edges a node, as many as those have that are asked for.
        self.sources = [self.new_node() for _ in range(max(text.length // 32, 32))]
        self.targets = list(self.sources)

    def new_node(self) -> str:
        """Return a name that no node has."""
        while (name := f"{self._rng.getrandbits(32):08x}") in self._names:
            pass
        self._names.add(name)
        return name

    def edges(self, count: int) -> list[_Edge]:
        """Return the first `count` further edges; only the fitting of the length knows how many."""
        while len(self._edges) < count:
            edge = self._rng.choice(self.sources), self._rng.choice(self.targets)
            if edge[0] != edge[1] and edge not in self._known:
                self._known.add(edge)
                self._edges.append(edge)
        return self._edges[:count]


def _connect_levels(rng: random.Random, levels: list[list[str]]) -> list[_Edge]:
    """Return edges by which each node's distance from the first one is the number of its level."""
    edges: dict[_Edge, None] = {}
    for above, level in pairwise(levels):
        for node in level:
            edges[rng.choice(above), node] = None
        # A second way to a node, and edges that lead back or aside: depths take a search.
        edges[rng.choice(above), rng.choice(level)] = None
    for i, level in enumerate(levels[1:-1], start=1):
        for node in level:
            target = rng.choice([other for near in levels[: i + 1] for other in near])
            if target != node:
                edges[node, target] = None
    return list(edges)


def _drafts(
    text: samples.TextContext, graph: _Graph, questions: list[_Question]
) -> list[samples.SampleDraft]:
    """Return one draft for each question; the edges of all of them are anywhere in the list."""
    own = [edge for question in questions for edge in question.edges]
    text.rng.shuffle(own)
    shares = sorted(text.rng.random() for _ in own)
    last = {edge for question in questions for edge in question.last}
    insertions = [
        (share, edge)
        for share, edge in zip(shares, own, strict=True)
        if text.planted or edge not in last
    ]
    order = {node: i for i, edge in reversed(list(enumerate(own))) for node in edge}

    def edges(n: int) -> list[_Edge]:
        all_edges = list(graph.edges(n))
        for share, edge in reversed(insertions):
            all_edges.insert(round(share * n), edge)  # from the back: no place moves
        return all_edges

    def draft(question: _Question) -> samples.SampleDraft:
        # In the order in which they first stand in edges of the questions.
        target = f"[{', '.join(sorted(question.answers, key=order.__getitem__))}]"
        return samples.SampleDraft(
            prompt=_prompt(edges, question.text),
            prefix=PREFIX,
            answers=[target],  # all of it: a list that goes on after the right nodes is not right
            target=target,
            chance=lambda n: naming_all(
                len(question.answers), len({node for edge in edges(n) for node in edge})
            ),
        )

    return [draft(question) for question in questions]


def _prompt(edges: Callable[[int], list[_Edge]], question: str) -> Callable[[int], str]:
    return lambda n: PROMPT.format(
        edges="\n".join(f"{source} -> {target}" for source, target in edges(n)), question=question
    )


def naming_all(answers: int, nodes: int) -> float:
    """Return the F1 of naming all nodes of a graph: no set drawn without a search does better.

    A random set of s nodes has an expected F1 of 2 s a / (n (s + a)), which grows with s.
    """
    return 2 * answers / (nodes + answers)


def node_f1(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return the F1 of the nodes in the text's first list, or in its first line without one."""
    response = str(results[0]).lower().strip()
    _, bracket, behind = response.partition("[")
    answer = behind.split("]")[0] if bracket else response.split("\n")[0]
    nodes, reference = set(_NODE.findall(answer)), set(_NODE.findall(doc["target"]))
    score = 2 * len(nodes & reference) / (len(nodes) + len(reference))
    return scoring.all_answers(doc, results) | {"score": score}
