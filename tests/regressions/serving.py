"""Defects of serving, trainers, batched decoding, and of what is asked of transformers."""

from regressions.defect import Defect

_VLLM = "rope_patch/serving/vllm"
_API = "rope_patch/transformers_api"
_INFERENCE = "rope_patch/inference"
_INTEGRATIONS = "rope_patch/integrations"

DEFECTS = [
    # -- tables of vLLM's plugin -------------------------------------------------------------------
    Defect(
        "start tokens of a served checkpoint with its own scaling rotate by plain theta",
        f"{_VLLM}/profiles.py",
        "    if geometry.base:  # start tokens and short requests rotate as the checkpoint's own scaling\n",
        "    if False:\n",
        ("tests/serving/test_profiles.py::test_tables_rotate_each_request_as_the_live_model",),
    ),
    Defect(
        "profiles of a served checkpoint start from theta, not from its own scaling",
        f"{_VLLM}/rope_type.py",
        "            base=self.base,\n",
        "",
        ("tests/serving/test_profiles.py::test_tables_rotate_each_request_as_the_live_model",),
    ),
    Defect(
        "a request of exactly a profile's length gets the next one",
        f"{_VLLM}/profiles.py",
        "        index = bisect.bisect_left(self.longest, length)\n",
        "        index = bisect.bisect_right(self.longest, length)\n",
        (
            "tests/serving/test_profiles.py::test_a_request_gets_the_smallest_profile_that_serves_it",
        ),
    ),
    Defect(
        "a request counts for its prompt alone, and outgrows its profile",
        f"{_VLLM}/requests.py",
        "    return min(prompt_length + max((max_tokens or 0) - 1, 0), max_length)\n",
        "    return min(prompt_length, max_length)\n",
        (
            "tests/serving/test_profiles.py::test_a_request_counts_for_its_prompt_and_what_may_be_read_of_its_answer",
        ),
    ),
    Defect(
        "a user's salt names the cached blocks of another profile",
        f"{_VLLM}/requests.py",
        "    return f\"{profile}:{user_salt or ''}\"\n",
        '    return f"{profile}:{user_salt}" if user_salt is None else user_salt\n',
        (
            "tests/serving/test_profiles.py::test_no_users_salt_can_name_the_blocks_of_another_profile",
        ),
    ),
    Defect(
        "layer types of other lengths divide requests by those of the first one",
        f"{_VLLM}/profiles.py",
        "        return cls(tuple(sorted({end for lengths in several for end in lengths.longest})))\n",
        "        return next(iter(several))\n",
        (
            "tests/serving/test_profiles.py::test_layer_types_with_lengths_of_their_own_share_the_finer_division",
        ),
    ),
    Defect(
        "a rotation of vLLM's own name is taken for this package's",
        f"{_VLLM}/rope_type.py",
        "    is_ours = rope_type not in _VLLM_ROPE_TYPES and find_method(rope_type) is not None\n",
        "    is_ours = find_method(rope_type) is not None\n",
        ("tests/serving/test_rope_type.py::test_vllms_own_names_stay_vllms",),
    ),
    Defect(
        "a position map is served by tables of cos and sin",
        f"{_VLLM}/rope_type.py",
        "    if method_class is not None and issubclass(method_class, PositionMap):\n",
        "    if False:\n",
        ("tests/serving/test_rope_type.py::test_what_cannot_be_read_is_refused_with_the_reason",),
    ),
    Defect(
        "a temperature is served by tables of cos and sin",
        f"{_VLLM}/rope_type.py",
        "    if method.query_temperature is not None:\n",
        "    if False:\n",
        ("tests/serving/test_rope_type.py::test_what_cannot_be_read_is_refused_with_the_reason",),
    ),
    Defect(
        "the last profile ends behind the engine's longest request",
        f"{_VLLM}/profiles.py",
        "min(math.floor(end), max_length))\n            if",
        "math.floor(end))\n            if",
        (
            "tests/serving/test_profiles.py::test_the_last_profile_ends_at_the_engines_longest_request",
        ),
    ),
    # -- transformers' own server ------------------------------------------------------------------
    Defect(
        "transformers' server loads a saved folder as the unpatched model",
        "rope_patch/serving/transformers_server.py",
        "            if not (folder / SIDECAR).is_file():\n",
        "            if True:\n",
        (
            "tests/integrations/test_transformers_serve.py::test_saved_folders_are_rotated_as_recorded",
        ),
    ),
    Defect(
        "a folder that the server names with a revision is not known as one of ours",
        f"{_API}/generation.py",
        '    return path if path.exists() else Path(re.sub(r"@[^@/]*$", "", name))\n',
        "    return path\n",
        (
            "tests/transformers_api/test_room.py::test_folders_are_known_with_and_without_a_revision",
        ),
    ),
    Defect(
        "continuous batching of a served folder is refused request by request",
        "rope_patch/serving/transformers_server.py",
        "            if self.batches_continuously:\n                require_batching(model)\n",
        "",
        (
            "tests/integrations/test_transformers_serve.py::test_continuous_batching_is_refused_when_the_model_is_loaded",
        ),
    ),
    # -- releases of transformers ------------------------------------------------------------------
    Defect(
        "a cache under the newer release's name is not seen",
        f"{_API}/forwards.py",
        "    for value in arguments.values():\n"
        "        if is_cache(value):\n"
        "            return self_attention_part(value)\n    return None\n",
        "    return None\n",
        (
            "tests/transformers_api/test_room.py::test_values_are_known_by_their_kind",
            "tests/transformers_api/test_next_release.py::test_caches_of_other_rotations_are_refused",
        ),
    ),
    Defect(
        "a forward's cache is known by its name alone",
        f"{_API}/forwards.py",
        "    if len(annotated) == 1:\n        return annotated[0]\n",
        "",
        (
            "tests/transformers_api/test_room.py::test_parameters_are_known_by_their_annotation_before_their_name",
        ),
    ),
    Defect(
        "a cache under a name that the forward ignores is checked and then unread",
        f"{_API}/forwards.py",
        "        if cache is not None:\n            self._require_used_name()\n",
        "",
        (
            "tests/transformers_api/test_room.py::test_a_cache_that_the_forward_would_ignore_is_refused",
        ),
    ),
    Defect(
        "any argument called cache counts as continuous batching's",
        f"{_API}/caches.py",
        "    return type(value).__module__.startswith(_BATCHING)\n",
        "    return value is not None and not isinstance(value, _NO_CACHES)\n",
        (
            "tests/transformers_api/test_room.py::test_paged_caches_are_known_by_their_class",
            "tests/transformers_api/test_room.py::test_both_spellings_of_users",
        ),
    ),
    Defect(
        "a cache in the newer release's output goes without its record",
        f"{_API}/caches.py",
        "        if is_cache(part) and not is_paged(part):\n            return self_attention_part(part)\n"
        "    return None\n",
        '        if is_cache(part) and part is getattr(output, "past_key_values", None):\n'
        "            return self_attention_part(part)\n    return None\n",
        ("tests/transformers_api/test_room.py::test_outputs_are_searched_for_a_cache",),
    ),
    Defect(
        "a model whose release lacks a step of generate goes without the hooks on it",
        f"{_API}/generation.py",
        "            require_steps(module, *steps)\n            yield module\n",
        "            if all(hasattr(type(module), name) for name in steps):\n                yield module\n",
        ("tests/transformers_api/test_room.py::test_a_missing_step_is_refused",),
    ),
    Defect(
        "continuous batching that starts in another way goes unguarded",
        f"{_API}/generation.py",
        '        elif hasattr(type(module), "generate_batch"):\n',
        "        elif False:\n",
        (
            "tests/transformers_api/test_room.py::test_another_start_of_continuous_batching_is_refused",
        ),
    ),
    Defect(
        "a callback of a trainer that no longer calls it does nothing",
        f"{_API}/training.py",
        "    lacking = [name for name in names if not hasattr(base, name)]\n",
        "    lacking: list[str] = []\n",
        ("tests/transformers_api/test_room.py::test_every_override_that_nobody_calls_is_refused",),
    ),
    # -- trainers ----------------------------------------------------------------------------------
    Defect(
        "a run resumes from a checkpoint of another rotation",
        f"{_INTEGRATIONS}/trainer_callback.py",
        "            self._require_same_run(model, state)\n",
        "",
        (
            "tests/integrations/test_trainer_callback.py::test_checkpoint_of_another_rotation_is_refused",
            "tests/integrations/test_trainer_callback.py::test_checkpoint_without_a_rotation_is_refused",
        ),
    ),
    Defect(
        "a rotation that is lost in training is saved as if it acted",
        f"{_INTEGRATIONS}/trainer_callback.py",
        "            raise _no_patch(model, had_patch=True)\n        if isinstance(self.handle, Patch):\n"
        "            require_acting(model, self.handle)\n",
        "            raise _no_patch(model, had_patch=True)\n",
        (
            "tests/integrations/test_trainer_callback.py::test_rotation_that_is_lost_in_training_is_refused_at_the_checkpoint",
        ),
    ),
    Defect(
        "rows of a stream beyond the patched length are trained on",
        f"{_INTEGRATIONS}/trainer_callback.py",
        "        if longest is not None:\n            raise _row_refusal(",
        "        if False:\n            raise _row_refusal(",
        (
            "tests/integrations/test_trainer_callback.py::test_rows_of_a_stream_are_checked_at_each_step",
        ),
    ),
    Defect(
        "rollouts of vLLM rotate as the unpatched checkpoint",
        f"{_INTEGRATIONS}/rollout.py",
        "    if not _has_rotation(source, handle):\n        raise Refused(\n",
        "    if False:\n        raise Refused(\n",
        ("tests/integrations/test_trl.py::test_vllm_on_an_unpatched_checkpoint_is_refused",),
    ),
    Defect(
        "an adapter's checkpoint does not hold the rotation of its base",
        f"{_INTEGRATIONS}/trainer_callback.py",
        "        if adapters:\n            record_adapters([folder, *adapters], self.model, handle)\n        elif",
        "        if",
        ("tests/integrations/test_trainer_callback.py::test_saved_folders_hold_the_rotation",),
    ),
    # -- prompts that share keys, and batches of caches ---------------------------------------------
    Defect(
        "prompts of other frequencies share cached keys",
        f"{_INFERENCE}/prefix_reader.py",
        "        if not self.share or not self._prompt or reach != self._reach:\n",
        "        if not self.share or not self._prompt:\n",
        (
            "tests/inference/test_prefix_reader.py::test_prompts_with_different_frequencies_share_nothing",
        ),
    ),
    Defect(
        "a prompt shares the keys of a chunk that was cut elsewhere",
        f"{_INFERENCE}/prefix_reader.py",
        "        return same // self.chunk * self.chunk\n",
        "        return same\n",
        ("tests/inference/test_prefix_reader.py::test_sharing_changes_no_bit_in_any_order",),
    ),
    Defect(
        "tokens that were only borrowed stay in a prompt's cache",
        f"{_INFERENCE}/prefix_reader.py",
        "        if borrowed is cache:\n            _drop_last_tokens(cache, tokens)\n",
        "",
        ("tests/inference/test_prefix_reader.py::test_borrowing_leaves_the_cache_unchanged",),
    ),
    Defect(
        "a recurrent state is cropped like keys",
        f"{_INFERENCE}/prefix_reader.py",
        "        return copy.deepcopy(cache) if self.in_one_pass or self.has_windows or rerotates else cache\n",
        "        return copy.deepcopy(cache) if self.has_windows or rerotates else cache\n",
        (
            "tests/inference/test_prefix_reader.py::test_borrowing_leaves_the_cache_of_a_hybrid_model_unchanged",
        ),
    ),
    Defect(
        "a failed reading leaves the model at a fixed length",
        f"{_INFERENCE}/prefix_reader.py",
        "        finally:\n            if self.handle is not None:\n                self.handle.fix_length(None)\n",
        "        finally:\n            pass\n",
        (
            "tests/inference/test_prefix_reader.py::test_the_model_follows_the_length_again_after_reading_and_after_a_failure",
        ),
    ),
    Defect(
        "a token of one row is written to all rows of a batch",
        f"{_INFERENCE}/decoding.py",
        "        if key_states.shape[0] != rows or key_states.shape[-2] > left:\n",
        "        if key_states.shape[-2] > left:\n",
        ("tests/inference/test_cache_batch.py::test_a_token_of_one_row_is_not_written_to_all",),
    ),
    Defect(
        "negative rows of a batch are counted from memory of dropped ones",
        f"{_INFERENCE}/decoding.py",
        "        indices = torch.arange(self.keys.shape[0], device=self.device)[indices.to(self.device)]\n",
        "        indices = indices.to(self.device)\n",
        (
            "tests/inference/test_cache_batch.py::test_negative_rows_are_counted_from_the_last_one_in_use",
        ),
    ),
    Defect(
        "rows of a batch count the padding ahead of them",
        f"{_INFERENCE}/decoding.py",
        "        positions = torch.tensor(self.lengths, device=device)[:, None]\n",
        "        positions = torch.full((len(self.lengths), 1), stop, device=device)\n",
        ("tests/inference/test_cache_batch.py",),
    ),
    Defect(
        "layers that drop keys are filled into a batch",
        f"{_INFERENCE}/decoding.py",
        "        if wrong := {type(x).__name__ for x in cache.layers if not _keeps_all(x)}:\n",
        "        if wrong := set():\n",
        ("tests/inference/test_cache_batch.py::test_layers_that_drop_keys_are_refused",),
    ),
]
