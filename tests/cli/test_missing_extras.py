"""Test that a package which is missing is one line in every command, with what installs it."""

import sys
from functools import partial
from pathlib import Path

import pytest
from helpers.commands import run_in_new_process

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
EVALUATED = "eval TINY --method none --lengths 128 --tasks rp_recall_ll"
NEEDED = [  # words of a command, in which TINY is a model, with a package, and what installs it
    *((EVALUATED, package, "eval") for package in ("lm_eval", "datasets", "matplotlib")),
    ("report no", "matplotlib", "eval"),
    ("picture clock", "matplotlib", "eval"),
    ("search TINY --length 512", "optuna", "search"),
    ("recommend TINY --length 512 --minutes 1", "scipy", "search"),
    ("extend TINY --to 2x", "scipy", "all"),
    ("finetune --config smoke_cpu", "accelerate", "train"),
    ("finetune --config smoke_cpu --inspect-data --duplicates", "datasketch", "train"),
]


def block(package):
    """Have a package missing, as in an environment without its extra."""
    for name in [*sys.modules]:
        if name == package or name.startswith(f"{package}.") or name.startswith("rope_patch."):
            del sys.modules[name]
    sys.modules[package] = None


@pytest.mark.parametrize(("words", "package", "extra"), NEEDED)
def test_a_missing_package_is_one_line_with_what_installs_it(words, package, extra, tmp_path):
    command = [TINY if word == "TINY" else word for word in words.split()]
    result = run_in_new_process(*command, cwd=tmp_path, before=partial(block, package))
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert package in line
    assert f"pip install '.[{extra}]'" in line
    assert not list(tmp_path.iterdir())
