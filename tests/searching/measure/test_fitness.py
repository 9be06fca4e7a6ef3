"""Test a candidate's fitness against transformers' loss under the same frequencies."""

import copy
import itertools
import json
import math

import pytest
import torch
from helpers.search_fixtures import LENGTH, TRAINED, load, questions, stretch_candidate
from helpers.tiny_models import make_model

import rope_patch
from rope_patch.extension import Extension
from rope_patch.inference import prefix_reader, scorer
from rope_patch.inference.samples import Sample
from rope_patch.searching.candidates import Candidate
from rope_patch.searching.measure import fitness as fitting
from rope_patch.searching.measure.fitness import Evaluation, Fitness

CANDIDATES = {
    "plain": None,
    "yarn": Candidate("yarn", "yarn"),
    "stretched": stretch_candidate(1.5),
    "rerope": Candidate("rerope", "rerope", {"window": 200}),
    "sharpened": stretch_candidate(0.7, attention_factor=1.1),
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def model(request):
    return load(request.param)


@pytest.fixture(scope="module")
def llama():
    return load()


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
    """Return samples of several lengths, some of one text, with answers of several tokens."""
    samples = questions(count=3)
    long = questions(LENGTH, count=1, seed=5)[0].ids
    samples += [
        Sample(long[:stop], ((300, 304), (stop - 9, stop - 2)), "text") for stop in (410, 450)
    ]
    return samples


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_loss_equals_that_of_transformers(model, name):
    fitness = Fitness(model, uneven_samples(), Extension("longrope", length=LENGTH))
    evaluation = fitness.measure(CANDIDATES[name])
    twin = native(model, CANDIDATES[name])
    expected = [reference_loss(twin, sample) for sample in fitness.samples]
    assert evaluation.error is None
    assert evaluation.complete
    assert evaluation.nll == pytest.approx([nll for nll, _ in expected], abs=2e-4)
    assert evaluation.hits == tuple(hits for _, hits in expected)
    assert evaluation.fitness == pytest.approx(sum(nll for nll, _ in expected) / 5, abs=2e-4)


def test_candidates_have_different_losses(llama):
    fitness = Fitness(llama, questions(), Extension("longrope", length=LENGTH))
    fitnesses = [fitness.measure(candidate).fitness for candidate in CANDIDATES.values()]
    assert all(abs(a - b) > 1e-3 for a, b in itertools.combinations(fitnesses, 2))


def test_batches_and_single_samples_agree(model, monkeypatch):
    samples = questions()
    together = Fitness(model, samples, Extension("longrope", length=LENGTH))
    assert [len(unit) for unit in together.scorer.units] == [8]
    monkeypatch.setattr(scorer, "_CPU_BATCH_TOKENS", LENGTH)
    alone = Fitness(model, samples, Extension("longrope", length=LENGTH))
    assert [len(unit) for unit in alone.scorer.units] == [1] * 8
    for candidate in CANDIDATES.values():
        a, b = together.measure(candidate), alone.measure(candidate)
        assert a.nll == pytest.approx(b.nll, abs=1e-4)
        assert a.hits == b.hits


def test_dynamic_methods_rotate_for_the_whole_sample(llama, monkeypatch):
    """A prompt is rotated for its length including the answers, as in one pass."""
    samples = questions(count=3)
    evaluation = Fitness(llama, samples, Extension("longrope", length=LENGTH)).measure(
        Candidate("d", "dynamic-yarn")
    )
    monkeypatch.setattr(scorer, "_CPU_BATCH_TOKENS", LENGTH)
    alone = Fitness(llama, samples, Extension("longrope", length=LENGTH)).measure(
        Candidate("d", "dynamic-yarn")
    )
    assert evaluation.error is alone.error is None
    assert evaluation.nll == pytest.approx(alone.nll, abs=1e-4)


def test_shared_prefixes_are_read_once(llama, monkeypatch):
    long = questions(LENGTH, count=1)[0].ids
    samples = [Sample((*long[:500], 260, 390 + i), ((501, 502),), "text") for i in range(3)]
    samples += [Sample((*long[:505], 260, 390), ((506, 507),), "text")]
    monkeypatch.setattr(scorer, "_CPU_BATCH_TOKENS", LENGTH)
    monkeypatch.setattr(prefix_reader, "_CHUNK", 64)
    fitness = Fitness(llama, samples, Extension("longrope", length=LENGTH))
    evaluation = fitness.measure(CANDIDATES["yarn"])
    assert evaluation.tokens < 2 * LENGTH
    twin = native(llama, CANDIDATES["yarn"])
    assert evaluation.nll == pytest.approx(
        [reference_loss(twin, s)[0] for s in fitness.samples], abs=2e-4
    )


def test_answers_and_prose_have_the_same_weight(llama):
    answers = questions(count=2)
    prose = [Sample(s.ids, ((400, 440),), f"p{s.group}", prose=True) for s in questions(count=6)]
    fitness = Fitness(llama, [*answers, *prose], Extension("longrope", length=LENGTH))
    evaluation = fitness.measure(CANDIDATES["yarn"])
    parts = [
        [nll for nll, s in zip(evaluation.nll, fitness.samples, strict=True) if s.prose is is_prose]
        for is_prose in (True, False)
    ]
    assert [len(part) for part in parts] == [6, 2]
    assert evaluation.fitness == pytest.approx(sum(sum(p) / len(p) for p in parts) / 2)
    for sample, hits in zip(fitness.samples, evaluation.hits, strict=True):
        assert len(hits) == (0 if sample.prose else 8)


def test_the_model_is_unchanged_bit_for_bit(model):
    ids = torch.tensor([questions(count=1)[0].ids])
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    config = copy.deepcopy(model.config.to_dict())
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        fitness = Fitness(model, questions(count=2), Extension("longrope", length=LENGTH))
        for candidate in CANDIDATES.values():
            fitness.measure(candidate)
        fitness.measure(Candidate("wrong", "longrope", {"long_factor": [1.0]}))
        assert torch.equal(model(ids, use_cache=False).logits, before)
    assert rope_patch.current(model) is None
    assert model.config.to_dict() == config
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("nothing like it")]
)
def test_a_failing_forward_is_recorded_and_undone(llama, monkeypatch, error):
    fitness = Fitness(llama, questions(count=2), Extension("longrope", length=LENGTH))
    expected = fitness.measure(CANDIDATES["yarn"])

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patches:
        patches.setattr(llama.model.layers[1], "forward", fail)
        evaluation = fitness.measure(CANDIDATES["yarn"])
    assert evaluation.error == f"{type(error).__name__}: {error}"
    assert (evaluation.fitness, evaluation.complete) == (math.inf, False)
    assert rope_patch.current(llama) is None
    assert fitness.measure(CANDIDATES["yarn"]).nll == expected.nll


def test_out_of_memory_halves_batches(llama, monkeypatch):
    fitness = Fitness(llama, questions(), Extension("longrope", length=LENGTH))
    expected = fitness.measure(CANDIDATES["yarn"])
    layer = llama.model.layers[0]
    forward = layer.forward

    def small_only(hidden, *args, **kwargs):
        if hidden.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(hidden, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", small_only)
    assert fitness.measure(CANDIDATES["yarn"]).nll == pytest.approx(expected.nll, abs=1e-4)


def test_a_nan_loss_is_a_failure(llama, monkeypatch):
    fitness = Fitness(llama, questions(count=2), Extension("longrope", length=LENGTH))
    embed = llama.model.embed_tokens
    monkeypatch.setattr(embed, "forward", lambda ids: torch.full((*ids.shape, 128), math.nan))
    evaluation = fitness.measure(None)
    assert "the loss of sample 0 is nan" in evaluation.error
    assert evaluation.fitness == math.inf


def test_a_candidate_that_cannot_be_patched_is_a_failure(llama):
    fitness = Fitness(llama, questions(count=2), Extension("longrope", length=LENGTH))
    evaluation = fitness.measure(Candidate("short", "longrope", {"long_factor": [1.0, 2.0]}))
    assert evaluation.error.startswith("Refused: long_factor must have one number for each")
    assert evaluation.tokens == 0


def test_evaluations_survive_json(llama):
    evaluation = Fitness(llama, questions(count=2), Extension("longrope", length=LENGTH)).measure(
        None
    )
    assert Evaluation.from_dict(json.loads(json.dumps(evaluation.to_dict()))) == evaluation


# -- requests --------------------------------------------------------------------------------------


def test_a_patched_model_is_refused(llama):
    with rope_patch.patch(llama, "yarn", factor=2), pytest.raises(ValueError, match="unpatch"):
        Fitness(llama, questions(count=1), Extension("longrope", length=LENGTH))
    fitness = Fitness(llama, questions(count=1), Extension("longrope", length=LENGTH))
    with rope_patch.patch(llama, "yarn", factor=2), pytest.raises(ValueError, match="unpatch"):
        fitness.measure(None)


@pytest.mark.parametrize("options", [{}, {"factor": 2, "length": 512}])
def test_exactly_one_of_length_and_factor_is_required(llama, options):
    with pytest.raises(ValueError, match="exactly one of factor and length"):
        Fitness(llama, questions(count=1), Extension("longrope", **options))


def test_a_search_of_several_rotations_is_refused():
    gemma = make_model("gemma3")
    assert (
        fitting.make_space(gemma, Extension("longrope", factor=2)).geometry.layer_type
        == "full_attention"
    )
    layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="name one of them in layer_types"):
        fitting.make_space(gemma, Extension("longrope", factor=2, layer_types=layer_types))
