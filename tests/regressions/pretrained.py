"""Defects of loading and saving: sidecars, adapters, trained rotations, GGUF files."""

from regressions.defect import Defect

DEFECTS = [
    Defect(
        "a GGUF file without a scaling type is read as unscaled, where llama.cpp takes linear",
        "rope_patch/pretrained/gguf.py",
        'kind = rope.get("scaling.type", "linear")',
        'kind = rope.get("scaling.type", "none")',
        ("tests/exporting/test_gguf_rotation.py::test_the_files_rotation_is_read",),
    ),
    Defect(
        "a GGUF file's attn_factor is read with YaRN alone",
        "rope_patch/pretrained/gguf.py",
        "    if stretches is None and attention == 1:\n",
        "    if stretches is None:\n",
        ("tests/exporting/test_gguf_rotation.py::test_the_files_rotation_is_read",),
    ),
    Defect(
        "a GGUF file's old key rope.scale_linear is ignored",
        "rope_patch/pretrained/gguf.py",
        "_FACTOR if _FACTOR in rope else _OLD_FACTOR",
        "_FACTOR",
        ("tests/exporting/test_gguf_rotation.py::test_the_files_rotation_is_read",),
    ),
    Defect(
        "the stretches of a GGUF file's rope_freqs tensor are dropped",
        "rope_patch/pretrained/gguf.py",
        "        stretches = [float(value) for value in tensors[_STRETCHES].data]\n",
        "        stretches = None\n",
        ("tests/exporting/test_gguf_rotation.py::test_the_files_rotation_is_read",),
    ),
    Defect(
        "a model of a GGUF file is loaded without the rotation that the file names",
        "rope_patch/pretrained/loading.py",
        "        apply_gguf_rotation(config, fetched_file(str(source), gguf_file, **hub))\n",
        "        fetched_file(str(path), gguf_file, **hub)\n",
        ("tests/exporting/test_gguf_rotation.py::test_the_files_rotation_is_read",),
    ),
    Defect(
        "a scaling that a GGUF file has and no config says is loaded without a word",
        "rope_patch/pretrained/gguf.py",
        "        if is_unread and (key not in _NEUTRAL or _NEUTRAL[key] not in (None, value)):\n",
        "        if is_unread and False:\n",
        ("tests/exporting/test_gguf_rotation.py::test_what_no_config_says_is_refused",),
    ),
    Defect(
        "`dynamic` is called native where it grows in steps, and transformers with every token",
        "rope_patch/pretrained/saving.py",
        "if not (handle.method.is_native and unwrap(handle.method).is_native):",
        "if not unwrap(handle.method).is_native and handle.method.name != 'dynamic':",
        (
            "tests/pretrained/test_saving.py::test_dynamic_is_native_where_one_pass_of_any_length_is_equal",
        ),
    ),
    Defect(
        "a saved folder's tokenizer keeps the length from before the patch",
        "rope_patch/pretrained/saving.py",
        "    if isinstance(length, int | float) and length < handle.length:\n",
        "    if False:\n",
        (
            "tests/pretrained/test_patched_checkpoint.py::test_save_writes_the_tokenizer_with_the_new_length",
        ),
    ),
    Defect(
        "the length of a linked tokenizer is raised in the source checkpoint, too",
        "rope_patch/pretrained/saving.py",
        "        path.unlink()\n        path.write_text(json.dumps(config, indent=2, ensure_ascii=False)",
        "        path.write_text(json.dumps(config, indent=2, ensure_ascii=False)",
        (
            "tests/pretrained/test_patched_checkpoint.py::test_the_tokenizer_reads_the_new_length_and_the_source_is_unchanged",
        ),
    ),
    Defect(
        "an earlier save's weights stay beside the new ones, and transformers prefers them",
        "rope_patch/pretrained/saving.py",
        "        if stale.name not in new:\n            stale.unlink()\n",
        "        pass\n",
        ("tests/pretrained/test_saving.py::test_save_removes_stale_weights",),
    ),
    Defect(
        "the files that describe weights are moved into place before the weights",
        "rope_patch/pretrained/saving.py",
        'key=lambda path: path.suffix == ".json"',
        'key=lambda path: path.suffix != ".json"',
        ("tests/pretrained/test_saving.py::test_weights_are_in_place_before_what_describes_them",),
    ),
    Defect(
        "a sidecar of 0.1 gives nope the temperature of positions, where it had that of the text",
        "rope_patch/pretrained/sidecar.py",
        'options["temperature"] = f"drope:{coefficient}"',
        'options["temperature"] = coefficient',
        ("tests/pretrained/test_saving.py::test_temperature_of_nope_from_0_1_keeps_its_meaning",),
    ),
    Defect(
        "a folder that was trained under the rotation of its config is refused as a saved patch",
        "rope_patch/pretrained/sidecar.py",
        '    if isinstance(trained, dict) and trained.get("rope_parameters"):\n',
        "    if False:\n",
        ("tests/training/test_trained_starts.py::test_all_readers_start_from_the_trained_length",),
    ),
    Defect(
        "a sidecar and a config that disagree on training are both believed",
        "rope_patch/pretrained/sidecar.py",
        "        if TRAINED in field and lengths[0] != lengths[1]:\n",
        "        if False:\n",
        ("tests/pretrained/test_trained_record.py::test_files_that_disagree_are_refused",),
    ),
    Defect(
        "the card of an earlier release's finetune does not count as a record of training",
        "rope_patch/pretrained/sidecar.py",
        "    if TRAINED not in field and _is_finetuned(folder):\n",
        "    if False:\n",
        (
            "tests/pretrained/test_trained_record.py::test_card_of_an_earlier_finetune_says_that_it_trained",
        ),
    ),
    Defect(
        "a folder that was trained under a patch is loaded without the record of it",
        "rope_patch/pretrained/loading.py",
        "        if method is None and trained_adapter is None and _was_trained(Path(path)):\n            mark_trained(model)\n",
        "",
        (
            "tests/pretrained/test_trained_record.py::test_unstated_rotation_is_restored_or_replaced_but_never_guessed",
        ),
    ),
    Defect(
        "an adapter takes a base that is patched with another rotation",
        "rope_patch/pretrained/adapters.py",
        "    if not rotate_alike(training_patch, active_patch):\n",
        "    if training_patch.method.name != active_patch.method.name:\n",
        ("tests/pretrained/test_adapters.py::test_base_with_a_different_patch_is_refused",),
    ),
    Defect(
        "an adapter takes two maps of positions with the same frequencies for one rotation",
        "rope_patch/pretrained/sidecar.py",
        "        if _attention_changes(first, length) != _attention_changes(second, length):\n            return False\n",
        "",
        ("tests/pretrained/test_adapters.py::test_base_with_a_different_patch_is_refused",),
    ),
    Defect(
        "a base whose config has a static rotation is not patched for a dynamic adapter",
        "rope_patch/pretrained/sidecar.py",
        "        or method.is_length_dependent(trained_length)\n",
        "",
        (
            "tests/pretrained/test_adapters.py::test_base_whose_config_has_the_rotation_is_patched_with_what_no_config_says",
        ),
    ),
    Defect(
        "an adapter is put on a base that its patch rotates otherwise than in training",
        "rope_patch/pretrained/adapters.py",
        "    if not matches_sidecar(training_patch, sidecar):\n",
        "    if False:\n",
        ("tests/pretrained/test_adapters.py::test_base_with_another_rotation_or_size_is_refused",),
    ),
    Defect(
        "a method from outside that computes other numbers than when it was saved loads in silence",
        "rope_patch/pretrained/sidecar.py",
        "    if OUTSIDE not in sidecar:\n        return\n    recorded =",
        "    return\n    recorded =",
        (
            "tests/pretrained/test_trained_record.py::test_another_computation_under_the_same_name_is_refused",
        ),
    ),
    Defect(
        "the recorded rotation of latent attention loses the factor in its softmax scale",
        "rope_patch/pretrained/sidecar.py",
        '"attention_factor": in_softmax if in_softmax != 1 else frequencies.attention_factor,',
        '"attention_factor": frequencies.attention_factor,',
        ("tests/pretrained/test_trained_record.py::test_latent_attention_keeps_its_softmax_scale",),
    ),
    Defect(
        "a table that was trained under its patch is loaded as the method computes it",
        "rope_patch/pretrained/encoding_checkpoint.py",
        "                table.copy_(patched[name])\n",
        "                pass\n",
        (
            "tests/pretrained/test_encodings_in_folders.py::test_a_table_trained_under_the_patch_is_kept",
        ),
    ),
    Defect(
        "half of T5 is called native where plain transformers widens both halves",
        "rope_patch/encodings/sites/buckets.py",
        "        if len(numbers) != 1:\n",
        "        if not numbers:\n",
        ("tests/pretrained/test_encodings_in_folders.py::test_half_of_t5_has_no_native_form",),
    ),
    Defect(
        "a stretched table of an encoded model is stretched again where its folder loads",
        "rope_patch/pretrained/encoding_checkpoint.py",
        "        extended = None\n    original",
        "        pass\n    original",
        (
            "tests/pretrained/test_encodings_in_folders.py::test_a_stretched_table_is_saved_as_it_was_trained_on",
        ),
    ),
    Defect(
        "gates to a shared expert are quantised, which llama-quantize leaves alone",
        "rope_patch/pretrained/quantization.py",
        '        if _ROUTERS & set(name.split(".")):\n            continue\n',
        "",
        ("tests/pretrained/test_quantization.py::test_the_gate_of_a_shared_expert_stays",),
    ),
]
