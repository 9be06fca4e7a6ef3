"""Defects of methods that follow the length: cached keys, rows, lengths and the steps of generate."""

from regressions.defect import Defect

_TESTS = "tests/patching/dynamic"
_FOLDER = "rope_patch/patching/dynamic"
_HOOKS = f"{_FOLDER}/hooks.py"
_RECORD = f"{_FOLDER}/cache_record.py"

DEFECTS = [
    Defect(
        "a single new token whose position jumps is rotated by the frequencies of the next one",
        _HOOKS,
        "            lowest = highest = next_positions\n",
        "            lowest = highest = next_positions = (row_spans[:, 1] + 1).tolist()\n",
        (f"{_TESTS}/test_generation_loop.py::test_decode_step_that_jumps",),
    ),
    Defect(
        "continuous batching starts under methods that follow lengths, and mixes those of requests",
        "rope_patch/patching/handle.py",
        "                length_hooks=self._length_hooks,\n                refusal=",
        "                length_hooks=(),\n                refusal=",
        (f"{_TESTS}/test_batching_guard.py::test_length_dependent_methods_are_refused",),
    ),
    Defect(
        "a manager of continuous batching keeps the keys of a rotation from before",
        f"{_FOLDER}/generation.py",
        "        if manager is not None and vars(manager).get(_ROTATION_ATTRIBUTE) != rotation:\n",
        "        if False:\n",
        (
            f"{_TESTS}/test_batching_guard.py::test_persistent_manager_of_another_rotation_is_refused",
        ),
    ),
    Defect(
        "packed rows without positions are rotated by the length of the whole row",
        "rope_patch/patching/positions.py",
        "            raise Refused(_PARTS)\n        require_document_positions(call)\n",
        "            raise Refused(_PARTS)\n",
        (f"{_TESTS}/test_batching_guard.py::test_packed_rows_need_their_positions",),
    ),
    Defect(
        "the backward pass through re-rotated keys misses their rotation",
        f"{_FOLDER}/rerotation.py",
        "            with_gradients = torch.is_grad_enabled() and keys.requires_grad\n",
        "            with_gradients, keys = False, keys.detach()\n",
        (f"{_TESTS}/test_rerotation.py",),
    ),
    Defect(
        "a static cache loses the gradients of its keys when they are re-rotated",
        _RECORD,
        "    if keys.requires_grad and isinstance(layer, StaticLayer):\n",
        "    if False:\n",
        (f"{_TESTS}/test_rerotation.py::test_static_cache_that_would_lose_gradients_is_refused",),
    ),
    Defect(
        "a compiled chunk loses the gradients of keys that it re-rotates",
        _HOOKS,
        "        if torch.compiler.is_compiling() and carries_gradients(cache):\n",
        "        if False:\n",
        (f"{_TESTS}/test_rerotation.py::test_gradients_through_a_compiled_chunk",),
    ),
    Defect(
        "rejected candidates of assisted decoding rotate the tokens before them",
        f"{_FOLDER}/generation.py",
        "        generator.get_candidates = limit.get_candidates\n",
        "",
        (f"{_TESTS}/test_assisted_decoding.py::test_prompt_lookup_is_lossless",),
    ),
    Defect(
        "an assistant takes a draft that was cut for one that the model agreed with",
        f"{_FOLDER}/generation.py",
        "        if draft_tokens is not None and self.shortened:\n",
        "        if False:\n",
        (f"{_TESTS}/test_assisted_decoding.py::test_exact_growth_turns_candidates_off",),
    ),
    Defect(
        "re-rotation turns back the keys of LongRoPE's start tokens, too",
        f"{_FOLDER}/rerotation.py",
        "            with preserve_start_keys(rows, at[block], self.start_tokens):\n",
        "            with preserve_start_keys(rows, at[block], 0):\n",
        (
            "tests/patching/test_start_tokens.py::test_rerotation_keeps_the_keys_of_start_tokens_bit_for_bit",
        ),
    ),
    Defect(
        "static caches whose layers all have a window keep keys of other frequencies",
        _RECORD,
        "            end = max(layer.get_seq_length(), slots) if layer.is_sliding else slots\n",
        "            end = slots\n",
        (f"{_TESTS}/test_cache_record.py::test_static_caches_in_chunks",),
    ),
    Defect(
        "positions of slots broadcast over keys that a record does not have",
        _RECORD,
        "    if positions.shape[1] != slots:\n",
        "    if False:\n",
        (f"{_TESTS}/test_cache_record.py::test_layer_with_other_keys_than_recorded_is_refused",),
    ),
    Defect(
        "the record of a static cache ends at its capacity where windows let tokens go",
        _RECORD,
        "        if isinstance(past, int) and (more := past + new.shape[1] - self.positions.shape[1]) > 0:\n",
        "        if False:\n            more = 0\n",
        (f"{_TESTS}/test_cache_record.py::test_static_caches_in_chunks",),
    ),
    Defect(
        "keys of inference mode, or that autograd has saved, are re-rotated in their own memory",
        _RECORD,
        "    return keys.clone() if outside or saved else keys\n",
        "    return keys\n",
        (
            f"{_TESTS}/test_cache_record.py::test_decoding_continues_after_inference_mode",
            f"{_TESTS}/test_rerotation.py::test_losses_give_the_gradients_without_a_cache",
        ),
    ),
    Defect(
        "the record of a cache does not follow its reordered rows",
        _RECORD,
        "        self._rearrange_record(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))\n",
        "",
        (f"{_TESTS}/test_cache_record.py::test_moved_rows_keep_their_rotation",),
    ),
    Defect(
        "a cache of unknown rotation is taken as one of this patch",
        _RECORD,
        "        if not torch.compiler.is_compiling() and int(past) > 0:\n",
        "        if False:\n",
        (f"{_TESTS}/test_cache_record.py::test_cache_of_unknown_rotation_is_refused",),
    ),
    Defect(
        "a cache of other layer types or start tokens is re-rotated as this patch's",
        _RECORD,
        "    if record.layout != layout:\n",
        "    if False:\n",
        (f"{_TESTS}/test_cache_record.py::test_cache_of_other_layers_or_start_tokens_is_refused",),
    ),
    Defect(
        "quantised keys that cannot be re-rotated are left as they are",
        _RECORD,
        "        if layer_class in REROTATABLE_LAYERS or not issubclass(layer_class, CacheLayerMixin):\n",
        "        if True:\n",
        (f"{_TESTS}/test_cache_record.py::test_cache_whose_keys_cannot_be_rerotated_is_refused",),
    ),
    Defect(
        "positions of a narrow type have no number for slots without a token",
        "rope_patch/patching/positions.py",
        "    positions = positions.flatten(1).long()  # narrower types cannot hold the marker for no position\n",
        "    positions = positions.flatten(1)\n",
        (f"{_TESTS}/test_length_hooks.py::test_int32_positions",),
    ),
    Defect(
        "a mask for all slots of a static cache is read from its end",
        "rope_patch/patching/positions.py",
        "        end = min(past + steps, width)\n        return mask[:, end - steps : end]\n",
        "        return mask[:, -steps:]\n",
        (
            f"{_TESTS}/test_length_hooks.py::test_mask_for_all_slots_of_a_static_cache",
            "tests/patching/test_position_rule.py::test_masks_that_go_on_behind_the_tokens",
        ),
    ),
    Defect(
        "a failed forward leaves its frequencies for the next one",
        "rope_patch/patching/undo_log.py",
        "module.register_forward_hook(after, with_kwargs=True, always_call=True)",
        "module.register_forward_hook(after, with_kwargs=True)",
        (f"{_TESTS}/test_length_hooks.py::test_failed_forward_restores_the_frequencies",),
    ),
    Defect(
        "Llama 4's one complex tensor is read as cos and sin of two rows",
        "rope_patch/patching/architecture/rotary_traits.py",
        "    return output if isinstance(output, tuple) else (output,)\n",
        "    return tuple(output)\n",
        (
            f"{_TESTS}/test_dynamic_architectures.py::test_forwards_that_take_frequencies_per_row_stay",
            f"{_TESTS}/test_dynamic_architectures.py::test_rows_of_a_batch_have_frequencies_of_their_own",
        ),
    ),
    Defect(
        "a layer of a cache that belongs to no known layer of the decoder keeps its old rotation",
        _HOOKS,
        "            if index >= len(self.rotated_layer_types):\n",
        "            if index >= len(self.rotated_layer_types):\n                continue\n"
        "            if False:\n",
        (f"{_TESTS}/test_cache_record.py::test_cache_with_a_layer_of_no_known_layer_is_refused",),
    ),
    Defect(
        "Dory's loops have the keys of their first time re-rotated alone",
        "rope_patch/patching/architecture/attention_source.py",
        "        types += types[first : first + count] * (config.n_recurrent_loops - 1)\n",
        '        types += [""] * (count * (config.n_recurrent_loops - 1))\n',
        (
            f"{_TESTS}/test_dynamic_architectures.py::test_keys_of_layers_that_run_several_times_are_rerotated",
        ),
    ),
    Defect(
        "layers without rotation have their keys rotated again",
        "rope_patch/patching/architecture/attention_source.py",
        "        return [bool(rotates) for rotates in config.no_rope_layers]\n",
        "        return [True for _ in config.no_rope_layers]\n",
        (f"{_TESTS}/test_dynamic_architectures.py::test_layers_without_rotation_keep_their_keys",),
    ),
    Defect(
        "a query projection that an adapter replaced misses its attention factor",
        f"{_FOLDER}/latent_cache.py",
        "        undo_log.hook(attention, before=partial(_require_projection, getattr(attention, name)))\n",
        "",
        (f"{_TESTS}/test_dynamic_architectures.py::test_a_replaced_query_projection_is_refused",),
    ),
    Defect(
        "a trace keeps the frequencies of the length that it saw",
        f"{_FOLDER}/frequency_table.py",
        "        if not torch.compiler.is_compiling() and torch.jit.is_tracing():\n",
        "        if False:\n",
        ("tests/patching/test_robustness.py::test_trace_of_a_length_dependent_method_is_refused",),
    ),
    Defect(
        "a token of an image counts by its first axis alone",
        "rope_patch/patching/positions.py",
        "    return [min(row) for row in rows], [max(row) for row in rows]\n",
        "    return [row[0] for row in rows], [row[0] for row in rows]\n",
        (f"{_TESTS}/test_mrope.py::test_the_largest_position_of_any_axis_counts",),
    ),
    Defect(
        "generation from an image on counts slots, which are more than positions",
        "rope_patch/patching/positions.py",
        "        if positions.shape[1] != steps:\n            raise Refused(\n",
        "        if False:\n            raise Refused(\n",
        (f"{_TESTS}/test_mrope.py::test_positions_counted_from_a_longer_mask_are_refused",),
    ),
    Defect(
        "a request counts for a token that is never read, so a scored prompt of 2^(k/4) times the "
        "trained length is rotated by the next factor",
        "rope_patch/serving/vllm/requests.py",
        "max((max_tokens or 0) - 1, 0)",
        "(max_tokens or 0)",
        (
            "tests/serving/test_profiles.py::"
            "test_a_request_counts_for_its_prompt_and_what_may_be_read_of_its_answer",
        ),
    ),
    Defect(
        "an admission outlives its generate",
        f"{_FOLDER}/generation.py",
        "            vars(self).update(outer)\n",
        "            pass\n",
        (f"{_TESTS}/test_admission.py::test_an_admission_ends_with_its_generate",),
    ),
    Defect(
        "a sequence that outgrows its admitted factor has its keys re-rotated in silence",
        f"{_FOLDER}/generation.py",
        "        if self.is_draft:\n            return\n",
        "        return\n",
        (
            f"{_TESTS}/test_admission.py::test_a_loop_without_generate_is_refused_where_it_outgrows_its_first_forward",
        ),
    ),
    Defect(
        "an emptied cache keeps the factor that its last text was admitted with",
        _RECORD,
        "        if past == 0:\n            return None  # nothing is left to re-rotate\n",
        "",
        (f"{_TESTS}/test_admission.py::test_an_emptied_cache_is_admitted_anew",),
    ),
    Defect(
        "an interrupted forward leaves the rotary module locked for the next one",
        _HOOKS,
        "        if self._state.saved_buffer is not None:  # Ctrl-C in a forward leaves hooks behind uncalled\n"
        "            self.after_rotary(module, args, kwargs, None)\n",
        "",
        ("tests/integrations/test_threads.py::test_interrupted_forward_is_cleaned_up_by_the_next",),
    ),
]
