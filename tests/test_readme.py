"""README's Python runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.methods import registered

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "assets" / "tiny-llama"
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(snippet, tmp_path, monkeypatch, capsys):
    """Hub names and folders become the tiny model of the tests; nothing else is changed."""
    code = re.sub(r'"(HuggingFaceTB/[^"]*|path/or/hub-id)"', repr(str(TINY)), snippet)
    assert code != snippet or "HuggingFaceTB" not in snippet
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(TINY)
    inputs = {"input_ids": torch.arange(3, 40)[None], "max_new_tokens": 4}
    names = {"rope_patch": rope_patch, "model": model, "inputs": inputs}
    exec(compile(code, "README.md", "exec"), names)


def test_every_method_is_in_the_table():
    table = (ROOT / "README.md").read_text()
    for name, method in registered().items():
        assert f"| `{name}` |" in table
        assert method.training in table or name == "default"
