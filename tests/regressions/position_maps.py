"""Defects of position maps: what attention sees, which keys are kept, and who is refused."""

from regressions.defect import Defect

_MASKS = "tests/patching/position_maps/test_mapped_masks.py"
_CACHES = "tests/patching/position_maps/test_caches_and_batches.py"
_FUSED = "tests/patching/position_maps/test_fused_attention.py"
_COMPILED = "tests/patching/position_maps/test_compiled_maps.py"
_WRITTEN_OUT = "tests/patching/position_maps/test_mapped_attention.py"
_FOLDER = "rope_patch/patching/position_maps"

DEFECTS = [
    Defect(
        "a map makes bidirectional attention causal",
        f"{_FOLDER}/parts.py",
        "        if not index:  # later keys, where a mask shows any, are met at their own distance\n"
        "            inside |= places > queries[:, span, None]\n",
        "",
        (
            f"{_MASKS}::test_later_keys_that_a_mask_shows_are_met_at_their_own_distance",
            f"{_MASKS}::test_queries_within_the_trained_length_see_what_the_plain_model_shows",
        ),
    ),
    Defect(
        "fused parts ignore the mask that the attention function is handed",
        f"{_FOLDER}/forward_view.py",
        "        if not self.is_consecutive:\n            return False\n",
        "        return self.is_consecutive\n",
        (f"{_MASKS}::test_later_keys_that_a_mask_shows_are_met_at_their_own_distance",),
    ),
    Defect(
        "layers that share a mask share the causality of the first one",
        f"{_FOLDER}/forward_view.py",
        " or self._compared[1] != ahead",
        "",
        (f"{_MASKS}::test_layers_that_share_a_mask_have_a_causality_each",),
    ),
    Defect(
        "a map takes every attention that is not told otherwise for causal",
        "rope_patch/transformers_api/attention_functions.py",
        '    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)',
        '    return bool(getattr(module, "is_causal", True))',
        (f"{_MASKS}::test_attention_under_a_mask_is_that_of_transformers",),
    ),
    Defect(
        "an additive mask of booleans is read as one that shows keys",
        f"{_FOLDER}/forward_view.py",
        "        return self.call.adds_mask and isinstance(self._mask, torch.Tensor)",
        "        return False",
        (f"{_MASKS}::test_attention_under_a_mask_is_that_of_transformers",),
    ),
    Defect(
        "flash attention's mask of a static cache is laid on the wrong slots",
        f"{_FOLDER}/forward_view.py",
        "nn.functional.pad(is_token, (0, self.slots - is_token.shape[1]))",
        "nn.functional.pad(is_token, (self.slots - is_token.shape[1], 0))",
        (f"{_MASKS}::test_flash_attention_shows_keys_by_order_padding_and_packing",),
    ),
    Defect(
        "a map no longer calls an attention function of one's own beyond the trained length",
        "rope_patch/transformers_api/attention_functions.py",
        "    return next((kind for each, kind in known.items() if function is each), None)",
        '    return next((kind for each, kind in known.items() if function is each), "sdpa")',
        (
            f"{_MASKS}::test_arguments_and_functions_that_are_unknown_are_refused",
            f"{_MASKS}::test_attention_functions_of_ones_own_are_refused",
        ),
    ),
    Defect(
        "an argument of an attention function that a map does not know is dropped",
        "rope_patch/transformers_api/attention_functions.py",
        "    if unknown:\n        raise Refused(\n"
        "            f\"{type(module).__name__} passes {', '.join(unknown)}",
        "    if False:\n        raise Refused(\n"
        "            f\"{type(module).__name__} passes {', '.join(unknown)}",
        (f"{_MASKS}::test_arguments_and_functions_that_are_unknown_are_refused",),
    ),
    Defect(
        "a compiled map drops what an attention passes by position",
        f"{_FOLDER}/mapped_attention.py",
        "        _require_known(module, args, key, positions)\n",
        "",
        (f"{_COMPILED}::test_what_a_map_cannot_know_is_refused_in_a_graph_too",),
    ),
    Defect(
        "an encoding that scales keys loses its fade under a map",
        f"{_FOLDER}/mapped_attention.py",
        "                require_known_attention(present, _STAND_IN)\n",
        "",
        (f"{_MASKS}::test_maps_on_an_encoding_that_scales_keys_are_refused",),
    ),
    Defect(
        "fused parts read other memory where components are not neighbours",
        f"{_FOLDER}/parts.py",
        "    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))\n"
        "    if query.shape[2] > 1 and _fits_cpu_operator(query, key, value):\n",
        '    if query.shape[2] > 1 and query.device.type == "cpu":\n',
        (f"{_FUSED}::test_parts_read_no_other_memory",),
    ),
    Defect(
        "the operator for CPUs is given what torch's public function would not give it",
        f"{_FOLDER}/parts.py",
        "    if query.shape[2] > 1 and _fits_cpu_operator(query, key, value):\n",
        '    if query.shape[2] > 1 and query.device.type == "cpu":\n',
        (f"{_FUSED}::test_parts_that_the_operator_does_not_take_are_computed_in_plain_torch",),
    ),
    Defect(
        "far keys of a quantised cache come from unquantised originals",
        f"{_FOLDER}/forward_view.py",
        '            if getattr(layer, "keys", None) is key:\n',
        '            if getattr(layer, "keys", None) is key or hasattr(layer, "nbits"):\n',
        (f"{_CACHES}::test_far_keys_of_a_quantised_cache_are_the_quantised_ones",),
    ),
    Defect(
        "turned keys of a cropped cache are read as those of the tokens that follow",
        f"{_FOLDER}/forward_view.py",
        "            keys.count = min(keys.count, past)\n",
        "            pass\n",
        (f"{_CACHES}::test_cropped_and_copied_caches_go_on_exactly",),
    ),
    Defect(
        "turned keys stay with their old rows when a cache's rows are reordered",
        f"{_FOLDER}/forward_view.py",
        '        return PositionRecord(**{**vars(moved), "turned": {}})',
        '        return PositionRecord(**{**vars(moved), "turned": self.turned})',
        (f"{_CACHES}::test_reordered_rows_keep_their_keys",),
    ),
    Defect(
        "steps fail outside the inference mode that a prompt was read in",
        f"{_FOLDER}/forward_view.py",
        "            with torch.inference_mode(False):  # later forwards may write outside it\n"
        "                larger = self.buffer.new_empty(rows, heads, int(end * _GROWTH) + 64, width)\n",
        "            larger = self.buffer.new_empty(rows, heads, int(end * _GROWTH) + 64, width)\n",
        (f"{_CACHES}::test_steps_may_leave_the_inference_mode_of_the_prompt",),
    ),
    Defect(
        "each layer turns all far keys anew in every step",
        f"{_FOLDER}/parts.py",
        "        record.turned[slot, rotation] = kept\n",
        "",
        (f"{_CACHES}::test_each_key_is_turned_once_over_a_prompt_and_its_steps",),
    ),
    Defect(
        "turned keys of one region serve another one with other shifts",
        f"{_FOLDER}/parts.py",
        "    if kept is None or kept.rule != facts.key_rule or kept.buffer.dtype != key.dtype:",
        "    if kept is None or kept.buffer.dtype != key.dtype:",
        (
            f"{_WRITTEN_OUT}::test_prompts_chunks_and_steps_match_attention_written_out",
            f"{_CACHES}::test_cropped_and_copied_caches_go_on_exactly",
        ),
    ),
    Defect(
        "a map takes a cache of another rotation",
        f"{_FOLDER}/position_hooks.py",
        '        self.layout = ("position map", rotation_digest)',
        '        self.layout = ("position map",)',
        (f"{_CACHES}::test_caches_of_other_rotations_are_refused",),
    ),
    Defect(
        "a map refuses an empty cache that is said to be its own",
        f"{_FOLDER}/position_hooks.py",
        "        if not tokens:\n            return  # an empty cache needs no record\n",
        "",
        (f"{_CACHES}::test_accept_cache_takes_static_caches_and_empty_ones",),
    ),
    Defect(
        "an exported program of a map is that of the positions it was traced with",
        f"{_FOLDER}/position_hooks.py",
        "        if is_exporting():\n",
        "        if False:\n",
        (f"{_WRITTEN_OUT}::test_torch_export_is_refused_in_a_sentence",),
    ),
    Defect(
        "continuous batching under a map mixes the keys of requests",
        "rope_patch/patching/handle.py",
        "                refusal=position_map_refusal(plan.position_map) if plan.position_map else None,\n",
        "",
        ("tests/integrations/test_continuous_batching.py::test_position_maps_are_refused",),
    ),
    Defect(
        "a whole row under flash attention counts as packed, so a map goes without fused parts",
        "rope_patch/transformers_api/attention_functions.py",
        "    return None if bool((number == number[:, :1]).all()) else number\n",
        "    return number\n",
        (
            "tests/patching/position_maps/test_mapped_masks.py"
            "::test_a_whole_row_is_causal_under_flash_attention",
        ),
    ),
    Defect(
        "a map's fused parts leave out attention sinks",
        f"{_FOLDER}/parts.py",
        "        merged.add_sinks(sinks)\n",
        "        pass\n",
        (
            "tests/architectures/test_mapped_architectures.py"
            "::test_mapped_models_see_the_same_under_flash_attention",
        ),
    ),
]
