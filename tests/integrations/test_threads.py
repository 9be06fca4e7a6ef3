"""Test several models and threads at once: each forward gives the result of a single one."""

import copy
import sys
import threading

import pytest
import torch
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
    TRAINED,
    forward,
    logits,
    make_model,
    padded,
    step_by_step,
    tokens,
)
from torch._dynamo.utils import counters

import rope_patch

LONGROPE = {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
STATIC = {
    "linear": {"factor": 4},
    "yarn": {"factor": 4},
    "nope": {"temperature": "drope:0.4"},
}
LENGTH_DEPENDENT = {"dynamic-yarn": {}, "longrope": LONGROPE}
ROUNDS = 4


@pytest.fixture(autouse=True)
def frequent_switches():
    """Switch between threads a thousand times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(usual)


def run_in_threads(*tasks):
    """Run functions in threads that start together; raise the first error of any."""
    start = threading.Barrier(len(tasks))
    errors = []

    def run(task):
        start.wait()
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]


def repeat(call, expected, rounds=ROUNDS):
    """Return a task that repeats a call and checks that its result stays the same."""

    def task():
        for _ in range(rounds):
            assert call().equal(expected)

    return task


def make_patched(method, family="llama", seed=0, **options):
    model = make_model(family, seed=seed)
    rope_patch.patch(model, method, **options)
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_models_patched_differently_run_side_by_side(family):
    tasks = []
    for method, options in {**STATIC, **LENGTH_DEPENDENT}.items():
        model = make_patched(method, family, **options)
        for length in (SHORT, LONG):
            expected = logits(model, length)
            tasks.append(repeat(lambda m=model, n=length: logits(m, n), expected, 4))
    plain = make_model(family)
    tasks.append(repeat(lambda: logits(plain), logits(plain), 4))
    run_in_threads(*tasks)


@pytest.mark.parametrize(
    ("family", "method", "kernels"),
    [
        *(("llama", method, "auto") for method in ("yarn", *LENGTH_DEPENDENT)),
        *(pytest.param("llama", m, "auto", marks=pytest.mark.slow) for m in ("linear", "nope")),
        *(("gemma3", "dynamic-yarn", kernels) for kernels in ("auto", "reference", "hf")),
    ],
)
def test_one_model_in_several_threads(family, method, kernels):
    """Give each thread another length, and so other frequencies if these depend on it."""
    model = make_patched(method, family, kernels=kernels, **{**STATIC, **LENGTH_DEPENDENT}[method])
    lengths = [SHORT, TRAINED + 1, LONG, 4 * TRAINED]
    expected = [logits(model, length) for length in lengths]
    tasks = [
        repeat(lambda n=length: logits(model, n), logits_alone)
        for length, logits_alone in zip(lengths, expected, strict=True)
    ]
    run_in_threads(*tasks)


def test_lengths_of_the_threads_have_different_frequencies():
    handle = rope_patch.patch(make_model(), "dynamic-yarn")
    sets = [handle.frequencies_at(n)[None].inv_freq for n in (SHORT, TRAINED + 1, LONG, 256)]
    assert len({tuple(inv_freq.tolist()) for inv_freq in sets}) == 4


@pytest.mark.parametrize("method", LENGTH_DEPENDENT)
def test_decoding_threads_have_separate_caches(method):
    model = make_patched(method, **LENGTH_DEPENDENT[method])
    tasks = []
    for seed, prompt in ((1, SHORT), (2, TRAINED - 6), (3, 100)):
        ids = tokens(prompt + 12, seed=seed)
        expected = step_by_step(model, ids, prompt)
        tasks.append(repeat(lambda i=ids, p=prompt: step_by_step(model, i, p), expected, 3))
    run_in_threads(*tasks)


def test_threads_with_rows_of_different_lengths():
    """Use per-row frequencies in one thread, and one set for all rows in another."""
    model = make_patched("dynamic-yarn")
    initial = model.model.rotary_emb.inv_freq
    ids, mask = padded([tokens(30), tokens(LONG)], "left")
    rows = forward(model, ids, attention_mask=mask)
    equal_rows = forward(model, tokens(100, batch=3))
    run_in_threads(
        repeat(lambda: forward(model, ids, attention_mask=mask), rows),
        repeat(lambda: forward(model, tokens(100, batch=3)), equal_rows),
        repeat(lambda: logits(model, SHORT), logits(model, SHORT)),
    )
    assert model.model.rotary_emb.inv_freq is initial  # no forward leaves its rows' frequencies


@pytest.mark.parametrize(
    "method", ["yarn", pytest.param("nope", marks=pytest.mark.slow), "dynamic-yarn"]
)
def test_patch_and_undo_while_another_model_runs(method):
    options = {**STATIC, **LENGTH_DEPENDENT}[method]
    running, other = make_patched(method, **options), make_model(seed=3)
    plain = logits(other)
    with rope_patch.patch(other, method, **options):
        changed = logits(other)

    def patch_and_undo():
        for _ in range(ROUNDS):
            with rope_patch.patch(other, method, **options):
                assert logits(other).equal(changed)
            assert logits(other).equal(plain)

    run_in_threads(
        repeat(lambda: logits(running), logits(running), 2 * ROUNDS),
        patch_and_undo,
    )


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_copies_made_while_the_original_runs(method):
    model = make_patched(method, **{**STATIC, **LENGTH_DEPENDENT}[method])
    expected = logits(model)

    def copy_and_unpatch():
        for _ in range(2):
            twin = copy.deepcopy(model)
            assert logits(twin).equal(expected)
            rope_patch.unpatch(twin)

    run_in_threads(repeat(lambda: logits(model), expected), copy_and_unpatch)


def test_training_in_threads_gives_the_same_gradients():
    """Train each model in a separate thread, with gradient checkpointing."""

    def gradients(model):
        model.zero_grad()
        for length in (SHORT, LONG):
            model(tokens(length), labels=tokens(length), use_cache=False).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    models = [
        make_patched(method, seed=seed, **options).train()
        for seed, (method, options) in enumerate({**STATIC, **LENGTH_DEPENDENT}.items())
    ]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = [gradients(model) for model in models]
    run_in_threads(
        *(
            repeat(lambda m=model: gradients(m), gradient, 3)
            for model, gradient in zip(models, expected, strict=True)
        )
    )


def test_failed_forward_does_not_block_other_threads():
    model = make_patched("dynamic-yarn")
    expected = logits(model)

    def raise_in_one_thread(*_):
        if threading.current_thread().name == "failing":
            raise RuntimeError("no memory, say")

    model.model.rotary_emb.register_forward_pre_hook(raise_in_one_thread)

    def fail():
        threading.current_thread().name = "failing"
        for _ in range(ROUNDS):
            with pytest.raises(RuntimeError, match="no memory"):
                logits(model, SHORT)

    run_in_threads(fail, repeat(lambda: logits(model), expected))


def test_interrupted_forward_is_cleaned_up_by_the_next():
    """A KeyboardInterrupt skips the hooks after a forward."""
    model = make_patched("dynamic-yarn")
    rotary = model.model.rotary_emb
    initial, expected = rotary.inv_freq, logits(model)
    interrupted = []

    def interrupt(module, args):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    hook = rotary.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model, SHORT)
    hook.remove()
    assert interrupted
    assert logits(model).equal(expected)
    assert rotary.inv_freq is initial
    run_in_threads(repeat(lambda: logits(model), expected, 2))


def test_compiled_models_in_threads():
    torch._dynamo.reset()
    counters.clear()
    model = make_model(num_hidden_layers=1)  # faster to trace
    rope_patch.patch(model, "dynamic-yarn")
    # Threads with fullgraph=True fail at random, because they share torch's count of graphs.
    compiled = torch.compile(model, backend="eager", dynamic=True)
    lengths = (SHORT, LONG, 4 * TRAINED)
    expected = [logits(compiled, length) for length in lengths]
    run_in_threads(
        *(
            repeat(lambda n=length: logits(compiled, n), expected_logits)
            for length, expected_logits in zip(lengths, expected, strict=True)
        )
    )
    assert counters["frames"]["ok"]
    assert not counters["graph_break"]
    torch._dynamo.reset()
