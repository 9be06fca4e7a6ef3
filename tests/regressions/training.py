"""Defects of fine-tuning: recipes, data, losses, checkpoints and identities of runs."""

from regressions.defect import Defect

_PACKING = "rope_patch/training/data/packing.py"
_IDENTITY = "rope_patch/training/identity.py"
_SETTINGS = "rope_patch/training/settings.py"

DEFECTS = [
    Defect(
        "data_seed 0 trains on the rows of the run's seed, as 0 counts as not given",
        _SETTINGS,
        "        return training.seed if training.data_seed is None else training.data_seed\n",
        "        return training.data_seed or training.seed\n",
        ("tests/training/test_settings.py::test_a_seed_of_0_is_a_seed",),
    ),
    Defect(
        "a train_length of 0 counts as none",
        _SETTINGS,
        "        if value is not None and not 1 <= value < math.inf:\n",
        "        if value and not 1 <= value < math.inf:\n",
        ("tests/training/test_settings.py::test_a_length_of_0_is_not_taken_for_no_length",),
    ),
    Defect(
        "a recipe's key that stands twice passes, and the last one wins",
        "rope_patch/utils/strict_yaml.py",
        "                if key.value in seen:\n",
        "                if False:\n",
        (
            "tests/training/test_settings.py::test_yaml_that_is_no_recipe_or_that_readers_take_differently_is_refused",
        ),
    ),
    Defect(
        "a run goes on in the folder of another recipe",
        _IDENTITY,
        '    if differences:\n        raise ValueError(\n            f"cannot resume {folder}, it holds',
        '    if False:\n        raise ValueError(\n            f"cannot resume {folder}, it holds',
        ("tests/training/test_identity.py::test_another_recipe_is_refused_and_nothing_changes",),
    ),
    Defect(
        "a method from outside is identified by its name, whatever it computes",
        _IDENTITY,
        "    if handle is None or method_origin(handle.method) is None:\n",
        "    if True:\n",
        (
            "tests/training/test_identity.py::test_a_method_from_outside_is_identified_by_its_numbers",
        ),
    ),
    Defect(
        "a folder of data that has moved is other data",
        _IDENTITY,
        "        return [_without_names(item) for item in value]\n",
        "        return value\n",
        ("tests/training/test_identity.py::test_contents_decide_the_identity_and_paths_do_not",),
    ),
    Defect(
        "more steps of a decaying schedule go on without a warning",
        _IDENTITY,
        "        and not optimizer.same_rates(training, stored_steps, new_steps, steps_done)\n",
        "        and False\n",
        ("tests/training/test_identity.py::test_more_steps_of_a_decaying_schedule_warn",),
    ),
    Defect(
        "checkpoints of another rotation are averaged",
        _IDENTITY,
        "        if differences := _differences(last, known[folder], known[last], text):\n",
        "        if differences := {}:\n",
        ("tests/training/test_averaging.py::test_checkpoints_of_another_rotation_are_refused",),
    ),
    Defect(
        "the mean of checkpoints in 16 bits is accumulated in 16 bits",
        "rope_patch/training/checkpoints.py",
        "tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)",
        "tensor.clone()",
        ("tests/training/test_averaging.py::test_means_of_16_bits_are_accumulated_in_float32",),
    ),
    Defect(
        "LoRA's matrices are averaged instead of their products",
        "rope_patch/training/checkpoints.py",
        "    change = mean(product(folder) for folder in folders)\n",
        "    for name, parameter in parameters.items():\n"
        "        parameter.copy_(mean(read(name, folder) for folder in folders))\n"
        "    change = layer.get_delta_weight(adapter)\n",
        (
            "tests/training/test_averaging.py::test_the_mean_of_products_is_not_the_product_of_means",
        ),
    ),
    Defect(
        "a tied head decays as a head of its own, where embeddings do not",
        "rope_patch/training/optimizer.py",
        "        if id(parameter) not in undecayed and not _UNDECAYED.search(name.lower())\n",
        "        if name.endswith('head.weight') or id(parameter) not in undecayed and not _UNDECAYED.search(name.lower())\n",
        (
            "tests/training/test_trainer_and_loop.py::test_a_tied_head_is_an_embedding_under_any_name_and_wrapper",
        ),
    ),
    Defect(
        "weight decay goes by a parameter's number of axes",
        "rope_patch/training/optimizer.py",
        "        if id(parameter) not in undecayed and not _UNDECAYED.search(name.lower())\n",
        "        if id(parameter) not in undecayed and parameter.ndim > 1\n",
        (
            "tests/training/test_trainer_and_loop.py::test_a_tied_head_is_an_embedding_under_any_name_and_wrapper",
        ),
    ),
    Defect(
        "a damaged checkpoint is resumed from",
        "rope_patch/training/checkpoints.py",
        "            if file_sha256(path) != digest:\n",
        "            if False:\n",
        (
            "tests/training/test_checkpoints.py::test_a_damaged_checkpoint_is_skipped_with_a_warning",
        ),
    ),
    Defect(
        "checkpoints of an abandoned continuation stay, and are the newest to resume from",
        "rope_patch/training/checkpoints.py",
        "        for checkpoint in later_checkpoints + old:\n",
        "        for checkpoint in old:\n",
        (
            "tests/training/test_checkpoints.py::test_resume_from_a_path_deletes_checkpoints_of_the_abandoned_continuation",
        ),
    ),
    Defect(
        "log lines of steps that are taken again stay in the log",
        "rope_patch/training/monitor.py",
        '            lines = [line for line in read_log(folder) if line["step"] <= steps_done]\n',
        "            lines = read_log(folder)\n",
        ("tests/training/test_monitor.py::test_lines_after_the_resumed_step_are_dropped",),
    ),
    Defect(
        "a loss that is not finite because all labels are -100 says to lower the learning rate",
        "rope_patch/training/monitor.py",
        '        if rows and all(row.get("targets") == 0 for row in rows):\n',
        "        if False:\n",
        ("tests/training/test_monitor.py::test_rows_without_a_label_are_named_as_the_reason",),
    ),
    Defect(
        "the first token of a document is predicted from the document before it",
        _PACKING,
        "            labels[positions == 0] = IGNORED  # not predictable from the previous document\n",
        "",
        (
            "tests/training/data/test_packing.py::test_packed_rows_are_the_documents_one_after_another",
        ),
    ),
    Defect(
        "a gap of skipped positions is taken for the border of two documents",
        _PACKING,
        '        batch["attention_mask"] = torch.ones_like(batch["input_ids"])\n',
        "        pass\n",
        (
            "tests/training/data/test_row_positions.py::test_tokens_see_all_before_them_over_the_gap",
        ),
    ),
    Defect(
        "the first label of a row is a target for some releases of transformers",
        _PACKING,
        '    batch["labels"][:, 0] = IGNORED\n',
        "",
        (
            "tests/training/data/test_packing.py::test_collate_stacks_rows_and_masks_the_first_label",
        ),
    ),
    Defect(
        "rows of another target length resume",
        _PACKING,
        '            settings["target_length"] = self._target_length\n',
        "            pass\n",
        ("tests/training/data/test_row_positions.py::test_rows_of_another_target_do_not_resume",),
    ),
    Defect(
        "a share of short rows is rounded as a binary number",
        _PACKING,
        "        self._short_share = Fraction(\n            str(arguments.short_share)\n        )  # exactly 0.1, not the nearest float\n",
        "        self._short_share = Fraction(arguments.short_share)\n",
        ("tests/training/data/test_packing.py::test_short_share_is_exact",),
    ),
    Defect(
        "best-fit rows keep the order of their lengths, long documents first",
        "rope_patch/training/data/packing.py",
        '        Random(f"{self._seed} window {self._number}").shuffle(rows)\n',
        "",
        ("tests/training/data/test_best_fit.py::test_rows_depend_on_the_seed_alone",),
    ),
    Defect(
        "best-fit rows resume from the sources' place behind their window",
        "rope_patch/training/data/packing.py",
        "        sources = self._start if self._rows else self._snapshot()\n",
        "        sources = self._snapshot()\n",
        ("tests/training/data/test_packing_resume.py::test_rows_resume_exactly_at_every_row",),
    ),
    Defect(
        "padding lengthens rows where the rotation follows their longest position",
        _PACKING,
        "self._padding_limit = trained_length if follows_length else None",
        "self._padding_limit = None",
        (
            "tests/training/data/test_best_fit.py::test_padding_does_not_lengthen_rows_whose_length_counts",
        ),
    ),
    Defect(
        "a resumed reader of JSON lines reads what comes before its cursor",
        "rope_patch/training/data/readers.py",
        '        first = 0 if cursor is None else number\n        offset = 0 if cursor is None else cursor["byte"]\n',
        "        first = offset = 0\n",
        ("tests/training/data/test_readers.py::test_lines_before_the_cursor_are_not_read",),
    ),
    Defect(
        "a cursor into data that has changed begins in the middle of a line",
        "rope_patch/training/data/readers.py",
        '                if file.read(1) != b"\\n" or not file.peek(1):\n',
        "                if not file.read(1):\n",
        ("tests/training/data/test_readers.py::test_a_cursor_of_other_data_is_refused",),
    ),
    Defect(
        "a stream of the Hub resumes from the state of another version of datasets",
        "rope_patch/training/data/readers.py",
        '        if cursor is not None and cursor["datasets"] == version:\n',
        "        if cursor is not None:\n",
        (
            "tests/training/data/test_readers.py::test_a_state_of_another_version_of_datasets_is_not_used",
        ),
    ),
    Defect(
        "a device is read as data until memory ends",
        "rope_patch/training/data/readers.py",
        '    if not path.is_file():\n        raise ValueError(f"{path}: expected a file or a folder',
        '    if False:\n        raise ValueError(f"{path}: expected a file or a folder',
        ("tests/training/data/test_documents.py::test_a_device_is_no_data",),
    ),
    Defect(
        "half a character in a record ends in a tokenizer's error without file and line",
        "rope_patch/training/data/documents.py",
        "        _require_characters(text, document.location)\n",
        "",
        (
            "tests/training/data/test_documents.py::test_damaged_documents_are_refused_with_their_location",
        ),
    ),
    Defect(
        "a line of a small .gz is cut where it is larger than any document may be",
        "rope_patch/training/data/readers.py",
        "                if len(line) > _MAX_DOCUMENT_BYTES:\n",
        "                if False:\n",
        (
            "tests/training/data/test_documents.py::test_a_small_file_that_holds_much_is_refused_before_memory_is_full",
        ),
    ),
    Defect(
        "the question about a text is the same for all its rows",
        "rope_patch/training/data/aggregation.py",
        '        random = Random(f"{self._seed} {place} {offset}")\n',
        '        random = Random(f"{self._seed}")\n',
        ("tests/training/data/test_aggregation.py::test_answers_follow_from_the_text_above_them",),
    ),
    Defect(
        "common words of equal counts are asked for, which no answer tells apart",
        "rope_patch/training/data/aggregation.py",
        "        if len(ranks) <= number or ranks[number - 1][1] == ranks[number][1]:\n",
        "        if len(ranks) <= number:\n",
        ("tests/training/data/test_aggregation.py::test_answers_follow_from_the_text_above_them",),
    ),
    Defect(
        "the divergence of softened distributions shrinks with the temperature's square",
        "rope_patch/training/objective/distillation.py",
        "    return each.sum(-1) * temperature**2\n",
        "    return each.sum(-1)\n",
        (
            "tests/training/objective/test_distillation.py::test_losses_and_gradients_equal_those_of_all_logits",
        ),
    ),
    Defect(
        "the divergence is that of the trained model from the original one, turned around",
        "rope_patch/training/objective/distillation.py",
        'functional.kl_div(trained, original, reduction="none", log_target=True)',
        'functional.kl_div(original, trained, reduction="none", log_target=True)',
        (
            "tests/training/objective/test_distillation.py::test_losses_and_gradients_equal_those_of_all_logits",
        ),
    ),
    Defect(
        "the loss in chunks is summed in 16 bits",
        "rope_patch/training/objective/chunked_loss.py",
        "    sums = hidden.dtype == torch.float32\n",
        "    sums = True\n",
        (
            "tests/training/objective/test_chunked_loss.py::test_loss_and_gradients_equal_those_of_all_logits",
        ),
    ),
    Defect(
        "the loss in chunks leaves out the caps and scales of a model's logits",
        "rope_patch/training/objective/chunked_loss.py",
        '    if problem is None and name != "full" and transform is not unchanged:\n',
        "    if False:\n",
        (
            "tests/training/objective/test_chunked_loss.py::test_a_model_that_caps_its_logits_keeps_the_full_loss",
        ),
    ),
    Defect(
        "z-loss counts tokens without a target",
        "rope_patch/training/objective/chunk_sums.py",
        "        return torch.where(self.counted, values, 0).sum()\n",
        "        return values.sum()\n",
        (
            "tests/training/objective/test_chunked_loss.py::test_loss_and_gradients_with_z_loss_equal_those_of_whole_logits",
        ),
    ),
]
