"""Defects of patching: undo, copies, casts, modes of torch, caches of static methods, start tokens."""

from regressions.defect import Defect

_TESTS = "tests/patching"
_FOLDER = "rope_patch/patching"
_STAMP = f"{_FOLDER}/stamp.py"
_ATTENTION = f"{_FOLDER}/kernels/attention_forward.py"

DEFECTS = [
    # -- caches of other rotations -----------------------------------------------------------------
    Defect(
        "a cache that was filled before the patch goes on under a static method",
        _STAMP,
        "            elif int(length) > 0:\n                raise Refused(",
        "            elif int(length) > 0 and False:\n                raise Refused(",
        (f"{_TESTS}/test_stamp.py::test_cache_of_another_rotation_is_refused",),
    ),
    Defect(
        "tokens that the unpatched model put into a marked cache are taken as rotated",
        _STAMP,
        "            _require_unchanged(cache)\n            return None\n",
        "            return None\n",
        (f"{_TESTS}/test_stamp.py::test_tokens_cached_without_the_patch_are_refused",),
    ),
    Defect(
        "patches with other start tokens accept each other's caches",
        _STAMP,
        "        plan.method.start_token_count,\n        sorted(start),\n",
        "",
        (f"{_TESTS}/test_stamp.py::test_cache_of_other_start_tokens_is_refused",),
    ),
    Defect(
        "a rotation's digest leaves the attention factor out",
        "rope_patch/methods/base.py",
        "        numbers = [*self.inv_freq.tolist(), self.attention_factor]\n",
        "        numbers = self.inv_freq.tolist()\n",
        (f"{_TESTS}/test_stamp.py::test_cache_of_other_options_is_refused",),
    ),
    Defect(
        "a compiled graph takes a static cache of another rotation",
        _STAMP,
        "    if int(length) > 0:\n        raise Refused(cache_refusal(int(length), marked=False))\n",
        "",
        (f"{_TESTS}/test_stamp.py::test_compiled_graph_refuses_a_static_cache_at_run_time",),
    ),
    Defect(
        "a warning of outgrown lengths counts padding",
        f"{_FOLDER}/length_warning.py",
        "    if counted is not None and counted.numel() and _is_readable(counted):\n"
        "        return int(counted.max()) + 1\n",
        "",
        (f"{_TESTS}/test_length_warning.py::test_one_warning_beyond_the_patched_length[masked]",),
    ),
    Defect(
        "a warning of outgrown lengths leaves out what the cache holds",
        f"{_FOLDER}/length_warning.py",
        "    return past + int(tokens.shape[1])\n\n\ndef _longest",
        "    return int(tokens.shape[1])\n\n\ndef _longest",
        (f"{_TESTS}/test_length_warning.py::test_one_warning_beyond_the_patched_length[steps]",),
    ),
    # -- one rule of positions ---------------------------------------------------------------------
    Defect(
        "position maps and temperatures count left padding as text where positions are missing",
        f"{_FOLDER}/positions.py",
        "        counts = counts_tokens or (counts_lengths and is_around)\n",
        "        counts = counts_lengths and is_around\n",
        (f"{_TESTS}/test_position_rule.py::test_left_padding",),
    ),
    Defect(
        "a decoder whose masks are made around it counts padding for dynamic methods",
        f"{_FOLDER}/positions.py",
        "        counts = counts_tokens or (counts_lengths and is_around)\n",
        "        counts = counts_tokens\n",
        (f"{_TESTS}/test_position_rule.py::test_masks_made_around_the_decoder",),
    ),
    Defect(
        "flash attention's packed rows without positions are counted as one document",
        f"{_FOLDER}/positions.py",
        "        require_document_positions(call)\n        positions = counted_positions(call)\n",
        "        positions = counted_positions(call)\n",
        (f"{_TESTS}/test_position_rule.py::test_documents_without_positions",),
    ),
    Defect(
        "learned tables of GPT-2's kind count left padding as text",
        "rope_patch/encodings/sites/table.py",
        "            install_position_rule(model, around, undo_log, counts_tokens=True)\n",
        "            pass\n",
        (
            f"{_TESTS}/test_position_rule.py::"
            "test_left_padding[`patch`, tables of GPT-2's kind-GPT2LMHeadModel-one pass]",
        ),
    ),
    # -- undo, copies and wrappers -----------------------------------------------------------------
    Defect(
        "undo sets the attention implementation back that a user has chosen since",
        f"{_FOLDER}/undo_log.py",
        "    if plain or isinstance(one, PreTrainedConfig):\n",
        "    if plain:\n",
        (f"{_TESTS}/test_undo_log.py::test_settings_outside_of_config_equality_survive",),
    ),
    Defect(
        "a patch changes the config of other models made from the same object",
        f"{_FOLDER}/undo_log.py",
        "                    own = copy.deepcopy(value, copies)\n",
        "                    own = copies[id(value)] = value\n",
        (f"{_TESTS}/test_undo_log.py::test_other_model_of_the_same_config_is_unchanged",),
    ),
    Defect(
        "leaving an inner block leaves the outer one unpatched",
        f"{_FOLDER}/handle.py",
        "        if before is not None:\n            before._restore(model)\n",
        "",
        (f"{_TESTS}/test_undo_log.py::test_blocks_restore_what_was_in_effect",),
    ),
    Defect(
        "a failed patch leaves the one before it undone",
        "rope_patch/entry_points.py",
        "        if active_patch:\n            active_patch._restore(model)\n        raise\n",
        "        raise\n",
        (f"{_TESTS}/test_undo_log.py::test_failed_patch_restores_the_previous_one",),
    ),
    Defect(
        "replicas of nn.DataParallel rotate and attend with the original's weights",
        f"{_FOLDER}/torch_state.py",
        "forward_for_replica(module.forward, weakref.proxy(replica))",
        "module.forward",
        ("tests/integrations/test_copied_models.py::test_replicas_use_their_weights",),
    ),
    Defect(
        "a wrapper around a patched forward goes on with the patch after undo",
        f"{_FOLDER}/undo_log.py",
        '                if hasattr(value, "retire"):\n                    value.retire()\n',
        "",
        (f"{_TESTS}/test_undo_log.py::test_wrapper_around_a_patched_forward_survives_undo",),
    ),
    Defect(
        "a cast to half precision rounds the frequencies of a patched model",
        f"{_FOLDER}/architecture/frequency_buffers.py",
        "            module._buffers[name] = inv_freq.to(module._buffers[name].device, copy=True)\n",
        "            pass\n",
        (f"{_TESTS}/test_undo_log.py::test_frequencies_stay_exact_through_casts",),
    ),
    Defect(
        "undo restores frequencies that were lost on meta before the patch as they lie in memory",
        f"{_FOLDER}/architecture/frequency_buffers.py",
        "        old = before[layer_type].inv_freq.float() if live.is_meta else live\n",
        "        old = live\n",
        (
            f"{_TESTS}/test_robustness.py::test_meta_model_has_exact_frequencies_after_to_empty",
            "tests/integrations/test_wrapped_models.py::test_empty_model_is_patched_and_then_filled",
        ),
    ),
    # -- modes of torch ----------------------------------------------------------------------------
    Defect(
        "another default dtype of torch gives a patch other kernels",
        f"{_FOLDER}/torch_state.py",
        "        torch.set_default_dtype(torch.float32)\n        try:\n",
        "        try:\n",
        (f"{_TESTS}/test_every_patch.py::test_torchs_defaults_do_not_change_the_patch",),
    ),
    Defect(
        "a patched model cannot be traced or differentiated forwards",
        "rope_patch/ops/modes.py",
        "        torch._C._get_tracing_state() is not None\n"
        "        or forward_ad._current_level >= 0\n"
        "        or torch._C._are_functorch_transforms_active()\n",
        "        torch._C._are_functorch_transforms_active()\n",
        (
            f"{_TESTS}/test_robustness.py::test_trace_matches_the_model",
            f"{_TESTS}/test_robustness.py::test_forward_mode_derivatives_match_reverse_mode",
        ),
    ),
    Defect(
        "kernels go on with packed frequencies after the buffer was changed in place",
        "rope_patch/ops/modes.py",
        "    return x._version if isinstance(x, torch.Tensor) and not x.is_inference() else 0\n",
        "    return 0\n",
        (f"{_TESTS}/test_robustness.py::test_in_place_changes_of_frequencies_are_seen",),
    ),
    Defect(
        "training fails after frequencies were packed in inference mode",
        f"{_FOLDER}/kernels/attention_forward.py",
        "        with torch.inference_mode(False), torch.no_grad():\n",
        "        with torch.no_grad():\n",
        (
            f"{_TESTS}/attention_kernels/test_kernel_agreement.py::test_training_works_after_inference_mode",
        ),
    ),
    # -- bits of short texts, and outputs that hooks keep ------------------------------------------
    Defect(
        "short texts lose the plain model's bits in half precision",
        _ATTENTION,
        "        if got.dtype == expected.dtype and got.equal(expected):\n            return wide\n",
        "        if got.dtype == expected.dtype:\n            return True\n",
        (f"{_TESTS}/test_short_text_bits.py::test_short_texts_keep_the_bits_of_the_plain_model",),
    ),
    Defect(
        "a short row beside a long one is rotated from positions and loses its bits",
        f"{_FOLDER}/dynamic/hooks.py",
        "        return any(map(self.frequency_table.is_plain, self._state.reaches))\n",
        "        return all(map(self.frequency_table.is_plain, self._state.reaches))\n",
        (f"{_TESTS}/test_short_text_bits.py::test_short_rows_beside_long_ones_keep_their_bits",),
    ),
    Defect(
        "rotated heads lie in memory otherwise than in transformers, so that SDPA rounds otherwise",
        "rope_patch/ops/plain_torch.py",
        "    return cos.shape[-1] < x.shape[-1] and x.stride(-1) != 1\n",
        "    return False\n",
        ("tests/ops/test_cpu.py::test_heads_lie_in_memory_as_in_transformers",),
    ),
    Defect(
        "queries are rotated in the memory of their projection, which a hook has kept",
        _ATTENTION,
        "        rotated = rope_from_cos_sin(q, k, cos, sin, wide=wide, **options)\n",
        "        rotated = rope_from_cos_sin(q, k, cos, sin, wide=wide, may_overwrite=True, **options)\n",
        (
            f"{_TESTS}/attention_kernels/test_attention_forward.py::test_kept_outputs_stay_unchanged",
        ),
    ),
    Defect(
        "a norm with a hook is left out where the rotation applies norms",
        f"{_FOLDER}/kernels/attention_forward.py",
        "        or norm._forward_hooks\n        or norm._forward_pre_hooks\n",
        "",
        (
            f"{_TESTS}/attention_kernels/test_attention_forward.py::test_hooks_on_a_norm_get_its_output",
            f"{_TESTS}/attention_kernels/test_attention_forward.py::test_changes_between_forwards_take_effect_at_once",
        ),
    ),
    Defect(
        "an error within an attention leaves its norms deferred for the next call",
        _ATTENTION,
        "        finally:\n            end_deferral()\n",
        "        finally:\n            pass\n",
        (
            f"{_TESTS}/attention_kernels/test_attention_forward.py::test_error_within_an_attention_leaves_nothing_behind",
        ),
    ),
    Defect(
        "an update of a cache that a user replaced is not called",
        f"{_FOLDER}/kernels/cache_write.py",
        '            or "update" in vars(cache)\n',
        "",
        (f"{_TESTS}/attention_kernels/test_cache_write.py::test_updates_of_users_are_called",),
    ),
    # -- start tokens, temperatures and the config's own scaling -----------------------------------
    Defect(
        "start tokens are counted by slots of the batch, not by positions",
        f"{_FOLDER}/start_tokens.py",
        "        first = position_ids < self.tokens\n",
        "        first = (torch.arange(position_ids.shape[-1]) < self.tokens).expand_as(position_ids)\n",
        (
            f"{_TESTS}/test_position_rule.py::test_packed_rows[start tokens-longrope]",
            f"{_TESTS}/test_position_rule.py::test_left_padding[start tokens-longrope-one pass]",
        ),
    ),
    Defect(
        "start tokens rotate by plain theta where the config has a scaling of its own",
        f"{_FOLDER}/start_tokens.py",
        "            geometries[layer_type].inv_freq(), geometries[layer_type].attention_factor\n",
        "            geometries[layer_type].unscaled_inv_freq()\n",
        (f"{_TESTS}/test_start_tokens.py::test_start_tokens_keep_a_trained_scaling",),
    ),
    Defect(
        "a temperature's factor is rounded to 16 bits before it multiplies queries",
        f"{_FOLDER}/attention_interception.py",
        "        wide = torch.promote_types(query.dtype, torch.float32)\n",
        "        wide = query.dtype\n",
        (f"{_TESTS}/test_query_temperature.py::test_queries_in_16_bits_are_rounded_once",),
    ),
    Defect(
        "a temperature multiplies the one that the model has already",
        f"{_FOLDER}/attention_interception.py",
        "    _require_no_own_temperature(config)\n    return find_attentions(",
        "    return find_attentions(",
        (f"{_TESTS}/test_query_temperature.py::test_models_that_take_no_temperature_are_refused",),
    ),
    Defect(
        "longrope on a checkpoint's own scaling is saved with its long set for short texts",
        f"{_FOLDER}/method_wrappers.py",
        "        if switches or self.inner.is_length_dependent(geometry.trained_length):\n",
        "        if switches:\n",
        (f"{_TESTS}/test_start_option.py::test_two_sets_on_a_running_scaling_are_saved_as_two",),
    ),
    Defect(
        "a request below the length under the config's own yarn shortens the context in silence",
        f"{_FOLDER}/geometry_selection.py",
        "    if target is None or target >= present:\n",
        "    if True:\n",
        (
            f"{_TESTS}/architecture/test_trained_yarn.py::test_shorter_request_is_refused_with_both_lengths",
        ),
    ),
    Defect(
        "yarn on a trained yarn stretches stretched frequencies instead of continuing them",
        f"{_FOLDER}/method_wrappers.py",
        "        if isinstance(self.inner, YaRN) and self.continued_yarn(geometry):\n",
        "        if False:\n",
        (f"{_TESTS}/architecture/test_trained_yarn.py::test_factor_continues_one_yarn",),
    ),
    Defect(
        "latent attention loses the attention factor of its softmax scale",
        f"{_FOLDER}/handle.py",
        "base_softmax_scale(attention) * plan.shortest_softmax_mscale**2\n                if",
        "base_softmax_scale(attention)\n                if",
        (f"{_TESTS}/architecture/test_softmax_scale.py::test_yarn_matches_deepseeks_config",),
    ),
    Defect(
        "restore leaves the softmax scale of latent attention as it is",
        f"{_FOLDER}/restoration.py",
        "        lost_scale.attention.scaling = lost_scale.expected\n",
        "",
        ("tests/diagnosing/checks/test_initialisation.py",),
    ),
    Defect(
        "layers with a window are stretched with the others",
        f"{_FOLDER}/geometry_selection.py",
        "        far = [each for each in known if not any(window in each for window in windows)]\n",
        "        far = known\n",
        (f"{_TESTS}/test_config_copy.py::test_only_full_attention_changes_in_gemma3",),
    ),
]
