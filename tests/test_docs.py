"""Test README and docs/: snippets run, links resolve, and commands exist."""

import inspect
import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import typer
from helpers.commands import run_in_this_process
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rope_patch
from rope_patch import tasks
from rope_patch.cli import app
from rope_patch.methods import registered_methods

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "assets" / "tiny-llama"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
RESULTS = sorted((ROOT / "eval" / "results").rglob("*.md"))
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "recipes" / "README.md", ROOT / "eval" / "README.md"]

# A snippet, and the exact output if a `text` block follows.
SNIPPET = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", flags=re.DOTALL)
FENCED = re.compile(r"```.*?```", flags=re.DOTALL)
SHELL = re.compile(r"```(?:bash|console|sh)\n(.*?)```", flags=re.DOTALL)
MADE_BY = re.compile(r"Made by `rope-patch ([^`]*)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"\b((?:tests|recipes)/[\w/]+\.py)\b")

# These pages measure a model, so they run the trained tiny one, at lengths within its reach.
SMALLER = {
    "evaluation.md": {"factor=4, out=": 'lengths=[256], tasks=["rp_recall_ll"], factor=2, out='},
    "search.md": {"length=32768": "length=512", ', folder="out/search"': ", **QUICK"},
    "recommend.md": {"length=32768, budget=60": "length=512, budget=60, **QUICK"},
    "verify.md": {},
}
QUICK = {
    "search.md": {"folder": "out/search", "budget": 2, "progress": False},
    "recommend.md": {"most": 6, "search": False, "progress": False},
}


def page_id(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """Save a random model with SmolLM2's rotation and two layers, and a tokenizer."""
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "page", [page for page in PAGES if SNIPPET.search(page.read_text())], ids=page_id
)
def test_snippets_run(page, smollm2, tmp_path, monkeypatch, capsys):
    """Execute a page's snippets in order, with a small model's folder for model names."""
    folder = TINY if page.name in SMALLER else smollm2
    monkeypatch.chdir(tmp_path)
    names = {"QUICK": QUICK.get(page.name)}  # all other names are the page's own
    for snippet, output in SNIPPET.findall(page.read_text()):
        code = re.sub(
            r'"(HuggingFaceTB/[^"]*|path/or/hub-id|\./my-model)"', repr(str(folder)), snippet
        )
        for large, small in SMALLER.get(page.name, {}).items():
            code = code.replace(large, small)
        capsys.readouterr()
        exec(compile(code, str(page), "exec"), names)
        if output:
            assert capsys.readouterr().out == output


@pytest.mark.parametrize("page", SMALLER)
def test_shortened_arguments_occur_in_the_snippets(page):
    text = "".join(snippet for snippet, _ in SNIPPET.findall((ROOT / "docs" / page).read_text()))
    assert all(large in text for large in SMALLER[page])


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


@pytest.mark.parametrize("page", [*PAGES, *GUIDES, *RESULTS], ids=page_id)
def test_links_resolve(page):
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(page):
    """Return the anchors that GitHub and MkDocs give a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_and_its_picture_have_the_numbers_of_the_report(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "generate")
    import readme_picture

    assert readme_picture.draw() == readme_picture.PICTURE.read_text(encoding="utf-8")
    stats = readme_picture.RunStatistics(json.loads(readme_picture.REPORT.read_text()))

    def likely(label, length):
        return math.exp(-stats.answer_loss(label, length).mean.estimate)

    text = (ROOT / "README.md").read_text()
    plain, patched = likely("none", 16384), likely("yarn ×2", 16384)
    assert f"each token of a right answer {plain:.1%}; with `yarn` it is {patched:.0%}." in text
    within = sorted(likely("none", length) for length in (4096, 8192))
    assert f"the plain model gives {within[0] * 100:.0f} to {within[1]:.0%}." in text


def test_readme_links_every_page():
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in DOCS if f"(docs/{page.name})" not in text] == []


def test_site_lists_every_page():
    text = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS if not re.search(rf"[:-] {page.name}\n", text)] == []


def test_site_has_twelve_menu_entries():
    text = (ROOT / "mkdocs.yml").read_text()
    assert len(re.findall(r"^  - ", text[text.index("\nnav:") :], flags=re.MULTILINE)) == 12


def test_methods_table_has_every_method():
    table = (ROOT / "docs" / "methods.md").read_text()
    for name, method in registered_methods().items():
        assert f"| `{name}` |" in table
        assert method.training in table or name == "default"


def command_lines(page):
    """Return the `rope-patch` lines of a page: those in shell blocks, and "Made by `...`"."""
    text = page.read_text()
    lines = [
        line for block in SHELL.findall(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    found = [re.search(r"(?:^|[\s$])rope-patch (.*)", line) for line in lines]
    return [match[1] for match in found if match] + MADE_BY.findall(text)


def command_words(line):
    """Return the words of a command, up to a pipe or the next command."""
    line = re.sub(r'"\$@"|\$\{?words\b\}?', "", re.sub(r"\$\([^)]*\)", "FOLDER", line))
    words = shlex.split(line, comments=True)
    end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";")), len(words))
    return words[:end]


@pytest.mark.parametrize("page", [*PAGES, *GUIDES, *RESULTS], ids=page_id)
def test_commands_are_ones_that_the_command_line_takes(page):
    """Parse each `rope-patch` line by the command line, and run none; tests of recipes check those.

    Names of methods, tasks, recipes and strategies are looked up, too, because the commands
    themselves do that.
    """
    commands = typer.main.get_command(app).commands
    helps = {
        f"{name} {option.name}": set(re.findall(r"[\w-]+", getattr(option, "help", None) or ""))
        for name in ("eval", "search")
        for option in commands[name].params
    }
    known_tasks = {*helps["eval tasks"], *tasks.names(), *tasks.groups()}
    for line in command_lines(page):
        name, *words = command_words(line)
        with commands[name].make_context(name, words) as context:
            given = {key: value for key, value in context.params.items() if value is not None}
        if name in ("eval", "compare") and not given.get("include_path"):
            measured = set((given.get("tasks") or "rp_short").split(","))
            assert measured <= known_tasks, line
        if name in ("eval", "compare", "patch", "export", "diagnose") and not given.get("plugin"):
            asked = given.get("method") or "none"
            methods = ",".join([asked] if isinstance(asked, str) else asked).split(",")
            known = {"none", *registered_methods()}
            assert {m for m in methods if "/" not in m and "$" not in m} <= known, line
        if name == "search":
            assert given["strategy"] in helps["search strategy"], line
        if name == "finetune":
            assert_in_the_package(words[words.index("--config") + 1])


def assert_in_the_package(recipe):
    """Assert that a recipe or a launch file is one that `rope-patch recipes` writes."""
    path = Path(recipe)
    assert path.parent in (Path(), Path("recipes/configs")), recipe
    result = run_in_this_process("recipes", path.stem)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_documented_commands_need_no_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "\n".join(path.read_text() for path in [*PAGES, *GUIDES])
    recipes = re.findall(r"finetune .*?--config (\S+)", text)
    assert len(recipes) > 4
    for recipe in recipes:
        assert_in_the_package(recipe.strip("`"))
    files = re.findall(r"rope-patch recipes ([a-z]\w+) > ", text)
    assert len(files) > 2
    for file in files:
        assert_in_the_package(file)
    assert re.findall(r"--include_path (\S+)", text) == ['"$(rope-patch'] * 2
    scripts = re.findall(r"`python recipes/experiments/(\w+)\.py[^`]*`(,\s+in\s+a\s+clone)?", text)
    assert scripts
    assert all(clone for _, clone in scripts)


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=page_id)
def test_named_files_exist(page):
    for file in NAMED_FILE.findall(page.read_text()):
        assert (ROOT / file).is_file(), file


def test_every_public_name_has_a_docstring():
    missing = []
    for name in rope_patch.__all__:
        value = getattr(rope_patch, name)
        missing += [] if inspect.getdoc(value) else [name]
        if inspect.isclass(value):
            members = {key: m for key, m in vars(value).items() if not key.startswith("_")}
            missing += [
                f"{name}.{key}"
                for key, member in members.items()
                if (inspect.isfunction(member) or isinstance(member, property))
                and not inspect.getdoc(member)
            ]
    assert missing == []


def test_reference_has_every_public_name(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "generate")
    sys.modules.pop("reference", None)
    import reference

    text = reference.render()
    for name in rope_patch.__all__:
        assert f"heading: rope_patch.{name}\n" in text


def test_paths_on_the_architecture_page_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`(rope_patch/[\w/]+(?:\.py|/))`", text)
    assert len(paths) >= 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
