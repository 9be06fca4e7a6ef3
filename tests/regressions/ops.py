"""Defects of the ops: kernels, their launches and gradients, rounding, memory that is shared."""

from regressions.defect import Defect

_TESTS = "tests/ops"
_TRITON = f"{_TESTS}/triton_kernels"
_FOLDER = "rope_patch/ops"

DEFECTS = [
    # -- memory ------------------------------------------------------------------------------------
    Defect(
        "one launch writes queries over values that its other programs still read",
        f"{_FOLDER}/cache_write.py",
        "        and not _reads_what_it_writes(*inputs, out)\n",
        "",
        (f"{_TRITON}/test_cache_write_kernel.py::test_out_may_overlap_inputs",),
    ),
    Defect(
        "the write into a cache takes expanded memory",
        f"{_FOLDER}/validation.py",
        "        if written is not None and overlaps_itself(written):\n",
        "        if False:\n",
        (f"{_TRITON}/test_cache_write_kernel.py::test_expanded_memory_is_refused",),
    ),
    Defect(
        "trained norm weights get no gradient from the write into a cache, without a word",
        f"{_FOLDER}/cache_write.py",
        "x is not None and x.requires_grad for x in (*inputs, q_weight, k_weight)",
        "x is not None and x.requires_grad for x in inputs",
        (f"{_TRITON}/test_cache_write_kernel.py::test_weights_that_require_gradients_are_refused",),
    ),
    Defect(
        "ops in place rotate queries and keys that share memory",
        f"{_FOLDER}/dispatch.py",
        "    if overlaps_itself(q) or (k is not None and (overlaps_itself(k) or may_share_memory(q, k))):\n",
        "    if False:\n",
        (f"{_TRITON}/test_cache_write_kernel.py::test_inplace_refuses_memory_that_overlaps",),
    ),
    Defect(
        "slices of one product of queries, keys and values count as shared memory",
        f"{_FOLDER}/validation.py",
        "            if high_x - low_x <= shift and shift + high_y - low_y <= period:\n"
        "                return False\n",
        "            del shift\n",
        (f"{_TRITON}/test_cache_write_kernel.py::test_memory_is_shared_only_where_elements_are",),
    ),
    Defect(
        "tokens that do not fit into a cache are written behind it",
        f"{_FOLDER}/kernels/cache_write.py",
        "    written = tl.where(fits, K, 0)\n",
        "    written = K\n",
        (f"{_TRITON}/test_cache_write_kernel.py::test_tokens_past_the_end_touch_no_memory",),
    ),
    Defect(
        "caches of another dtype take the bits of queries' dtype",
        f"{_FOLDER}/cache_write.py",
        "        and key_cache.dtype == value_cache.dtype == dtype\n",
        "",
        (
            f"{_TRITON}/test_cache_write_kernel.py::test_other_dtypes_of_caches_are_written_after_the_rotation",
        ),
    ),
    Defect(
        "keys that are given twice are re-rotated once",
        f"{_FOLDER}/kernels/rerotate.py",
        "        kind = (count, keys.shape, keys.stride(), keys.dtype, keys.device)\n",
        "        kind = (keys.shape, keys.stride(), keys.dtype, keys.device)\n",
        (f"{_TRITON}/test_rerotation_kernel.py::test_keys_that_are_given_twice_are_rotated_twice",),
    ),
    Defect(
        "a captured graph keeps the address of a table of layers that is gone",
        f"{_FOLDER}/kernels/rerotate.py",
        "    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():\n",
        "    if False:\n",
        (f"{_TRITON}/test_rerotation_kernel.py::test_captured_graphs_need_no_table",),
    ),
    # -- gradients ---------------------------------------------------------------------------------
    Defect(
        "a gradient penalty on a loss that is linear in the output is dropped",
        f"{_FOLDER}/modes.py",
        "    if torch.is_grad_enabled():\n        raise RuntimeError(\n",
        "    if False:\n        raise RuntimeError(\n",
        (f"{_TRITON}/test_kernel_autograd.py::test_second_derivatives_are_an_error",),
    ),
    Defect(
        "autograd does not see that keys were re-rotated in place",
        f"{_FOLDER}/dispatch.py",
        "        torch.autograd.graph.increment_version(group)  # as any in-place operation does\n",
        "",
        (f"{_TRITON}/test_rerotation_kernel.py::test_autograd_detects_every_changed_layer",),
    ),
    Defect(
        "gradients of the norm are recomputed from rounded outputs whose weights differ widely",
        f"{_FOLDER}/output_inversion.py",
        "    return _has_even_pairs(q_weight, *settings) and _has_even_pairs(k_weight, *settings)\n",
        "    return True\n",
        (f"{_TRITON}/test_norm_recomputation.py::test_uneven_weights_save_the_input",),
    ),
    Defect(
        "gradients have the memory layout of what comes back, and projections copy them",
        f"{_FOLDER}/kernels/rope.py",
        "        keeps = not inplace and layouts == (None, None)\n",
        "        keeps = False\n",
        (f"{_TRITON}/test_kernel_autograd.py::test_gradients_have_the_layout_of_queries_and_keys",),
    ),
    Defect(
        "the backward rotation of a graph turns forwards",
        f"{_FOLDER}/kernels/rope.py",
        "    ctx.save_for_backward(positions, packed_freqs, sections)\n"
        "    ctx.settings = (interleaved, heads_dim, not conjugate)\n\n\ndef _rope_backward",
        "    ctx.save_for_backward(positions, packed_freqs, sections)\n"
        "    ctx.settings = (interleaved, heads_dim, conjugate)\n\n\ndef _rope_backward",
        (
            f"{_TRITON}/test_custom_ops.py::test_operators_match_the_functions",
            f"{_TRITON}/test_custom_ops.py::test_gradients_if_one_output_is_unused",
        ),
    ),
    # -- rounding and angles -----------------------------------------------------------------------
    Defect(
        "stochastic rounding turns a NaN of all ones into -0",
        f"{_FOLDER}/reference.py",
        "    return torch.where(x.isnan(), x, rounded).to(dtype)\n",
        "    return rounded.to(dtype)\n",
        (f"{_TRITON}/test_rerotation_kernel.py::test_rounding_keeps_every_nan",),
    ),
    Defect(
        "Triton's stochastic rounding turns a NaN of all ones into -0",
        f"{_FOLDER}/kernels/tile.py",
        "    return tl.where(x != x, x, rounded)\n",
        "    return rounded\n",
        (f"{_TRITON}/test_rerotation_kernel.py::test_rounding_keeps_every_nan",),
    ),
    Defect(
        "keys in 16 bits drift over many re-rotations, as each is rounded to the nearest",
        f"{_FOLDER}/reference.py",
        "    spare = _SPARE_BITS.get(dtype)\n",
        "    spare = None\n",
        (f"{_TESTS}/test_reference.py::test_16_exact_rerotations_err_less_than_six_rotations",),
    ),
    Defect(
        "far positions are rotated by angles that float32 rounds",
        f"{_FOLDER}/angles.py",
        "    phase = pair_positions * rows[..., :-1]\n",
        "    phase = (pair_positions.float() * rows[..., :-1].float()).to(torch.int64)\n",
        (f"{_TESTS}/test_angles.py::test_angles_are_exact_at_any_position",),
    ),
    Defect(
        "packed frequencies lose their low bits",
        f"{_FOLDER}/angles.py",
        "    rest = (high - whole + x * _UNITS_PER_RADIAN_LOW).round().to(torch.int64)\n",
        "    rest = (high - whole).round().to(torch.int64)\n",
        (
            f"{_TESTS}/test_angles.py::test_packed_frequencies_are_integers_of_2_to_the_minus_64_rotations",
        ),
    ),
    Defect(
        "re-rotation leaves the old attention factor in the keys",
        f"{_FOLDER}/angles.py",
        "    bits = (factors[1] / factors[0]).view(torch.int32).to(torch.int64)\n",
        "    bits = factors[1].view(torch.int32).to(torch.int64)\n",
        (f"{_TESTS}/test_angles.py::test_rerotation_frequencies_lead_from_old_to_new",),
    ),
    Defect(
        "angles that transformers rounded are re-rotated by exact ones",
        f"{_FOLDER}/reference.py",
        "        angle = (tokens * new_freqs).to(wide) - (tokens * old_freqs).to(wide)\n",
        "        angle = tokens.to(wide) * (new_freqs.to(wide) - old_freqs.to(wide))\n",
        (f"{_TESTS}/test_reference.py::test_rerotation_cancels_transformers_float32_angles",),
    ),
    Defect(
        "a wide rotation on a CPU in 16 bits rounds each product",
        f"{_FOLDER}/plain_torch.py",
        "    if layout.wide:\n        cos, sin = _upcast(cos), _upcast(sin)\n",
        "",
        (f"{_TESTS}/test_cpu.py::test_16_bit_results_are_rounded_once",),
    ),
    Defect(
        "a small rotation on a CPU computes in float32 where transformers rounds each product",
        f"{_FOLDER}/plain_torch.py",
        "    wide = _upcast(wide) if layout.wide else wide\n",
        "    wide = _upcast(wide)\n",
        (
            "tests/patching/test_short_text_bits.py::test_short_texts_keep_the_bits_of_the_plain_model",
        ),
    ),
    # -- launches ----------------------------------------------------------------------------------
    Defect(
        "a launch for aligned memory is taken again for memory that is not",
        f"{_FOLDER}/kernels/launcher.py",
        "        elif launch is None or address_bits & 15:\n",
        "        elif launch is None:\n",
        (f"{_TRITON}/test_launcher.py::test_unaligned_memory_never_reuses_a_launch",),
    ),
    Defect(
        "hooks of Triton miss the launches of compiled kernels",
        f"{_FOLDER}/kernels/launcher.py",
        "        if _has_calls(hooks.launch_enter_hook) or _has_calls(hooks.launch_exit_hook):\n",
        "        if False:\n",
        (f"{_TRITON}/test_launcher.py::test_hooks_of_triton_get_launches",),
    ),
    Defect(
        "rows of positions that are broadcast are read as rows of their own",
        f"{_FOLDER}/kernels/launcher.py",
        "    steps = [0 if size == 1 else s for size, s in zip(positions.shape, positions.stride())]  # noqa: B905\n",
        "    steps = positions.stride()\n",
        (f"{_TRITON}/test_kernel_values.py::test_kinds_of_positions_and_frequencies",),
    ),
    Defect(
        "tensors on two devices are rotated",
        f"{_FOLDER}/validation.py",
        "        if x is not None and x.device != q.device:\n",
        "        if False:\n",
        (f"{_TESTS}/test_dispatch.py::test_tensors_on_another_device_are_an_error",),
    ),
    Defect(
        "8-bit floats are rotated as if they were numbers of 16",
        f"{_FOLDER}/validation.py",
        "        if x is not None and x.dtype not in _FLOATS:\n",
        "        if False:\n",
        (f"{_TESTS}/test_dispatch.py::test_8_bit_floats_are_an_error",),
    ),
    Defect(
        "demanded kernels run within forward-mode AD and lose its tangents",
        f"{_FOLDER}/dispatch.py",
        "    if not torch.compiler.is_compiling() and needs_plain_torch():\n",
        "    if False:\n",
        (f"{_TESTS}/test_dispatch.py::test_demanded_kernels_refuse_transforms",),
    ),
    Defect(
        "wrong numbers of a kernel at its first use are taken",
        f"{_FOLDER}/self_check.py",
        "            if problem is None:\n",
        "            if True:\n",
        (
            f"{_TRITON}/test_self_check.py::test_rotation_falls_back",
            f"{_TRITON}/test_self_check.py::test_wrong_rerotation_falls_back",
        ),
    ),
    Defect(
        "lack of memory at a kernel's first use counts as a verdict against it",
        f"{_FOLDER}/self_check.py",
        "        except torch.OutOfMemoryError as error:\n            raise _CannotCheckNow from error\n",
        "",
        (f"{_TRITON}/test_self_check.py::test_lack_of_memory_is_no_verdict",),
    ),
]
