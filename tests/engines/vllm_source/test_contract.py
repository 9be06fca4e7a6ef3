"""Test that vLLM's source has what the plugin leans on, of an installed vLLM or a folder.

`VLLM_SOURCE=FOLDER pytest -m engines tests/engines/vllm_source -rP` prints what was checked.
"""

import inspect

import pytest
from source_tree import find_tree

from rope_patch.methods import registered_methods
from rope_patch.serving import method_name, rope_type_for
from rope_patch.serving.vllm import plugin, requirements, rotary_factory

pytestmark = pytest.mark.engines

CONFIG, RUNNER = "vllm.config", "vllm.v1.worker.gpu_model_runner"
ROTARY = "vllm.model_executor.layers.rotary_embedding"
HASHES = "vllm.v1.core.kv_cache_utils"
# Fields and methods that the plugin reads or sets, by class.
ATTRIBUTES = {
    (CONFIG, "VllmConfig"): (
        *("model_config", "parallel_config", "scheduler_config", "speculative_config"),
        *("kv_transfer_config", "use_v2_model_runner"),
    ),
    (CONFIG, "ModelConfig"): (
        *("hf_text_config", "max_model_len", "served_model_name", "use_mla"),
        "using_transformers_backend",
    ),
    (CONFIG, "ParallelConfig"): (
        *("use_ubatching", "prefill_context_parallel_size", "decode_context_parallel_size"),
    ),
    (CONFIG, "SchedulerConfig"): ("max_num_batched_tokens",),
    ("vllm.config.speculative", "SpeculativeConfig"): ("method", "draft_model_config"),
    ("vllm.v1.engine", "EngineCoreRequest"): (
        *("prompt_token_ids", "prompt_embeds", "sampling_params", "cache_salt", "resumable"),
    ),
    ("vllm.sampling_params", "SamplingParams"): ("max_tokens",),
    ("vllm.v1.worker.gpu_input_batch", "CachedRequestState"): (
        *("num_prompt_tokens", "sampling_params"),
    ),
    ("vllm.v1.worker.gpu_input_batch", "InputBatch"): ("req_ids", "num_reqs"),
    (RUNNER, "GPUModelRunner"): (
        *("requests", "input_batch", "query_start_loc", "req_indices", "model_config"),
        *("_model_forward", "load_model", "get_model"),
    ),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase"): ("worker", "vllm_config"),
    ("vllm.v1.engine.core", "EngineCore"): ("vllm_config",),
    ("vllm.v1.engine.input_processor", "InputProcessor"): ("vllm_config", "model_config"),
}


@pytest.fixture(scope="module")
def tree():
    return find_tree()


def test_the_release_is_one_that_the_plugin_serves(tree):
    print(f"vLLM {'.'.join(map(str, tree.release))} in {tree.folder.name}/")
    assert tree.release in requirements.KNOWN_RELEASES


@pytest.mark.parametrize("hook", plugin.HOOKS, ids=lambda hook: hook.path)
def test_a_hook_is_there_takes_what_the_wrapper_takes_and_is_called(tree, hook):
    parameters = tree.parameters(hook.module, hook.owner, hook.name)
    # The method itself and its instance come first.
    inspect.signature(hook.wrapper).bind(*[None] * (2 + len(parameters)))
    print(f"{hook.path}({', '.join(parameters)})")
    if hook.name == "__post_init__":
        return  # of a dataclass, which calls it
    calls = tree.calls(hook.name)
    print("  called at", *calls)
    assert calls


@pytest.mark.parametrize(("module", "owner"), ATTRIBUTES)
def test_what_the_plugin_reads_is_there(tree, module, owner):
    names = ATTRIBUTES[module, owner]
    print(f"{module}.{owner}:", *names)
    assert set(names) <= tree.attributes(module, owner)


def test_get_rope_has_the_parameters_that_the_extended_one_hands_on(tree):
    parameters = tree.parameters(ROTARY, "get_rope")
    print(f"get_rope({', '.join(parameters)})")
    extended = inspect.signature(rotary_factory._extend(print), follow_wrapped=False).parameters
    named = [name for name in extended if name != "keywords"]
    assert parameters == [*named, "mrope_positions_factor"]
    (rows,) = tree.find(ROTARY, "get_rope").args.defaults[-1:]
    assert rows.value == 4  # the extended one's, for models that do not name it


@pytest.mark.parametrize(
    ("module", "names", "used"),
    [
        (
            f"{ROTARY}.base",
            ("RotaryEmbedding", "__init__"),
            [
                *("head_size", "rotary_dim", "max_position_embeddings", "base", "is_neox_style"),
                *("dtype", "init_cache"),
            ],
        ),
        (
            f"{ROTARY}.mrope",
            ("MRotaryEmbedding", "__init__"),
            [
                *("head_size", "rotary_dim", "max_position_embeddings", "base", "is_neox_style"),
                *("dtype", "mrope_section", "mrope_interleaved", "positions_factor"),
            ],
        ),
        (RUNNER, ("GPUModelRunner", "_model_forward"), ["input_ids", "positions"]),
        ("vllm.utils.torch_utils", ("async_tensor_h2d",), ["data", "device", "dtype"]),
        ("vllm.model_executor.models.interfaces", ("supports_mrope",), ["model"]),
    ],
)
def test_what_the_plugin_calls_takes_its_arguments(tree, module, names, used):
    parameters = tree.parameters(module, *names)
    print(f"{module}.{'.'.join(names)}({', '.join(parameters)})")
    assert parameters[: len(used)] == used or set(used) <= set(parameters)


def test_the_runner_runs_the_model_by_the_method_that_is_wrapped(tree):
    assert "_model_forward" in tree.names_read(RUNNER, "GPUModelRunner", "execute_model")
    calls = tree.calls("_model_forward")
    workers = {place: each for place, each in calls.items() if place.startswith("v1/worker")}
    print("_model_forward is called at", workers)
    assert all("positions" in keywords for keywords in workers.values())


def test_the_salt_that_divides_the_prefix_cache_is_hashed(tree):
    assert "cache_salt" in tree.names_read(HASHES, "generate_block_hash_extra_keys")
    assert "cache_salt" in tree.names_read("vllm.v1.request", "Request", "from_engine_core_request")
    hasher = tree.names_read(HASHES, "get_request_block_hasher")
    assert "generate_block_hash_extra_keys" in hasher
    # From 0.33 on, hashes of EAGLE's blocks cover the tokens after them, beside the same keys.
    lookahead = "generate_lookahead_block_hash_extra_keys"
    print("block hashes have cache_salt", f"and {lookahead}" * (lookahead in hasher))
    if lookahead in hasher:
        assert "generate_block_hash_extra_keys" in tree.names_read(HASHES, lookahead)


def test_the_first_model_runner_is_taken_for_what_the_second_cannot_do(tree):
    name = "_get_v2_model_runner_unsupported_features"
    assert name in tree.names_read(CONFIG, "VllmConfig", "use_v2_model_runner")


def test_names_of_rotations_that_vllm_reads_itself_are_left_to_it(tree):
    strings = tree.compared_strings(ROTARY, "get_rope")
    own = strings & {rope_type_for(name) for name in registered_methods()}
    print("get_rope compares rope_type with", *sorted(strings))
    assert {"default", "linear", "yarn", "llama3", "longrope", "deepseek_yarn"} <= strings
    assert not own
    assert all(method_name(each) is None for each in strings)
