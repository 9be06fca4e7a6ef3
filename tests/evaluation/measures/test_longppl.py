"""Test key tokens: exactly those that need the far past, and LongPPL."""

import math
from pathlib import Path

import pytest
import torch
import train_tiny
from helpers.tiny_models import make_model, tokens
from transformers import AutoModelForCausalLM

from rope_patch.evaluation.measures import longppl, perplexity

ASSETS = Path(__file__).parents[2] / "assets"
TRAINED, SHORT, PAIRS = train_tiny.TRAINED_LENGTH, 32, 8


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def model(request):
    return AutoModelForCausalLM.from_pretrained(ASSETS / f"tiny-{request.param}").eval()


def recall_text(length, seed):
    """Return pairs in filler with questions at the end, and the positions of the answers."""
    generator = torch.Generator().manual_seed(seed)
    ids, _ = train_tiny.recall_batch(generator, 1, length, PAIRS)
    return ids[0].tolist(), range(length - 2 * PAIRS + 1, length, 2)


@pytest.mark.parametrize("length", [TRAINED, 2 * TRAINED])
def test_answers_are_key_tokens_if_only_the_long_context_holds_them(model, length):
    """The models recall almost all values that they see, so where a pair stands decides.

    Short windows of 64 tokens start every 32, so the answers, in the last 16 tokens, are read from
    position length - 64 on; long windows of 256 start every 128, so they are read from length - 256
    on. A value that both see, or neither, is no key token.
    """
    far, others = [], []
    for seed in range(6):
        ids, answers = recall_text(length, seed)
        key_tokens = longppl.find_key_tokens(model, ids, TRAINED, SHORT)
        for answer in answers:
            pair = ids.index(ids[answer])
            only_long = length - TRAINED <= pair < length - 2 * SHORT
            (far if only_long else others).append(answer in key_tokens)
    assert len(far) >= 15
    assert len(others) >= 5
    assert sum(far) >= 0.95 * len(far)
    assert sum(others) <= 0.05 * len(others)


def test_answers_without_a_pair_in_the_text_are_no_key_tokens(model):
    """Replace only the pairs by filler."""
    ids, answers = recall_text(TRAINED, seed=1)
    is_pair = [token >= train_tiny.KEY_IDS[0] and i < answers[0] - 1 for i, token in enumerate(ids)]
    without = [
        train_tiny.FILLER_IDS[0] if pair else token
        for pair, token in zip(is_pair, ids, strict=True)
    ]
    assert len(set(answers) & set(longppl.find_key_tokens(model, ids, TRAINED, SHORT))) >= 5
    assert not set(answers) & set(longppl.find_key_tokens(model, without, TRAINED, SHORT))


def test_key_tokens_fit_the_definition(model):
    """Compute each token's loss after each of its two contexts separately in float64.

    Tokens whose loss is within rounding of a threshold may fall on either side.
    """
    ids, _ = recall_text(400, seed=1)
    key_tokens = longppl.find_key_tokens(model, ids, TRAINED, SHORT)
    model = model.double()

    def loss(position, context):
        """Start at the first multiple of `context` that leaves at most two contexts to read."""
        start = max(0, math.ceil((position + 1) / context - 2) * context)
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:position]])).logits[0, -1]
        return -logits.log_softmax(-1)[ids[position]].item()

    try:
        for position in {*range(130, 400, 9), *key_tokens}:
            long, short = loss(position, TRAINED // 2), loss(position, SHORT)
            margin = min(short - long - 2, 2 - long)
            assert abs(margin) < 1e-4 or (position in key_tokens) == (margin > 0)
    finally:
        model.float()
    assert len(key_tokens) > 5


@pytest.fixture
def passes(monkeypatch):
    """Record the lengths of passes instead of running them."""
    lengths = []

    def count(_, ids, scored, label):
        lengths.append((len(ids), scored))
        return torch.zeros(scored)

    monkeypatch.setattr(perplexity, "token_losses", count)
    return lengths


@pytest.mark.parametrize("length", [12_288, 12_289, 8192, 8193, 5000, 2049, 100, 2])
def test_every_token_is_scored_once_within_the_trained_length(passes, length):
    assert longppl.find_key_tokens(None, [5] * length, 8192, 1024) == []
    assert max(read for read, _ in passes) <= 8192
    assert sum(scored for _, scored in passes) == 2 * (length - 1)
    assert all(scored > 0 for _, scored in passes)


def test_a_document_costs_few_passes(passes):
    longppl.find_key_tokens(None, [5] * 12_288, 8192, 1024)
    assert [read for read, _ in passes] == [8192] * 2 + [2048] * 11


def test_windows_start_with_the_head_of_the_document(monkeypatch):
    windows = []
    monkeypatch.setattr(
        perplexity,
        "token_losses",
        lambda _, ids, scored, label: windows.append(ids) or torch.zeros(scored),
    )
    longppl.find_key_tokens(None, list(range(300)), 128, 32, head=2)
    assert all(ids[:2] == [0, 1] for ids in windows)
    assert [66, *range(67, 128)] == windows[1][2:64] == list(range(66, 128))


def test_longppl_is_the_perplexity_of_the_key_tokens():
    model, ids = make_model(), tokens(150)[0].tolist()
    positions = [1, 70, 149]
    with torch.no_grad():
        chances = model.double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [-chances[i - 1, ids[i]].item() for i in positions]
    model.float()
    got = longppl.losses_at(perplexity.document_losses(model, ids, "test"), positions)
    assert got == pytest.approx(expected, abs=1e-5)
    assert longppl.longppl(got) == pytest.approx(math.exp(sum(expected) / 3), rel=1e-5)
    assert longppl.longppl([1e4]) == math.inf
    assert math.isnan(longppl.longppl([]))


def test_the_short_context_is_an_eighth_by_default_and_bounded():
    lengths = (40, 64, 256, 512, 8192, 32768)
    shorts = [longppl.default_short_context(length) for length in lengths]
    assert shorts == [10, 16, 32, 64, 1024, 4096]
    for short_context in (0, 65):
        with pytest.raises(ValueError, match=rf"1 to 64 tokens, .* got {short_context}"):
            longppl.find_key_tokens(None, [5] * 300, 256, short_context)
