"""Test perplexity, sliding windows and key tokens against plain computations of transformers."""

import itertools
import math
from pathlib import Path

import pytest
import torch
import train_tiny
from helpers.tiny_models import FAMILIES, make_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.evaluation import (
    default_short_context,
    find_key_tokens,
    longppl,
    losses_at,
    window_ends,
    window_losses,
)
from rope_patch.evaluation.measures import perplexity

ASSETS = Path(__file__).parents[2] / "assets"


@torch.no_grad()
def plain_losses(model, ids):
    """Return the cross entropy of every token but the first, from all logits at once."""
    batch = torch.tensor([ids])
    out = model(batch, use_cache=False).logits[0].float()
    return nn.functional.cross_entropy(out[:-1], batch[0, 1:], reduction="none")


@torch.no_grad()
def loss_of_last(model, ids, scored):
    """Return the mean loss of the last tokens that transformers computes from labels."""
    batch = torch.tensor([ids])
    labels = batch.clone()
    labels[:, :-scored] = -100
    return model(batch, labels=labels, use_cache=False).loss.item()


@pytest.fixture(scope="module")
def llama():
    """Return a model and 200 tokens that begin with one of the beginning of the sequence."""
    return make_model(), [1, *tokens(199)[0].tolist()]


# -- losses of documents ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [None, "yarn"])
def test_losses_equal_those_of_the_whole_logits(family, method, monkeypatch):
    """Gemma2 soft-caps its logits outside of the head."""
    monkeypatch.setattr(perplexity, "HEAD_CHUNK", 17)
    model = make_model(family)
    if method:
        rope_patch.patch(model, method, factor=4)
    ids = tokens(150)[0].tolist()
    got = perplexity.token_losses(model, ids, scored=149, label="test")
    torch.testing.assert_close(got, plain_losses(model, ids), rtol=0, atol=1e-5)


def test_logits_are_computed_in_chunks_and_the_model_is_unchanged(monkeypatch):
    monkeypatch.setattr(perplexity, "HEAD_CHUNK", 16)
    model = make_model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    chunk_sizes = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: chunk_sizes.append(out.shape[1]))
    perplexity.token_losses(model, tokens(100)[0].tolist(), scored=99, label="test")
    assert max(chunk_sizes) == 16
    assert sum(chunk_sizes) == 99
    hook.remove()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())


def test_blocks_are_means_over_positions_without_the_first():
    losses = torch.arange(1.0, 200)  # of positions 1 to 199
    means = perplexity.block_losses(losses, 64)
    positions = torch.arange(200.0)
    expected = [positions[1:64].mean(), positions[64:128].mean(), positions[128:192].mean()]
    assert means == [mean.item() for mean in expected]
    assert perplexity.block_losses(losses[:191], 64) == means  # 192 tokens: whole blocks, no more
    assert perplexity.block_losses(losses[:190], 64) == means[:2]


@pytest.mark.parametrize(("block", "window"), [(64, 64), (64, 192), (16, 16), (50, 50)])
def test_points_pool_the_tokens_of_all_documents(block, window):
    """The reference is means over single tokens; the documents' losses are far apart."""
    generator = torch.Generator().manual_seed(0)
    lengths = (600, 400)
    documents = [
        (n + 1) * torch.rand(length - 1, generator=generator, dtype=torch.float64)
        for n, length in enumerate(lengths)
    ]
    points = perplexity.curve_points(
        [perplexity.block_losses(losses, block) for losses in documents], block, window
    )
    assert [point["end"] for point in points] == list(range(window, 601, window))
    for point in points:
        end = point["end"]
        scored = torch.cat(
            [
                losses[max(end - window - 1, 0) : end - 1]
                for losses, length in zip(documents, lengths, strict=True)
                if end <= length
            ]
        )
        assert point["tokens"] == len(scored)
        assert point["nll"] == pytest.approx(scored.mean().item(), rel=1e-12)
        assert point["perplexity"] == pytest.approx(scored.mean().exp().item(), rel=1e-12)


def test_nan_and_infinite_losses_stay_in_their_points():
    points = perplexity.curve_points([[1.0, math.nan, math.inf, 1e4, 2.0], []], 64, 64)
    assert [point["perplexity"] for point in points] == [
        pytest.approx(math.e),
        pytest.approx(math.nan, nan_ok=True),
        math.inf,
        math.inf,
        pytest.approx(math.e**2),
    ]


def test_windows_are_made_of_whole_blocks_and_are_about_a_dozen():
    sizes = {2: 2, 16: 16, 50: 50, 64: 64, 128: 64, 8192: 64}
    assert {window: perplexity.block_size(window) for window in sizes} == sizes
    windows = {16384: 1024, 12288: 1024, 131072: 8192, 1024: 64, 100: 16}
    assert {length: perplexity.default_window(length) for length in windows} == windows
    for window in (*windows.values(), *map(perplexity.default_window, (10, 256))):
        perplexity.block_size(window)
    for window, instead in ((1000, "1024"), (1, "64")):
        with pytest.raises(ValueError, match=f"got {window}: try {instead}"):
            perplexity.block_size(window)


def test_the_control_sees_only_the_last_tokens_and_the_head_of_the_document(llama):
    model, ids = llama
    cut = {"end": 180, "window": 20, "context": 60}
    loss = perplexity.control_loss(model, ids, **cut)
    assert loss == pytest.approx(plain_losses(model, ids[120:180])[-20:].mean().item(), abs=1e-5)
    other = [*reversed(ids[:120]), *ids[120:]]  # another far past
    assert perplexity.control_loss(model, other, **cut) == loss
    expected = plain_losses(model, [1, *ids[121:180]])[-20:].mean().item()
    assert perplexity.control_loss(model, ids, **cut, head=1) == pytest.approx(expected, abs=1e-5)
    assert perplexity.excerpt(ids, 0, 60, head=1) == ids[:60]


# -- sliding windows -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("method", [None, "yarn", "dynamic"])
def test_windows_equal_a_direct_computation(family, method):
    model, ids = make_model(family), tokens(400)[0].tolist()
    if method:
        rope_patch.patch(model, method, factor=4)
    ends = window_ends(400, longest=240, stride=32, windows=4)
    got = {n: window_losses(model, ids, n, 32, ends, "test") for n in (60, 120, 240)}
    model = model.double()
    for length, means in got.items():
        expected = [loss_of_last(model, ids[end - length : end], 32) for end in ends]
        assert means == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(got[60], got[240], strict=True)) > 1e-2


def test_one_window_over_the_whole_document_equals_the_full_pass_and_others_start_with_its_head(
    llama,
):
    model, ids = llama
    full = perplexity.document_losses(model, ids, "test")
    got = window_losses(model, ids, 200, 40, window_ends(200, 200, 40, 1), "test")
    assert got == [full[-40:].double().mean().item()]
    (got,) = window_losses(model, ids, 60, 20, [180], "test", head=1)
    assert got == pytest.approx(loss_of_last(model, [1, *ids[121:180]], 20), abs=1e-5)


@pytest.mark.parametrize(
    ("total", "longest", "stride", "windows", "count"),
    [
        (16384, 8192, 256, 8, 8),
        (12288, 8192, 256, 100, 17),
        (8192, 8192, 256, 8, 1),
        (8192 + 7 * 256, 8192, 256, 8, 8),  # just enough
        (8192 + 7 * 256 - 1, 8192, 256, 8, 7),
        (1001, 500, 7, 10, 10),
    ],
)
def test_ends_are_spread_evenly_and_score_no_token_twice(total, longest, stride, windows, count):
    ends = window_ends(total, longest, stride, windows)
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    assert len(ends) == count
    assert ends[-1] == total
    assert ends[0] == longest or count == 1
    assert all(gap >= stride for gap in gaps)
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_documents_and_windows_that_are_too_short_are_refused(llama):
    with pytest.raises(ValueError, match="8,192 tokens, got 8,000"):
        window_ends(8000, 8192, 256, 8)
    with pytest.raises(ValueError, match="256 tokens scored, got 256"):
        window_losses(*llama, 256, 256, [300], "test")


# -- key tokens ------------------------------------------------------------------------------------

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
        key_tokens = find_key_tokens(model, ids, TRAINED, SHORT)
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
    filler = train_tiny.FILLER_IDS[0]
    without = [
        filler if token >= train_tiny.KEY_IDS[0] and i < answers[0] - 1 else token
        for i, token in enumerate(ids)
    ]
    assert len(set(answers) & set(find_key_tokens(model, ids, TRAINED, SHORT))) >= 5
    assert not set(answers) & set(find_key_tokens(model, without, TRAINED, SHORT))


@torch.no_grad()
def test_key_tokens_fit_the_definition(model):
    """Compute each token's loss after each of its two contexts separately in float64.

    Tokens whose loss is within rounding of a threshold may fall on either side.
    """
    ids, _ = recall_text(400, seed=1)
    key_tokens = find_key_tokens(model, ids, TRAINED, SHORT)
    model = model.double()

    def loss(position, context):
        """Start at the first multiple of `context` that leaves at most two contexts to read."""
        start = max(0, math.ceil((position + 1) / context - 2) * context)
        logits = model(torch.tensor([ids[start:position]])).logits[0, -1]
        return -logits.log_softmax(-1)[ids[position]].item()

    try:
        for position in {*range(130, 400, 15), *key_tokens}:
            long, short = loss(position, TRAINED // 2), loss(position, SHORT)
            margin = min(short - long - 2, 2 - long)
            assert abs(margin) < 1e-4 or (position in key_tokens) == (margin > 0)
    finally:
        model.float()
    assert len(key_tokens) > 5


@pytest.fixture
def passes(monkeypatch):
    """Record the tokens of passes, and how many are scored, instead of running them."""
    recorded = []

    def count(_, ids, scored, label):
        recorded.append((ids, scored))
        return torch.zeros(scored)

    monkeypatch.setattr(perplexity, "token_losses", count)
    return recorded


@pytest.mark.parametrize("length", [12_288, 12_289, 8192, 8193, 5000, 2049, 100, 2])
def test_every_token_is_scored_once_within_the_trained_length(passes, length):
    assert find_key_tokens(None, [5] * length, 8192, 1024) == []
    assert max(len(ids) for ids, _ in passes) <= 8192
    assert sum(scored for _, scored in passes) == 2 * (length - 1)
    assert all(scored > 0 for _, scored in passes)
    if length == 12_288:  # a document costs few passes
        assert [len(ids) for ids, _ in passes] == [8192] * 2 + [2048] * 11


def test_windows_of_key_tokens_start_with_the_head_of_the_document(passes):
    find_key_tokens(None, list(range(300)), 128, 32, head=2)
    assert all(ids[:2] == [0, 1] for ids, _ in passes)
    assert [66, *range(67, 128)] == passes[1][0][2:64] == list(range(66, 128))


@torch.no_grad()
def test_longppl_is_the_perplexity_of_the_key_tokens():
    model, ids = make_model(), tokens(150)[0].tolist()
    positions = [1, 70, 149]
    got = losses_at(perplexity.document_losses(model, ids, "test"), positions)
    chances = model.double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [-chances[i - 1, ids[i]].item() for i in positions]
    assert got == pytest.approx(expected, abs=1e-5)
    assert longppl(got) == pytest.approx(math.exp(sum(expected) / 3), rel=1e-5)
    assert longppl([1e4]) == math.inf
    assert math.isnan(longppl([]))


def test_the_short_context_is_an_eighth_by_default_and_bounded():
    contexts = {40: 10, 64: 16, 256: 32, 512: 64, 8192: 1024, 32768: 4096}
    assert {length: default_short_context(length) for length in contexts} == contexts
    for short_context in (0, 65):
        with pytest.raises(ValueError, match=f"1 to 64 tokens, .* got {short_context}"):
            find_key_tokens(None, [5] * 300, 256, short_context)
