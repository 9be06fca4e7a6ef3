"""Made-up results of searches."""

import math
from pathlib import Path

from transformers import AutoConfig

import rope_patch
from rope_patch.searching import Candidate, SearchResult

TINY = Path(__file__).parents[2] / "assets" / "tiny-llama"


def rising_stretch(pairs, top=9.0, low=2, high=9):
    """Return a stretch for each pair: 1, then rising, then `top`."""
    return [top ** max(0.0, min(1.0, (i - low) / (high - low))) for i in range(pairs)]


def entry(number, fitness, best, method="longrope", complete=True, **options):
    return {
        "number": number,
        "origin": "curve" if method == "longrope" else method,
        "method": method,
        "options": options,
        "fitness": fitness,
        "complete": complete,
        "best": best,
        "seconds": 0.5,
    }


def history(pairs=16):
    """Return YaRN, a failed candidate, one that stopped early, and a better one."""
    stretch = rising_stretch(pairs)
    return [
        entry(1, 0.9, 0.9, "yarn"),
        entry(2, math.inf, 0.9, "ntk"),
        entry(3, 1.5, 0.9, "linear", complete=False),
        entry(4, 0.4, 0.4, long_factor=stretch, attention_factor=1.25),
    ]


def make_result(config_or_none=None, **changes):
    config = config_or_none or AutoConfig.from_pretrained(TINY)
    geometry = list(rope_patch.diagnose(config).rotations.values())[-1].geometry
    pairs = geometry.rotary_dim // 2
    best = history(pairs)[-1]
    values = {
        "model": "tiny",
        "weights": "sampled-sha256:0",
        "strategy": "curve",
        "seed": 42,
        "factor": 4.0,
        "geometry": geometry,
        "candidate": Candidate(best["origin"], best["method"], best["options"]),
        "history": history(pairs),
        "held_out": {},
        "evaluations_per_minute": 30.0,
        "versions": {"rope_patch": "0"},
        "command": "rope-patch search tiny --length 1024",
        "config": config.to_dict(),
        **changes,
    }
    return SearchResult(**values)
