"""Test that replicas of nn.DataParallel use their own weights, and are freed.

torch makes the replicas; only the copy to another device is replaced, by one that halves the
weights. This shows without two devices whether a replica uses the original's weights.
"""

import copy
import gc
import sys
import weakref

import pytest
import torch.nn.parallel
from helpers.tiny_models import LONG_FACTOR, forward, make_model, tokens

import rope_patch

replicate = sys.modules["torch.nn.parallel.replicate"]
START = {"factor": 4, "long_factor": LONG_FACTOR, "start_tokens": 4}
REQUESTS = [
    ("llama", "yarn", {"factor": 4, "kernels": "auto"}),
    ("llama", "dynamic-yarn", {"kernels": "auto"}),
    ("llama", "longrope", {"kernels": "auto", **START}),
    ("qwen3", "yarn", {"factor": 4, "kernels": "reference"}),
    ("qwen3", "dynamic-yarn", {"kernels": "reference"}),
    ("gemma3", "dynamic-yarn", {"kernels": "hf"}),
    ("llama", "yarn", {"factor": 4, "kernels": "hf", "temperature": "log-n"}),
    ("qwen3", "dynamic-yarn", {"kernels": "reference", "temperature": 1.5}),
]


@pytest.fixture
def replicas(monkeypatch):
    """Make two replicas of a model, the second with half of each parameter."""

    def copies(tensors, devices, detach=False):
        parameter = [isinstance(tensor, torch.nn.Parameter) for tensor in tensors]
        return [
            [t * scale if p else t.clone() for t, p in zip(tensors, parameter, strict=True)]
            for scale in (1.0, 0.5)
        ]

    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(replicate, "_get_device_index", lambda device, *_: device)
    return lambda model: replicate.replicate(model, [0, 1])


@pytest.mark.parametrize(("family", "method", "options"), REQUESTS)
def test_replicas_use_their_weights(family, method, options, replicas):
    model = make_model(family)
    halved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in halved.parameters():
            parameter.mul_(0.5)
    for each in (model, halved):
        rope_patch.patch(each, method, **options)
    ids = tokens(100, batch=2)
    first, second = replicas(model)
    expected = forward(halved, ids)
    assert not forward(model, ids).equal(expected)
    torch.testing.assert_close(forward(second, ids), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(forward(first, ids), forward(model, ids), rtol=0, atol=1e-5)

    references = [
        weakref.ref(second.model.layers[0].self_attn),
        weakref.ref(second.model.rotary_emb),
    ]
    gc.disable()
    try:
        del first, second
        assert [reference() for reference in references] == [None, None]  # without a gc run
    finally:
        gc.enable()
    rope_patch.unpatch(model)
    assert forward(model, ids).equal(forward(make_model(family), ids))


def test_gradients_of_replicas_reach_the_original(replicas):
    """The gradients of both replicas are summed, as in a model without our kernels."""
    model, plain = make_model("qwen3"), make_model("qwen3")
    rope_patch.patch(model, "yarn", factor=4, kernels="reference")
    rope_patch.patch(plain, "yarn", factor=4, kernels="hf")
    ids = tokens(40)
    for each in (model, plain):
        total = [r(input_ids=ids, use_cache=False).logits.pow(2).mean() for r in replicas(each)]
        sum(total).backward()
    for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_bound_method_of_another_object_is_called(replicas):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    attention = model.model.layers[0].self_attn
    calls = []

    class Counter:
        def __init__(self, forward):
            self.wrapped = forward

        def forward(self, *args, **kwargs):
            calls.append(1)
            return self.wrapped(*args, **kwargs)

    attention.forward = Counter(attention.forward).forward
    first, _ = replicas(model)
    assert forward(first, tokens(20)).equal(forward(model, tokens(20)))
    assert len(calls) == 2
