"""Test a candidate's fitness against transformers' loss, and the early stop of candidates."""

import copy
import itertools
import json
import math

import pytest
import torch
from helpers.search_fixtures import LENGTH, TRAINED, load, questions, stretch_candidate
from helpers.tiny_models import make_model

import rope_patch
from rope_patch.inference import Sample
from rope_patch.searching import Candidate, Evaluation, Fitness, predicted_deficit

CANDIDATES = {
    "plain": None,
    "yarn": Candidate("yarn", "yarn"),
    "stretched": stretch_candidate(1.5),
    "rerope": Candidate("rerope", "rerope", {"window": 200}),
    "sharpened": stretch_candidate(0.7, attention_factor=1.1),
}
MEASURED = {
    "llama": list(CANDIDATES),
    "qwen3": ["sharpened"],
    "gemma3": ["yarn", "stretched", "rerope"],  # only its full-attention layers are patched
}


def make_fitness(model, samples):
    return Fitness(model, samples, rope_patch.Extension("longrope", length=LENGTH))


def native(model, candidate):
    """Return a plain transformers model whose config has the candidate's rotation, or its map."""
    config = copy.deepcopy(model.config)
    is_map = candidate is not None and candidate.method == "rerope"
    if candidate is not None and not is_map:
        config.max_position_embeddings = LENGTH
        parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
        rope_parameters = {"original_max_position_embeddings": TRAINED, "factor": LENGTH / TRAINED}
        rope_parameters |= {"rope_type": candidate.method, **candidate.options}
        if candidate.method == "longrope":
            attention_factor = math.sqrt(
                1 + math.log(rope_parameters["factor"]) / math.log(TRAINED)
            )
            rope_parameters = {
                "short_factor": [1.0] * 16,
                "attention_factor": attention_factor,
            } | rope_parameters
        parameters |= rope_parameters
    twin = type(model)(config)
    twin.load_state_dict(model.state_dict())
    if is_map:
        rope_patch.patch(twin, candidate.method, **candidate.options)
    return twin.eval()


@torch.no_grad()
def reference_loss(twin, sample):
    """Return the loss from all logits of one pass, and which answers are right."""
    logits = twin(torch.tensor([sample.ids]), use_cache=False).logits[0].double()
    likely = logits.log_softmax(-1)
    nll = [-likely[p - 1, sample.ids[p]].item() for p in sample.positions]
    hits = [
        all(logits[p - 1].argmax() == sample.ids[p] for p in range(a, b)) for a, b in sample.answers
    ]
    return sum(nll) / len(nll), tuple(hits)


def uneven_samples():
    """Return a batch, and samples of several lengths of one text, with answers of many tokens."""
    samples = questions(count=3)
    long = questions(LENGTH, count=1, seed=5)[0].ids
    samples += [
        Sample(long[:stop], ((300, 304), (stop - 9, stop - 2)), "text") for stop in (410, 450)
    ]
    return samples


@pytest.mark.parametrize("name", MEASURED)
def test_losses_equal_those_of_transformers_and_leave_the_model_as_it_was(name):
    model = load(name)
    ids = torch.tensor([questions(count=1)[0].ids])
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    config = copy.deepcopy(model.config.to_dict())
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    fitness = make_fitness(model, uneven_samples())
    found = {each: fitness.measure(CANDIDATES[each]) for each in MEASURED[name]}
    failed = fitness.measure(Candidate("short", "longrope", {"long_factor": [1.0, 2.0]}))

    assert "long_factor" in failed.error
    assert (failed.fitness, failed.tokens) == (math.inf, 0)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before)
    assert rope_patch.current(model) is None
    assert model.config.to_dict() == config
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    for each, evaluation in found.items():
        twin = native(model, CANDIDATES[each])
        expected = [reference_loss(twin, sample) for sample in fitness.samples]
        assert (evaluation.error, evaluation.complete) == (None, True)
        assert evaluation.nll == pytest.approx([nll for nll, _ in expected], abs=2e-4)
        assert evaluation.hits == tuple(hits for _, hits in expected)
        assert evaluation.fitness == pytest.approx(sum(nll for nll, _ in expected) / 5, abs=2e-4)
        assert Evaluation.from_dict(json.loads(json.dumps(evaluation.to_dict()))) == evaluation
    losses = [evaluation.fitness for evaluation in found.values()]
    assert all(abs(a - b) > 1e-3 for a, b in itertools.combinations(losses, 2))


def test_dynamic_methods_rotate_for_the_whole_sample(model):
    """A prompt is rotated for its length including the answers, as in one pass."""
    samples, dynamic = questions(count=2), Candidate("d", "dynamic-yarn")
    fitness = make_fitness(model, samples)
    alone = [make_fitness(model, [sample]).measure(dynamic).nll[0] for sample in fitness.samples]
    assert fitness.measure(dynamic).nll == pytest.approx(alone, abs=1e-4)


def test_shared_prefixes_are_read_once(model):
    """Only whole chunks of 512 tokens are shared."""
    text = questions(1100, count=1)[0].ids
    samples = [
        Sample((*text[: 1030 + i], 260, 390), ((1031 + i, 1032 + i),), "text") for i in range(3)
    ]
    fitness = make_fitness(model, samples)
    evaluation = fitness.measure(CANDIDATES["yarn"])
    assert evaluation.tokens < 1100
    twin = native(model, CANDIDATES["yarn"])
    assert evaluation.nll == pytest.approx(
        [reference_loss(twin, s)[0] for s in fitness.samples], abs=2e-4
    )


def test_answers_and_prose_have_the_same_weight(model):
    answers = questions(count=2)
    prose = [Sample(s.ids, ((400, 440),), f"p{s.group}", prose=True) for s in questions(count=4)]
    fitness = make_fitness(model, [*answers, *prose])
    evaluation = fitness.measure(CANDIDATES["yarn"])
    parts = [
        [nll for nll, s in zip(evaluation.nll, fitness.samples, strict=True) if s.prose is is_prose]
        for is_prose in (True, False)
    ]
    assert [len(part) for part in parts] == [4, 2]
    assert evaluation.fitness == pytest.approx(sum(sum(p) / len(p) for p in parts) / 2)
    for sample, hits in zip(fitness.samples, evaluation.hits, strict=True):
        assert len(hits) == (0 if sample.prose else 8)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("nothing like it")]
)
def test_a_failing_forward_is_recorded_and_undone(model, monkeypatch, error):
    fitness = make_fitness(model, questions(count=2))
    expected = fitness.measure(CANDIDATES["yarn"])

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patches:
        patches.setattr(model.model.layers[1], "forward", fail)
        evaluation = fitness.measure(CANDIDATES["yarn"])
    assert evaluation.error == f"{type(error).__name__}: {error}"
    assert (evaluation.fitness, evaluation.complete) == (math.inf, False)
    assert rope_patch.current(model) is None
    assert fitness.measure(CANDIDATES["yarn"]).nll == expected.nll


def test_out_of_memory_halves_batches(model, monkeypatch):
    fitness = make_fitness(model, questions(count=4))
    expected = fitness.measure(CANDIDATES["yarn"])
    layer = model.model.layers[0]
    forward = layer.forward

    def one_only(hidden, *args, **kwargs):
        if hidden.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(hidden, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", one_only)
    assert fitness.measure(CANDIDATES["yarn"]).nll == pytest.approx(expected.nll, abs=1e-4)


def test_a_nan_loss_is_a_failure(model, monkeypatch):
    fitness = make_fitness(model, questions(count=1))
    embed = model.model.embed_tokens
    monkeypatch.setattr(embed, "forward", lambda ids: torch.full((*ids.shape, 128), math.nan))
    evaluation = fitness.measure(None)
    assert "sample 0 is nan" in evaluation.error
    assert evaluation.fitness == math.inf


def test_a_patched_model_is_refused(model):
    fitness = make_fitness(model, questions(count=1))
    with rope_patch.patch(model, "yarn", factor=2):
        with pytest.raises(ValueError, match="unpatch"):
            make_fitness(model, questions(count=1))
        with pytest.raises(ValueError, match="unpatch"):
            fitness.measure(None)


@pytest.mark.parametrize("size", [{}, {"factor": 2, "length": 512}])
def test_exactly_one_of_length_and_factor_is_required(model, size):
    with pytest.raises(ValueError, match="exactly one"):
        Fitness(model, questions(count=1), rope_patch.Extension("longrope", **size))


def test_a_search_of_several_rotations_is_refused():
    def space(**layers):
        request = rope_patch.Extension("longrope", factor=2, **layers)
        return Fitness(make_model("gemma3"), questions(count=1), request).space

    assert space().geometry.layer_type == "full_attention"
    with pytest.raises(ValueError, match="layer_types"):
        space(layer_types=["full_attention", "sliding_attention"])


# -- early stopping --------------------------------------------------------------------------------


def test_early_stopping_never_changes_the_winner(model):
    """Samples of one length each, so that they are scored in rounds, not in one batch."""
    samples = [questions(LENGTH - 8 * i, count=1, seed=i)[0] for i in range(8)]
    samples = [Sample(s.ids, s.answers, str(i)) for i, s in enumerate(samples)]
    fitness = make_fitness(model, samples)
    candidates = [stretch_candidate(power, top=top) for power in (0.3, 1, 4) for top in (2, 16)]
    complete = [fitness.measure(candidate) for candidate in candidates]
    winner = min(range(len(complete)), key=lambda i: complete[i].fitness)
    for order in (range(len(complete)), reversed(range(len(complete)))):
        best, read, stopped = None, 0, 0
        for i in order:
            against = None if best is None else complete[best]
            evaluation = fitness.measure(candidates[i], against)
            read += evaluation.tokens
            if evaluation.complete:
                assert evaluation.fitness == complete[i].fitness
                if best is None or evaluation.fitness < complete[best].fitness:
                    best = i
            else:
                stopped += 1
                assert evaluation.fitness > complete[best].fitness
                assert complete[i].fitness > complete[best].fitness
                assert None in evaluation.nll
        assert best == winner
        assert stopped >= 2
        assert read < sum(evaluation.tokens for evaluation in complete) - stopped * LENGTH


def test_a_candidate_that_cannot_win_even_without_loss_is_stopped():
    ones = [1.0] * 4
    assert predicted_deficit({0: 4.1}, ones, ones, list("abcd")) is not None
    assert predicted_deficit({0: 3.9}, ones, ones, list("abcd")) is None


def test_remaining_hard_samples_of_the_best_candidate_count():
    """A candidate that is behind on each sample so far may still win by the remaining ones."""
    texts, weights = list("abcdefgh"), [1.0] * 8
    losses = {i: 1.0 + 0.001 * i for i in range(4)}
    assert predicted_deficit(losses, [0.1] * 4 + [9.0] * 4, weights, texts) is None
    assert predicted_deficit(losses, [0.1] * 8, weights, texts) == pytest.approx(0.9, abs=0.02)


def test_samples_of_one_text_count_as_one():
    """Sixteen questions about two texts are as uncertain as two samples."""
    best_losses, losses = [1.0] * 32, {i: 1.5 + 0.01 * i for i in range(16)}

    def deficit(questions_each):
        texts = [str(i // questions_each) for i in range(32)]
        return predicted_deficit(losses, best_losses, best_losses, texts)

    assert deficit(1) is not None
    assert deficit(8) is None


def test_candidates_that_would_win_are_rarely_stopped():
    generator = torch.Generator().manual_seed(0)
    groups = [str(i) for i in range(16)]
    winners, stopped_winners, stopped_losers = 0, 0, 0
    for _ in range(2000):
        best_losses, losses = (
            torch.rand(2, 16, generator=generator, dtype=torch.float64).exp().tolist()
        )
        deficits = [
            predicted_deficit(dict(enumerate(losses[:n])), best_losses, [1.0] * 16, groups)
            for n in (4, 8, 12)
        ]
        is_stopped = any(deficit is not None for deficit in deficits)
        wins = sum(losses) < sum(best_losses)
        winners += wins
        stopped_winners += is_stopped and wins
        stopped_losers += is_stopped and not wins
    assert stopped_winners <= 0.005 * winners
    assert stopped_losers > 50
