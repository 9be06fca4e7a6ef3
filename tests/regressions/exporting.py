"""Defects of exports: what engines read, and lines that they would read otherwise."""

from regressions.defect import Defect

_SPECIAL = "tests/exporting/test_special_exports.py"
_FIELDS = "tests/exporting/test_engine_fields.py"

DEFECTS = [
    Defect(
        "scalings are printed for SGLang's models that never read them",
        "rope_patch/exporting/sglang.py",
        "        if target.model_type not in _GEMMA4:\n            require_fields_are_read(target, NAME)\n",
        "",
        (f"{_FIELDS}::test_sglang_refuses_scalings_that_its_model_file_drops",),
    ),
    Defect(
        "fields are printed for vLLM's models that take their theta from elsewhere",
        "rope_patch/exporting/vllm.py",
        "    require_fields_are_read(target, NAME)\n",
        "",
        (f"{_FIELDS}::test_what_no_field_reaches_is_refused",),
    ),
    Defect(
        "a model file that reads a theta alone is given a scaling",
        "rope_patch/exporting/engine_fields.py",
        '    if reads == "theta" and any(',
        '    if reads == "nothing" and any(',
        (f"{_FIELDS}::test_sglang_refuses_scalings_that_its_model_file_drops",),
    ),
    Defect(
        "scalings that transformers 4 ignores are exported to it",
        "rope_patch/exporting/transformers.py",
        "    require_fields_are_read(target, NAME_V4)\n",
        "",
        (f"{_FIELDS}::test_transformers_4_refuses_what_its_models_ignore",),
    ),
    Defect(
        "GPT-NeoX gets rope_theta in transformers 4, which reads rotary_emb_base",
        "rope_patch/exporting/transformers.py",
        "    names = _OUTER_NAMES.get(target.model_type, {})\n",
        "    names = {}\n",
        (f"{_FIELDS}::test_gpt_neox_has_its_own_names_in_transformers_4",),
    ),
    Defect(
        "OLMo gets more than two fields in transformers 4, which refuses them",
        "rope_patch/exporting/transformers.py",
        '        parameters = {"type": "linear", "factor": parameters["factor"]}\n',
        "        pass\n",
        (f"{_FIELDS}::test_transformers_4_refuses_what_its_models_ignore",),
    ),
    Defect(
        "Mixtral lacks the head_dim that transformers 4 multiplies by",
        "rope_patch/exporting/transformers.py",
        "    if target.model_type in _NEEDS_HEAD_DIM:\n",
        "    if False:\n",
        (f"{_FIELDS}::test_transformers_4_gets_the_head_dim_that_its_config_lacks",),
    ),
    Defect(
        "fields are printed for llama.cpp's converter, which writes none for Gemma",
        "rope_patch/exporting/llama_cpp.py",
        '    return reads != "flags"\n',
        "    return True\n",
        (f"{_FIELDS}::test_llama_cpps_converter_writes_no_rotation_for_gemma",),
    ),
    Defect(
        "architectures without a graph of llama.cpp's that rotates by the file are exported",
        "rope_patch/exporting/llama_cpp.py",
        "    require_fields_are_read(target, NAME)\n",
        "",
        (f"{_FIELDS}::test_what_no_field_reaches_is_refused",),
    ),
    Defect(
        "the plugin for vLLM is printed where vLLM runs transformers' own model",
        "rope_patch/exporting/vllm_plugin.py",
        """    if (reads := what_engine_reads(target, "vllm")) != "scaling":\n""",
        """    if (reads := what_engine_reads(target, "vllm")) is None:\n""",
        (f"{_FIELDS}::test_the_plugin_is_refused_where_vllm_runs_transformers_own_model",),
    ),
    Defect(
        "YaRN's attention factor has one of vLLM's two names, which older releases do not read",
        "rope_patch/exporting/vllm.py",
        '    fields |= {"attention_factor": factor, "attn_factor": factor / yarn_mscale(fields["factor"])}\n',
        '    fields |= {"attention_factor": factor}\n',
        (f"{_SPECIAL}::test_an_attention_factor_is_plain_yarn_for_vllm",),
    ),
    Defect(
        "YaRN is printed for vLLM beyond the length that its tables have",
        "rope_patch/exporting/vllm.py",
        "        if length <= table_length:\n            return _yarn",
        "        if True:\n            return _yarn",
        (
            "tests/evaluation/test_vllm_commands.py::TestOverrides::test_yarn_becomes_longrope_beyond_the_length_that_vllm_supports",
        ),
    ),
    Defect(
        "fields of the checkpoint's YaRN stay where vLLM merges a nested config",
        "rope_patch/exporting/vllm.py",
        "    fields = {**(_YARN_DEFAULTS if is_merged else {}), **parameters}\n",
        "    fields = dict(parameters)\n",
        (f"{_SPECIAL}::TestNested::test_vllms_merge_leaves_no_old_fields",),
    ),
    Defect(
        "DeepSeek-V4 gets a new theta under a name that vLLM ignores",
        "rope_patch/exporting/vllm.py",
        "        fields |= deepseek_v4.changed_thetas(target)\n",
        "        pass\n",
        (f"{_SPECIAL}::TestDeepseekV4::test_engines_rotate_as_the_patched_model",),
    ),
    Defect(
        "DeepSeek-V4 gets an attention factor that engines leave out",
        "rope_patch/exporting/deepseek_v4.py",
        "        and rotation.attention_factor == 1\n",
        "",
        (f"{_SPECIAL}::TestDeepseekV4::test_what_engines_would_read_otherwise_is_refused",),
    ),
    Defect(
        "DeepSeek-V4 gets fields that SGLang does not find, nested as transformers nests them",
        "rope_patch/exporting/sglang.py",
        "    if target.model_type == deepseek_v4.MODEL_TYPE:\n        all_parameters",
        "    if False:\n        all_parameters",
        (f"{_SPECIAL}::TestDeepseekV4::test_engines_rotate_as_the_patched_model",),
    ),
    Defect(
        "latent attention gets a scaling that engines take for YaRN",
        "rope_patch/exporting/target.py",
        '        rotation.scaling == "yarn" and is_deepseek and parameters.get("truncate", True)\n',
        "        True\n",
        (f"{_SPECIAL}::TestLatentAttention::test_other_scalings_are_refused",),
    ),
    Defect(
        "files of mlx-lm that read rope_parameters get the old fields alone",
        "rope_patch/exporting/mlx.py",
        "    if reads_rope_parameters(target, engine):\n",
        "    if False:\n",
        (f"{_FIELDS}::test_mlx_gets_rope_parameters_where_its_files_read_them",),
    ),
    Defect(
        "per-pair factors are printed for models that rotate neighbours, of which engines rotate halves",
        "rope_patch/exporting/vllm.py",
        "    if not target.is_half_layout:\n",
        "    if False:\n",
        (f"{_SPECIAL}::test_interleaved_pairs_refuse_per_pair_factors_or_take_the_plugin",),
    ),
    Defect(
        "SGLang ignores an attention factor of YaRN that is not the paper's",
        "rope_patch/exporting/sglang.py",
        '        parameters["attn_factor"] = rotation.attention_factor / default_factor\n',
        "",
        (
            "tests/exporting/test_exporting.py::test_engines_have_the_patched_rotation_or_are_refused",
        ),
    ),
    Defect(
        "SGLang's longrope reads a wrong row of its table at the original length",
        "rope_patch/exporting/sglang.py",
        '        "original_max_position_embeddings": target.length,\n        "short_mscale"',
        '        "short_mscale"',
        (
            "tests/exporting/test_exporting.py::test_engines_have_the_patched_rotation_or_are_refused",
        ),
    ),
    Defect(
        "SGLang's YaRN keeps the mscale of the checkpoint beside its own factor",
        "rope_patch/exporting/sglang.py",
        "        if key in checkpoint_parameters:\n            parameters[key] = None\n",
        "",
        (f"{_SPECIAL}::test_replaced_yarn_leaves_no_fields",),
    ),
    Defect(
        "flags reach a llama.cpp file's windows, which rotate alike",
        "rope_patch/exporting/llama_cpp.py",
        "    if not target.layers_differ and target.has_windows:\n        return None\n",
        "",
        (f"{_FIELDS}::test_windows_that_take_the_files_scaling_have_fields_alone",),
    ),
    Defect(
        "stretches are put into a file of Qwen, which llama.cpp then cannot load",
        "rope_patch/exporting/llama_cpp.py",
        'if file_architecture(target) != "llama" or target.model_type not in _STRETCH_TYPES:',
        'if "gpt_oss" in target.model_type or "gemma" in target.model_type:',
        (f"{_SPECIAL}::TestPerPairFactorsForLlamaCpp::test_other_architectures_are_refused",),
    ),
    Defect(
        "YaRN without truncation is exported to llama.cpp, which truncates always",
        "rope_patch/exporting/llama_cpp.py",
        '    return rotation.scaling == "yarn" and not rotation.parameters.get("truncate", True)\n',
        "    return False\n",
        (
            "tests/exporting/test_exporting.py::test_engines_have_the_patched_rotation_or_are_refused",
        ),
    ),
    Defect(
        "a saved patch without a config form is exported as the unpatched model",
        "rope_patch/cli/export.py",
        '    if patched and sidecar is not None and not sidecar.get("native"):\n',
        "    if False:\n",
        (
            "tests/exporting/test_export_command.py::test_saved_patch_without_a_config_form_is_refused",
        ),
    ),
]
