"""Defects of methods, geometry and what is read from a config."""

from regressions.defect import Defect

_TESTS = "tests/methods"
_FOLDER = "rope_patch/methods"
_REFUSALS = "tests/patching/test_refusals.py"

DEFECTS = [
    Defect(
        "dynamic counts as native with a growth in steps, which transformers does not have",
        f"{_FOLDER}/dynamic.py",
        '        return super().is_native and self.growth == "exact"  # as transformers\' own grows\n',
        "        return super().is_native\n",
        (
            "tests/pretrained/test_saving.py::test_dynamic_is_native_where_one_pass_of_any_length_is_equal",
        ),
    ),
    Defect(
        "a mixed method with an attention factor is saved for short texts, too",
        f"{_FOLDER}/mixed.py",
        "        return super().has_config_form and not self.scales_attention()\n",
        "        return super().has_config_form\n",
        (f"{_TESTS}/test_mixed.py::test_only_attention_factor_1_has_a_native_form",),
    ),
    Defect(
        "rounding of a logarithm puts a length at the end of a step into the next one",
        f"{_FOLDER}/growth.py",
        "        while _step_length(step - 1, trained_length) >= length:\n            step -= 1\n",
        "",
        (f"{_TESTS}/test_dynamic.py::test_growth_step_includes_its_end",),
    ),
    Defect(
        "dynamic's factor is multiplied by the ratio without transformers' second term",
        f"{_FOLDER}/dynamic.py",
        "        return self.factor * ratio - (self.factor - 1)\n",
        "        return self.factor * ratio\n",
        (f"{_TESTS}/test_dynamic.py::test_factor_of_dynamic_ntk_matches_transformers_formula",),
    ),
    Defect(
        "mscale without mscale_all_dim changes yarn's attention factor",
        f"{_FOLDER}/yarn.py",
        "        if self.mscale and self.mscale_all_dim:  # as in transformers, both must be nonzero\n",
        "        if self.mscale and not self.mscale_all_dim:\n"
        "            return yarn_mscale(self.factor, self.mscale)\n"
        "        if self.mscale and self.mscale_all_dim:\n",
        (f"{_TESTS}/test_options.py::test_yarn_mscale_without_mscale_all_dim_changes_nothing",),
    ),
    Defect(
        "yarn's ramp is clamped to the pairs instead of the rotary width, as no implementation does",
        f"{_FOLDER}/ntk_by_parts.py",
        "        low, high = max(low, 0), min(high, geometry.rotary_dim - 1)\n",
        "        low, high = max(low, 0), min(high, geometry.rotary_dim // 2 - 1)\n",
        (f"{_TESTS}/test_golden.py",),
    ),
    Defect(
        "truncate is written where transformers reads it from the wrong level",
        f"{_FOLDER}/ntk_by_parts.py",
        "        if not self.truncate and geometry.layer_type is not None:\n"
        "            return super().rope_parameters(geometry)\n",
        "",
        (
            "tests/patching/architecture/test_families.py::test_patched_config_builds_the_same_model[gemma3-yarn-truncate]",
        ),
    ),
    Defect(
        "yarn with beta_slow at or above beta_fast is patched",
        f"{_FOLDER}/ntk_by_parts.py",
        "        if not 0 < self.beta_slow < self.beta_fast:\n",
        "        if not 0 < self.beta_slow:\n",
        (f"{_TESTS}/test_options.py::test_options_out_of_range_are_refused",),
    ),
    Defect(
        "a config's llama3 with low_freq_factor at or above high_freq_factor is patched and exported",
        "rope_patch/rope_config.py",
        "        if not low < high:\n",
        "        if False:\n",
        (
            f"{_REFUSALS}::test_exports_of_impossible_configs_are_refused",
            f"{_REFUSALS}::test_bad_config_of_a_live_model_is_refused",
        ),
    ),
    Defect(
        "a config that names two scalings is read by the first",
        "rope_patch/rope_config.py",
        "    if len({str(name) for name in names}) > 1:\n",
        "    if False:\n",
        (
            f"{_REFUSALS}::test_bad_config_of_a_folder_is_refused",
            f"{_REFUSALS}::test_unknown_rope_type_is_refused",
            f"{_REFUSALS}::test_bad_config_of_a_live_model_is_refused",
        ),
    ),
    Defect(
        "log-n is taken for a trained length whose logarithm is 0",
        f"{_FOLDER}/temperature.py",
        '        if self.kind == "log-n" and trained_length < 2:\n',
        "        if False:\n",
        (f"{_REFUSALS}::test_bad_requests_change_nothing",),
    ),
    Defect(
        "a rotary width of 0 is read as the whole head",
        "rope_patch/geometry.py",
        "        if self.rotary_dim == _WHOLE_HEAD:\n",
        "        if self.rotary_dim in (_WHOLE_HEAD, 0):\n",
        (f"{_TESTS}/test_options.py::test_no_rotary_dimensions_are_not_the_whole_head",),
    ),
    Defect(
        "another base replaces a scaled rotation instead of stretching it",
        "rope_patch/geometry.py",
        "            else inv_freq * (self.unscaled_inv_freq(theta) / self.unscaled_inv_freq())\n",
        "            else self.unscaled_inv_freq(theta)\n",
        (
            f"{_TESTS}/test_options.py::test_another_base_stretches_a_scaled_rotation_as_an_unscaled_one",
        ),
    ),
    Defect(
        "yarn's ramp on a scaled rotation is that of the unscaled wavelengths",
        "rope_patch/geometry.py",
        "        if not self.base:\n            return -target / step\n",
        "        if True:\n            return -target / step\n",
        ("tests/patching/test_start_option.py::test_yarns_ramp_uses_the_running_wavelengths",),
    ),
    Defect(
        "a temperature's factor of Llama 4 rises within the trained length",
        f"{_FOLDER}/temperature.py",
        '            periods = torch.div(positions, trained_length, rounding_mode="floor")\n',
        "            periods = positions / trained_length\n",
        (f"{_TESTS}/test_temperature.py::test_factors_are_exactly_1_up_to_the_trained_length",),
    ),
    Defect(
        "LongRoPE without short factors stretches short texts",
        f"{_FOLDER}/longrope.py",
        "        is_long = length > trained_length or short == self.long_factor\n",
        "        is_long = length > trained_length or self.short_factor is None\n",
        (
            f"{_TESTS}/test_dynamic.py::test_static_methods_are_valid_forever_and_longrope_up_to_the_trained_length",
        ),
    ),
    Defect(
        "LongRoPE refuses start tokens that are a whole float, or takes a part of one",
        f"{_FOLDER}/longrope.py",
        "        if self.start_tokens < 0 or self.start_tokens != int(self.start_tokens):\n",
        "        if self.start_tokens < 0:\n",
        (
            "tests/patching/test_start_tokens.py::test_start_tokens_must_be_a_whole_number_within_the_trained_length",
        ),
    ),
    Defect(
        "Self-Extend shifts by w - w/G, so that steps disagree with prompts unless G divides w",
        f"{_FOLDER}/self_extend.py",
        "        return window - window // group\n",
        "        return round(window - window / group)\n",
        (
            f"{_TESTS}/position_maps/test_map_properties.py::test_each_query_and_key_follow_the_paper",
        ),
    ),
    Defect(
        "STRING counts the distance of its offset twice",
        f"{_FOLDER}/string_map.py",
        "        near = near_region(queries, offset)\n",
        "        near = near_region(queries, offset + 1)\n",
        (f"{_TESTS}/position_maps/test_golden_maps.py::test_relative_positions_match",),
    ),
    Defect(
        "the longest text of groups is counted without the floor of the window",
        f"{_FOLDER}/position_map.py",
        "    return (reach - window + window // group) * group\n",
        "    return (reach - window) * group + window\n",
        (
            f"{_TESTS}/position_maps/test_map_properties.py::test_no_relative_position_leaves_the_reach",
        ),
    ),
    Defect(
        "queries ahead of a map's start lose their far keys",
        f"{_FOLDER}/position_map.py",
        "            start=torch.where(plain, 0, near.start),\n",
        "            start=near.start,\n",
        (
            f"{_TESTS}/position_maps/test_map_properties.py::test_queries_before_the_map_keep_their_distances",
        ),
    ),
    Defect(
        "frequencies that follow the length are put below a map",
        f"{_FOLDER}/position_map.py",
        "        if method.is_length_dependent(1) or method.start_token_count:\n",
        "        if False:\n",
        (f"{_TESTS}/position_maps/test_map_options.py::test_options_of_maps_are_refused",),
    ),
    Defect(
        "a map's own temperature multiplies that of the yarn below it",
        f"{_FOLDER}/position_map.py",
        '            default = "none" if self._has_inner_temperature() else self.default_temperature\n',
        "            default = self.default_temperature\n",
        (f"{_TESTS}/position_maps/test_map_options.py",),
    ),
    Defect(
        "a length that a map cannot reach is planned for all the same",
        "rope_patch/patching/plan.py",
        "    if requested is not None and requested > longest:\n",
        "    if False:\n",
        (
            "tests/patching/position_maps/test_mapped_attention.py::"
            "test_texts_that_a_map_cannot_reach_are_refused",
        ),
    ),
    Defect(
        "a method of another class takes a registered name",
        f"{_FOLDER}/registry.py",
        "        if other is not None and not _same_class(other, cls):\n",
        "        if False:\n",
        (
            f"{_TESTS}/test_registry.py::test_a_name_of_another_class_is_refused_and_the_first_one_stays",
        ),
    ),
    Defect(
        "processes that start later do not know the methods of a plugin",
        f"{_FOLDER}/origin.py",
        "    pass_on(source)\n",
        "",
        (f"{_TESTS}/test_plugins.py::test_processes_started_later_know_the_method",),
    ),
    Defect(
        "dpe's smallest group decides how long a text may be",
        "rope_patch/methods/dpe.py",
        "return longest_grouped_text(reach, window, max(self.groups))",
        "return longest_grouped_text(reach, window, min(self.groups))",
        (
            "tests/methods/position_maps/test_map_properties.py"
            "::test_the_longest_text_could_not_be_longer",
        ),
    ),
    Defect(
        "a method's package is unknown where it was installed after another was asked for",
        f"{_FOLDER}/origin.py",
        "    for name in _installed_packages(changes).get(module, ()):\n",
        "    for name in _installed_packages(()).get(module, ()):\n",
        (f"{_TESTS}/test_plugins.py::test_a_module_gives_its_methods",),
    ),
]
