"""Test decoding on a GPU: the CPU's results, without synchronising with the device."""

import pytest
import torch
from helpers.tiny_models import LONG, SHORT, TRAINED, make_model, step_by_step, tokens
from transformers import DynamicCache, StaticCache

import rope_patch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def no_synchronisation():
    """Raise if an operation synchronises with the device."""

    class NoSynchronisation:
        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    return NoSynchronisation()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_decoding_matches_the_cpu(family):
    model, ids = make_model(family), tokens(LONG)
    rope_patch.patch(model, "dynamic-yarn")
    expected = step_by_step(model, ids, SHORT)
    got = step_by_step(model.cuda(), ids.cuda(), SHORT)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=1e-3)


def test_decode_step_without_growth_does_not_synchronise(no_synchronisation):
    """Decode from 77 to 90 tokens, within one growth step: 64 * 2^(2/4) is 90.5."""
    model, ids = make_model().cuda(), tokens(LONG).cuda()
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        step_by_step(model, ids[:, : TRAINED + 15], SHORT, cache)
        with no_synchronisation:
            for i in range(TRAINED + 15, TRAINED + 25):
                model(ids[:, i : i + 1], past_key_values=cache)


def test_generate_does_not_synchronise_in_the_decoder(no_synchronisation):
    """Check this package's hooks and the attentions, from the third forward on.

    generate synchronises between forwards, and transformers where it makes the mask.
    """
    model, ids = make_model().cuda(), tokens(TRAINED + 14).cuda()
    rope_patch.patch(model, "dynamic-yarn")
    forwards = []

    def watch(*_):
        if len(forwards) > 2:
            no_synchronisation.__enter__()

    def stop(*_):
        no_synchronisation.__exit__()

    decoder = model.model
    decoder.register_forward_pre_hook(watch, prepend=True)
    decoder.register_forward_pre_hook(lambda *_: forwards.append(1), prepend=True)
    decoder.register_forward_pre_hook(stop)  # behind this package's hooks
    for layer in decoder.layers:
        layer.register_forward_pre_hook(watch)
        layer.register_forward_hook(stop, always_call=True)
    model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert len(forwards) == 10


def test_offloaded_cache_is_rerotated_in_place():
    model, ids = make_model().cuda(), tokens(LONG).cuda()
    plain = step_by_step(model, ids, SHORT)
    cache = DynamicCache(config=model.config, offloading=True)
    if not torch.allclose(step_by_step(model, ids, SHORT, cache), plain, rtol=0, atol=1e-4):
        pytest.skip("the offloaded cache of this transformers is wrong without a patch, too")
    rope_patch.patch(model, "dynamic-yarn")
    expected = step_by_step(model, ids, SHORT)
    cache = DynamicCache(config=model.config, offloading=True)
    got = step_by_step(model, ids, SHORT, cache)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_compiled_decode_step_runs_in_cuda_graphs():
    model, ids = make_model().cuda(), tokens(LONG).cuda()
    rope_patch.patch(model, "dynamic-yarn")
    expected = step_by_step(model, ids, SHORT)
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=LONG)
    with torch.no_grad():
        model(ids[:, :SHORT], past_key_values=cache)
        for i in range(SHORT, LONG):
            position_ids = torch.tensor([[i]], device="cuda")
            got = step(
                ids[:, i : i + 1], position_ids=position_ids, past_key_values=cache
            ).logits.clone()
    torch.testing.assert_close(got[:, -1], expected[:, -1], rtol=0, atol=1e-3)
