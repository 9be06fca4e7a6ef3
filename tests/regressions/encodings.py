"""Defects of encodings other than rotation: tables, biases, buckets, and `encode`."""

from regressions.defect import Defect

_TESTS = "tests/patching"
_SITES = "rope_patch/encodings/sites"
_ENCODE = "rope_patch/encodings/replacement"

DEFECTS = [
    Defect(
        "a bias of `encode` reaches the choice of sparse attention",
        "rope_patch/patching/architecture/attention_source.py",
        """        elif ast.unparse(call.func).startswith("self.") and _mentions(call, MASK):
            return False  # self.indexer(..., attention_mask, ...)
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and _assigns(node, MASK)]
    changes = [node for node in nodes if _is_name(node, MASK) and isinstance(node.ctx, ast.Store)]
    if len(changes) > len(assigned):  # another statement changes it, such as +=
        return False
    given += [node.value for node in assigned]
""",
        "",
        ("tests/encodings/replacement/test_other_decoders.py",),
    ),
    Defect(
        "a bias of `encode` hides every key of Doge, whose attention makes a mask from it",
        f"{_ENCODE}/entry_point.py",
        "    if others := sorted(each.__name__ for each in classes if not hands_mask_on(each)):\n",
        "    if others := []:\n",
        (
            "tests/encodings/replacement/test_other_decoders.py::test_attentions_that_a_bias_cannot_reach_are_refused",
        ),
    ),
    Defect(
        "`encode` counts the heads that Laguna's config says, and its layers have others",
        f"{_ENCODE}/entry_point.py",
        "    return {decoder.config.num_attention_heads} if None in heads else heads\n",
        "    return {decoder.config.num_attention_heads}\n",
        (
            "tests/encodings/replacement/test_other_decoders.py::test_heads_are_those_of_the_attentions",
        ),
    ),
    Defect(
        "layers without rotation are given one to switch off",
        f"{_ENCODE}/hooks.py",
        "        if rotation is not None and not self.encoding.rotates(self.index):\n",
        "        if not self.encoding.rotates(self.index):\n",
        ("tests/encodings/replacement/test_other_decoders.py::test_chunks_equal_one_pass",),
    ),
    Defect(
        "a bias makes attention causal that is not",
        f"{_ENCODE}/hooks.py",
        "                self._require_causality(attention, implementation, kwargs)\n",
        "",
        (
            "tests/encodings/replacement/test_other_decoders.py::test_attention_to_later_tokens_is_refused_under_a_bias",
        ),
    ),
    Defect(
        "flex attention counts padding as tokens for encodings that follow the text",
        f"{_ENCODE}/encoding.py",
        "            visible = self._last_row_of_blocks()\n",
        "            return self.queries[-1] + 1\n",
        (
            "tests/encodings/replacement/test_encoded_extension.py::test_flex_attention_counts_tokens_and_no_padding",
        ),
    ),
    Defect(
        "encoded biases that follow the text count padding as tokens",
        f"{_ENCODE}/encoding.py",
        "        if self.mask is None:\n            return self.queries[-1] + 1\n",
        "        if self.mask is None or True:\n            return self.queries[-1] + 1\n",
        (
            "tests/encodings/replacement/test_encoded_extension.py::test_dynamic_extensions_count_tokens_and_no_padding",
        ),
    ),
    Defect(
        "T5's buckets follow the slots of a padded row, not its tokens",
        f"{_SITES}/buckets.py",
        "        if stretch.is_dynamic and self.is_given_mask:\n",
        "        if False:\n",
        (
            "tests/encodings/sites/test_t5_buckets.py::test_dynamic_t5_counts_tokens_and_no_padding",
            "tests/encodings/sites/test_t5_buckets.py::test_dynamic_t5_follows_the_tokens_in_a_static_cache",
        ),
    ),
    Defect(
        "keys ahead of a query in a static cache count as distances of T5's decoder",
        f"{_SITES}/buckets.py",
        "            relative_position = relative_position.clamp(max=0)\n",
        "            pass\n",
        ("tests/encodings/sites/test_t5_buckets.py",),
    ),
    Defect(
        "FIRE takes slots for positions where layers are given none",
        f"{_ENCODE}/biases.py",
        "        if span.positions is None:  # slots are no positions where rows are padded\n            raise Refused(\n",
        "        if span.positions is None:\n"
        "            span = Span(span.queries, span.keys, span.queries[None], span.mask)\n"
        "        if False:\n            raise Refused(\n",
        (
            "tests/encodings/replacement/test_other_decoders.py::test_what_layers_are_given_otherwise_is_refused",
        ),
    ),
    Defect(
        "a row of padding alone becomes NaN under a bias in half precision",
        f"{_ENCODE}/hooks.py",
        "    return sums.clamp(min=lowest).to(dtype)\n",
        "    return sums.to(dtype)\n",
        (
            "tests/encodings/replacement/test_caches_and_padding.py::test_masks_stop_at_the_lowest_number",
        ),
    ),
    Defect(
        "a checkpointed layer reads the bias of another forward when it runs again",
        f"{_ENCODE}/hooks.py",
        '        alone = self.layer.training and getattr(self.layer, "gradient_checkpointing", False)\n',
        "        alone = False\n",
        (
            "tests/encodings/replacement/test_caches_and_padding.py::test_checkpointed_layers_give_the_same_gradients",
        ),
    ),
    Defect(
        "distances begin anew behind a window that has moved in the cache",
        f"{_ENCODE}/hooks.py",
        "            torch.arange(self.keys, device=device) + self.first_key,\n",
        "            torch.arange(self.keys, device=device),\n",
        (
            "tests/encodings/replacement/test_caches_and_padding.py::test_windows_see_the_same_under_all_caches",
        ),
    ),
    Defect(
        "xpos scales the keys of a cache anew in each step",
        f"{_ENCODE}/rotations.py",
        "        key = self._scaled(key, middle - keys, 1.0)\n",
        "        key.copy_(self._scaled(key, middle - keys, 1.0))\n",
        (
            "tests/encodings/replacement/test_caches_and_padding.py::test_cached_steps_equal_one_pass",
        ),
    ),
    Defect(
        "partial RoPE turns pairs by the frequencies of a whole head",
        f"{_ENCODE}/rotations.py",
        "            theta = theta if self.partial is None else theta ** (1 / share)\n",
        "",
        ("tests/encodings/replacement/test_encode.py::test_equals_a_written_out_decoder",),
    ),
    Defect(
        "a learned table of `encode` reads rows behind its end",
        f"{_ENCODE}/tables.py",
        "        if last >= rows:\n",
        "        if False:\n",
        ("tests/encodings/replacement/test_encode.py::test_learned_rows_end",),
    ),
    Defect(
        "undoing an encoding leaves the patch on it behind",
        f"{_ENCODE}/entry_point.py",
        "        if self.active and (patch := current(self.model)) is not None:\n",
        "        if False:\n",
        (
            "tests/encodings/replacement/test_encode.py::test_a_patched_encoding_is_not_undone_before_its_patch",
        ),
    ),
    Defect(
        "an encoding that does not fit takes the one before it along",
        f"{_ENCODE}/entry_point.py",
        "        if before is not None:\n            before.apply()\n        raise\n",
        "        raise\n",
        (
            "tests/encodings/replacement/test_encode.py::test_an_encoding_that_does_not_fit_leaves_the_first",
        ),
    ),
    Defect(
        "continuous batching measures the distances of an encoding across requests",
        f"{_ENCODE}/entry_point.py",
        '            refusal = f"the encoding {encoding.name!r}" if encoding.reads_slots else None\n',
        "            refusal = None\n",
        (
            "tests/integrations/test_continuous_batching.py::test_encodings_that_read_slots_are_refused",
        ),
    ),
    Defect(
        "continuous batching counts a patched bias by slots",
        f"{_SITES}/handle.py",
        "                refusal=slots_refusal(reading.kind) if reading else None,\n",
        "",
        ("tests/integrations/test_continuous_batching.py::test_patched_biases_are_refused",),
    ),
    Defect(
        "a cache goes on under a table of other positions",
        f"{_SITES}/table.py",
        "            undo_log.hook(decoder, before=guard.check, after=guard.mark)\n",
        "            pass\n",
        ("tests/encodings/sites/test_position_tables.py::test_caches_belong_to_one_table",),
    ),
    Defect(
        "a table that grows by itself adds rows that are not stretched",
        f"{_SITES}/table.py",
        '        if hasattr(self.module, "make_weights"):\n',
        "        if False:\n",
        (
            "tests/encodings/sites/test_position_tables.py::test_tables_that_grow_by_themselves_stay_stretched",
        ),
    ),
    Defect(
        "a stretched table is resized to an unstretched one",
        f"{_SITES}/table.py",
        "            if callable(getattr(module, _RESIZE, None)):\n",
        "            if False:\n",
        ("tests/encodings/sites/test_position_tables.py::test_a_stretched_table_is_not_resized",),
    ),
    Defect(
        "ALiBi's distances blur in half precision",
        f"{_SITES}/slopes.py",
        "        exact = bias.dtype in _HALF or is_folded if stretch.exact is None else stretch.exact\n",
        "        exact = is_folded if stretch.exact is None else stretch.exact\n",
        (
            "tests/encodings/sites/test_alibi.py::test_half_precision_gets_distances_rounded_once",
            "tests/encodings/sites/test_alibi.py::test_bfloat16_comes_closer_to_float64",
        ),
    ),
    Defect(
        "dynamic slopes count the empty slots of a static cache",
        f"{_SITES}/slopes.py",
        "            tokens = torch.tensor(keys) if key_mask is None else key_mask.tokens\n",
        "            tokens = torch.tensor(keys)\n",
        (
            "tests/encodings/sites/test_alibi.py::test_dynamic_slopes_follow_the_tokens_in_a_static_cache",
        ),
    ),
]
