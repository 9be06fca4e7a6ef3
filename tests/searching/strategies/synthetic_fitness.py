"""Geometries of real models, and fitness functions with a known optimum."""

import math
import random

from rope_patch.methods import Geometry
from rope_patch.searching import STRATEGIES, SearchSpace

GEOMETRIES = {
    "llama-2": Geometry(head_dim=128, theta=1e4, trained_length=4096),
    "llama-3": Geometry(head_dim=128, theta=5e5, trained_length=8192),
    "qwen3": Geometry(head_dim=128, theta=1e6, trained_length=32768),
    "smollm2": Geometry(head_dim=64, theta=1e5, trained_length=8192),
    "phi-3-mini": Geometry(head_dim=96, theta=1e4, trained_length=4096),
    "phi-2": Geometry(head_dim=80, rotary_dim=32, theta=1e4, trained_length=2048),
    "tiny": Geometry(head_dim=32, theta=1e4, trained_length=256),
}
SPACES = {name: SearchSpace(geometry, 4.0) for name, geometry in GEOMETRIES.items()}


class Landscape:
    """Squared distance of log stretches and of the attention factor to a hidden optimum.

    The noise is deterministic, like that of fixed samples: a rough function of the candidate.
    """

    def __init__(self, space, seed, attention_factor=None):
        draw = random.Random(seed)
        self.space = space
        end = draw.uniform(0.6, 1.0) * space.geometry.pair_with_rotations(1.0)
        start = draw.uniform(0.0, 0.5) * end
        top = math.log(space.factor * draw.uniform(1.0, 1.25))
        ramps = (min(max((i - start) / (end - start), 0), 1) for i in range(space.pairs))
        power = draw.uniform(0.8, 1.5)
        # Between a straight line and YaRN's curve in log stretch, and not quite smooth.
        rough = [ramp**power * top + draw.uniform(-0.05, 0.05) for ramp in ramps]
        self.optimum = [max(0.0, *rough[: i + 1]) for i in range(space.pairs)]
        self.attention_factor = attention_factor or draw.uniform(1.0, 1.25)
        self.phase = draw.uniform(0, 6)

    def __call__(self, candidate):
        stretch = candidate.stretch(self.space)
        gaps = [math.log(s) - o for s, o in zip(stretch, self.optimum, strict=True)]
        gap = candidate.attention_factor(self.space) - self.attention_factor
        distance = sum(g * g for g in gaps) / len(gaps) + 5 * gap**2
        return distance + 0.002 * (1 + math.sin(300 * (sum(gaps) + gap) + self.phase))


def run(proposals, fitness):
    """Run a search until it ends; return all candidates with their fitnesses."""
    evaluations = []
    candidate = next(proposals, None)
    while candidate is not None:
        evaluations.append((candidate, fitness(candidate)))
        try:
            candidate = proposals.send(evaluations[-1][1])
        except StopIteration:
            break
    return evaluations


def proposals(name, model="tiny", budget=20, seed=1, **options):
    """Return a strategy's proposals on one of SPACES."""
    return STRATEGIES[name].propose(SPACES[model], budget, seed, **options)


def scan(name, space):
    """Return all candidates of a scan over critical pairs, by their pair, in their order."""
    evaluations = run(STRATEGIES[name].propose(space, 99, 1), lambda candidate: 1.0)
    return {float(each.origin.removeprefix("pair ")): each for each, _ in evaluations}
