"""Test the plugin's registration on stand-ins that have the signatures of vLLM's source."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import stand_in
from source_tree import find_tree

from rope_patch import Refused
from rope_patch.serving.vllm import plugin, requirements

pytestmark = pytest.mark.engines

TRAINED, LONGEST = 64, 256
ROPE = {
    "rope_type": "dynamic-yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
ROTARY = "vllm.model_executor.layers.rotary_embedding"


@pytest.fixture(scope="module")
def tree():
    return find_tree()


@pytest.fixture
def classes(tree, monkeypatch):
    """Build the stand-ins."""
    release = ".".join(map(str, tree.release))
    monkeypatch.setattr(requirements, "_installed", lambda package: release)
    return stand_in.install(tree, plugin.HOOKS, monkeypatch)


def configure(classes, rope, **options):
    """Return a `VllmConfig` of the stand-ins, as vLLM's own constructor leaves it."""
    config = classes["VllmConfig"]()
    text = SimpleNamespace(rope_parameters=rope, max_position_embeddings=LONGEST)
    model = SimpleNamespace(
        hf_text_config=text,
        max_model_len=LONGEST,
        served_model_name="a-model",
        use_mla=False,
        using_transformers_backend=lambda: False,
    )
    fields = {
        "model_config": model,
        "use_v2_model_runner": False,
        "speculative_config": None,
        "kv_transfer_config": None,
        "parallel_config": SimpleNamespace(
            use_ubatching=False, prefill_context_parallel_size=1, decode_context_parallel_size=1
        ),
    }
    for name, value in (fields | options).items():
        setattr(config, name, value)
    config.__post_init__()
    return config


def request(length, max_tokens, **fields):
    """Return what the plugin reads of an `EngineCoreRequest`."""
    sampling = SimpleNamespace(max_tokens=max_tokens)
    fields = {"resumable": False, "cache_salt": None, "prompt_embeds": None, **fields}
    return SimpleNamespace(prompt_token_ids=[1] * length, sampling_params=sampling, **fields)


def test_every_hook_is_wrapped_once_with_its_signature(classes):
    before = {hook: getattr(classes[hook.owner], hook.name) for hook in plugin.HOOKS}
    plugin.register()
    wrapped = {hook: getattr(classes[hook.owner], hook.name) for hook in plugin.HOOKS}
    plugin.register()
    for hook, original in before.items():
        now = getattr(classes[hook.owner], hook.name)
        assert now is wrapped[hook]
        assert now.rope_patch_original is original
        assert inspect.signature(now) == inspect.signature(original)
        print("wrapped", hook.path + str(inspect.signature(original)))
    assert sys.modules[ROTARY].get_rope.rope_patch_original


def test_an_engine_that_asks_for_no_method_is_left_alone(classes):
    plugin.register()
    config = configure(classes, PLAIN)
    classes["VllmConfig"].results["_get_v2_model_runner_unsupported_features"] = []
    assert config._get_v2_model_runner_unsupported_features() == []
    core = classes["EngineCore"]()
    core.vllm_config = config
    sent = request(10, 5)
    core.preprocess_add_request(sent)
    assert sent.cache_salt is None
    processor = classes["InputProcessor"]()
    processor.vllm_config = config
    classes["InputProcessor"].results["process_inputs"] = sent
    assert processor.process_inputs("id", [1], None, (), resumable=True) is sent
    rotary = sys.modules[ROTARY].get_rope(16, 64, rope_parameters=PLAIN, mrope_positions_factor=1)
    assert (rotary["rope_parameters"], rotary["mrope_positions_factor"]) == (PLAIN, 1)


def test_the_second_model_runner_is_left_to_other_engines(classes):
    plugin.register()
    classes["VllmConfig"].results["_get_v2_model_runner_unsupported_features"] = ["another"]
    config = configure(classes, ROPE)
    found = config._get_v2_model_runner_unsupported_features()
    assert found == ["another", requirements.FEATURE]


def test_requests_of_one_profile_share_their_prefixes_and_others_do_not(classes):
    plugin.register()
    core = classes["EngineCore"]()
    core.vllm_config = configure(classes, ROPE)
    sent = [request(10, 5), request(50, 14), request(50, 15), request(10, 246, cache_salt="mine")]
    for each in sent:
        core.preprocess_add_request(each)
    assert [each.cache_salt for each in sent] == ["0:", "0:", "1:", "8:mine"]
    assert [name for name, _ in core.calls] == ["preprocess_add_request"] * 4


def test_a_session_that_may_grow_is_refused_by_keyword_as_vllm_passes_it(classes):
    plugin.register()
    processor = classes["InputProcessor"]()
    processor.vllm_config = configure(classes, ROPE)
    processor.model_config = processor.vllm_config.model_config
    classes["InputProcessor"].results["process_inputs"] = request(10, 5, resumable=True)
    with pytest.raises(Refused, match="resumable"):
        processor.process_inputs("id", [1], None, (), arrival_time=None, resumable=True)


def test_a_rotation_that_cannot_be_read_is_refused_before_lengths_are_computed(classes):
    plugin.register()
    model = classes["ModelConfig"]()
    rope = ROPE | {"factor": "four"}
    model.hf_text_config = SimpleNamespace(rope_parameters=rope, max_position_embeddings=LONGEST)
    with pytest.raises(Refused, match="factor must be a number"):
        model.get_and_verify_max_len(LONGEST)
    assert not model.calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_v2_model_runner": True}, "second model runner"),
        ({"speculative_config": ("mtp", None)}, "multi-token prediction"),
        ({"speculative_config": ("eagle3", PLAIN)}, "'eagle3' was never compared"),
        ({"speculative_config": ("draft_model", ROPE)}, "draft model's own config"),
        ({"speculative_config": ("draft_model", PLAIN)}, None),
        ({"speculative_config": ("eagle", PLAIN)}, None),
        ({"speculative_config": ("ngram", ROPE)}, None),  # the model's own config
    ],
)
def test_what_was_compared_is_served_and_all_else_refused(classes, options, message):
    plugin.register()
    if method_and_rope := options.get("speculative_config"):
        method, rope = method_and_rope
        draft = SimpleNamespace(hf_text_config=SimpleNamespace(rope_parameters=rope))
        options = {"speculative_config": SimpleNamespace(method=method, draft_model_config=draft)}
    if message is None:
        configure(classes, ROPE, **options)
        return
    with pytest.raises(Refused, match=message):
        configure(classes, ROPE, **options)
    configure(classes, PLAIN, **options)


@pytest.mark.parametrize("hook", plugin.HOOKS, ids=lambda hook: hook.name)
def test_a_release_without_a_hook_refuses_engines_by_its_name(classes, hook):
    delattr(classes[hook.owner], hook.name)
    if hook.name == "__post_init__":
        with pytest.raises(Refused, match=r"has no vllm\.config\.VllmConfig\.__post_init__"):
            plugin.register()
        return
    plugin.register()
    with pytest.raises(Refused, match=rf"has no {hook.path}"):
        configure(classes, ROPE)
    configure(classes, PLAIN)
    assert not hasattr(sys.modules[ROTARY].get_rope, "rope_patch_original")


def test_an_unrun_release_is_said_once(classes, tree, monkeypatch, caplog):
    plugin.register()
    requirements._warn_of_unrun.cache_clear()
    monkeypatch.setattr(requirements, "RUN_RELEASES", ((0, 1),))
    for _ in range(2):
        configure(classes, ROPE)
    assert [record.name for record in caplog.records] == ["vllm.rope_patch"]
    assert "of vLLM " + ".".join(map(str, tree.release)) in caplog.text
