"""README's Python runs as it stands there."""

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.methods import registered
from rope_patch.training import recipe_files

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
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    names = {"rope_patch": rope_patch, "model": model, "tokenizer": tokenizer}
    exec(compile(code, "README.md", "exec"), names)


def test_every_method_is_in_the_table():
    table = (ROOT / "README.md").read_text()
    for name, method in registered().items():
        assert f"| `{name}` |" in table
        assert method.training in table or name == "default"


def test_what_it_says_to_type_needs_no_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*.md")]
    text = "\n".join(path.read_text() for path in [*pages, ROOT / "eval" / "README.md"])
    recipes = re.findall(r"finetune .*?--config (\S+)", text)
    assert len(recipes) > 4
    for recipe in recipes:
        assert recipe_files.find(Path(recipe)).is_file()
    files = re.findall(r"rope-patch recipes ([a-z]\w+) > ", text)
    assert len(files) > 2
    assert all(recipe_files.read(file) for file in files)
    assert re.findall(r"--include_path (\S+)", text) == ['"$(rope-patch'] * 2
    scripts = re.findall(r"`python recipes/(\w+)\.py`(,\s+in a clone)?", text)
    assert scripts
    assert all(clone for _, clone in scripts)
