"""Several models and several threads at once: each forward is what it is alone."""

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

import rope_patch
from rope_patch.patching.dynamic.hooks import LengthHooks

LONGROPE = {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
STATIC = {"linear": {"factor": 4}, "yarn": {"factor": 4}}
FOLLOWING = {"dynamic-yarn": {}, "longrope": LONGROPE, "nope": {"temperature": 0.4}}
ROUNDS = 12


@pytest.fixture(autouse=True)
def frequent_switches():
    """Switch between threads a thousand times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(usual)


def at_once(*tasks):
    """Run functions in threads that start together; raise what any of them raises."""
    start = threading.Barrier(len(tasks))
    failed = []

    def run(task):
        start.wait()
        try:
            task()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if failed:
        raise failed[0]


def again_and_again(call, expected, rounds=ROUNDS):
    """Return a task that checks that the same call gives the same numbers every time."""

    def task():
        for _ in range(rounds):
            assert call().equal(expected)

    return task


def patched(method, family="llama", seed=0, **options):
    model = make_model(family, seed=seed)
    rope_patch.patch(model, method, **options)
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_models_patched_differently_run_side_by_side(family):
    tasks = []
    for method, options in {**STATIC, **FOLLOWING}.items():
        model = patched(method, family, **options)
        for length in (SHORT, LONG):
            expected = logits(model, length)
            tasks.append(again_and_again(lambda m=model, n=length: logits(m, n), expected, 4))
    plain = make_model(family)
    tasks.append(again_and_again(lambda: logits(plain), logits(plain), 4))
    at_once(*tasks)


@pytest.mark.parametrize("kernels", ["auto", "reference", "hf"])
@pytest.mark.parametrize("method", [*STATIC, *FOLLOWING])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_model_in_several_threads(family, method, kernels):
    """Each thread with a length of its own, so with frequencies of its own where they follow it."""
    model = patched(method, family, kernels=kernels, **{**STATIC, **FOLLOWING}[method])
    lengths = [SHORT, TRAINED + 1, LONG, 4 * TRAINED]
    expected = [logits(model, length) for length in lengths]
    tasks = [
        again_and_again(lambda n=length: logits(model, n), wanted)
        for length, wanted in zip(lengths, expected, strict=True)
    ]
    at_once(*tasks)


def test_the_lengths_of_those_threads_do_ask_for_other_frequencies():
    handle = rope_patch.patch(make_model(), "dynamic-yarn")
    sets = [handle.frequencies_at(n)[None].inv_freq for n in (SHORT, TRAINED + 1, LONG, 256)]
    assert len({tuple(found.tolist()) for found in sets}) == 4


@pytest.mark.parametrize("method", FOLLOWING)
def test_threads_that_decode_keep_caches_of_their_own(method):
    model = patched(method, **FOLLOWING[method])
    tasks = []
    for seed, prompt in ((1, SHORT), (2, TRAINED), (3, 100)):
        ids = tokens(prompt + 30, seed=seed)
        expected = step_by_step(model, ids, prompt)
        tasks.append(
            again_and_again(lambda i=ids, p=prompt: step_by_step(model, i, p), expected, 3)
        )
    at_once(*tasks)


def test_threads_with_rows_of_different_lengths():
    """Frequencies by rows in one thread, for all rows alike in another."""
    model = patched("dynamic-yarn")
    ids, mask = padded([tokens(30), tokens(LONG)], "left")
    rows = forward(model, ids, attention_mask=mask)
    alike = forward(model, tokens(100, batch=3))
    at_once(
        again_and_again(lambda: forward(model, ids, attention_mask=mask), rows),
        again_and_again(lambda: forward(model, tokens(100, batch=3)), alike),
        again_and_again(lambda: logits(model, SHORT), logits(model, SHORT)),
    )


@pytest.mark.parametrize("method", [*STATIC, *FOLLOWING])
def test_patching_and_undoing_beside_a_model_that_runs(method):
    options = {**STATIC, **FOLLOWING}[method]
    running, other = patched(method, **options), make_model(seed=3)
    plain = logits(other)
    with rope_patch.patch(other, method, **options):
        changed = logits(other)

    def come_and_go():
        for _ in range(ROUNDS):
            with rope_patch.patch(other, method, **options):
                assert logits(other).equal(changed)
            assert logits(other).equal(plain)

    at_once(
        again_and_again(lambda: logits(running), logits(running), 2 * ROUNDS),
        come_and_go,
    )


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_copies_made_while_the_original_runs(method):
    model = patched(method, **{**STATIC, **FOLLOWING}[method])
    expected = logits(model)

    def copying():
        for _ in range(ROUNDS // 3):
            twin = copy.deepcopy(model)
            assert logits(twin).equal(expected)
            rope_patch.unpatch(twin)

    at_once(again_and_again(lambda: logits(model), expected), copying)


def test_training_in_threads_adds_the_same_gradients():
    """Models that are trained each in a thread of its own, checkpoints and all."""

    def gradients(model):
        model.zero_grad()
        for length in (SHORT, LONG):
            model(tokens(length), labels=tokens(length), use_cache=False).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    models = [
        patched(method, seed=seed, **options).train()
        for seed, (method, options) in enumerate({**STATIC, **FOLLOWING}.items())
    ]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    alone = [gradients(model) for model in models]
    at_once(
        *(
            again_and_again(lambda m=model: gradients(m), wanted, 3)
            for model, wanted in zip(models, alone, strict=True)
        )
    )


def test_a_failed_forward_keeps_no_other_thread_waiting():
    model = patched("dynamic-yarn")
    expected = logits(model)

    def failing(*_):
        if threading.current_thread().name == "failing":
            raise RuntimeError("no memory, say")

    model.model.rotary_emb.register_forward_pre_hook(failing)

    def fail():
        threading.current_thread().name = "failing"
        for _ in range(ROUNDS):
            with pytest.raises(RuntimeError, match="no memory"):
                logits(model, SHORT)

    at_once(fail, again_and_again(lambda: logits(model), expected))


def test_an_interrupted_forward_is_cleaned_up_by_the_next():
    """Ctrl-C is no Exception, and leaves the hooks after a forward uncalled."""
    model = patched("dynamic-yarn")
    rotary = model.model.rotary_emb
    resting, expected = rotary.inv_freq, logits(model)
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
    assert rotary.inv_freq is resting
    at_once(again_and_again(lambda: logits(model), expected, 2))


def test_compiled_models_in_threads():
    torch._dynamo.reset()
    model = patched("dynamic-yarn")
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    lengths = (SHORT, LONG, 4 * TRAINED)
    expected = [logits(compiled, length) for length in lengths]
    at_once(
        *(
            again_and_again(lambda n=length: logits(compiled, n), wanted)
            for length, wanted in zip(lengths, expected, strict=True)
        )
    )
    torch._dynamo.reset()


def test_nothing_of_a_thread_stays_behind():
    """What a forward finds out goes with the thread that ran it."""
    model = patched("dynamic-yarn")
    following = next(
        hook.__self__
        for hook in model.model._forward_pre_hooks.values()
        if isinstance(getattr(hook, "__self__", None), LengthHooks)
    )
    at_once(lambda: logits(model), lambda: logits(model, SHORT))
    logits(model)
    assert (following._state.rows, following._state.pending_record) == (None, None)
    assert following._state.saved_buffer is None
