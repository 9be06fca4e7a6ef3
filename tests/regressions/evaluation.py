"""Defects of evaluation: stored answers, merged runs, verdicts and reports."""

from regressions.defect import Defect

_RETRIEVAL = "rope_patch/evaluation/report/results/retrieval.py"
_LIKELIHOOD = "rope_patch/evaluation/report/results/likelihood.py"
_SESSION = "rope_patch/evaluation/session.py"
_MERGING = "rope_patch/evaluation/report/merging.py"

DEFECTS = [
    Defect(
        "stored answers of a dynamic method on some layers serve the method on all layers",
        _SESSION,
        'if is_ours and extension.start == "unscaled" and extension.layer_types is None:',
        'if is_ours and extension.start == "unscaled":',
        (
            "tests/evaluation/test_stored_results.py::test_a_dynamic_method_on_some_layers_has_answers_of_its_own",
        ),
    ),
    Defect(
        "stored answers of a dynamic method serve it on another scaling of the config",
        _SESSION,
        'if is_ours and extension.start == "unscaled" and extension.layer_types is None:',
        "if is_ours and extension.layer_types is None:",
        (
            "tests/evaluation/test_stored_results.py::test_what_a_dynamic_method_starts_from_has_answers_of_its_own",
        ),
    ),
    Defect(
        "the same weights under an edited config get the stored answers of the config before",
        _SESSION,
        "            return None if entry",
        "            return None if True or entry",
        (
            "tests/evaluation/test_stored_results.py::test_the_same_weights_under_another_config_have_answers_of_their_own",
        ),
    ),
    Defect(
        "a damaged note of configs counts as none, and stored answers are shared",
        _SESSION,
        "    if stored.flaws:\n",
        "    if False:\n",
        ("tests/evaluation/test_stored_results.py::test_a_config_that_was_not_noted_is_no_guess",),
    ),
    Defect(
        "a map of positions shares the stored answers of the frequencies below it",
        _SESSION,
        "    rotation |= handle.method.attention_changes(end, handle.trained_length)\n",
        "",
        ("tests/evaluation/test_stored_results.py::test_position_maps_have_answers_of_their_own",),
    ),
    Defect(
        "kernels that round otherwise share the plain model's stored answers",
        _SESSION,
        "    rounds_otherwise = bool(kernels) if rotation else not _keeps_bits(handle)\n",
        "    rounds_otherwise = False\n",
        (
            "tests/evaluation/test_stored_results.py::test_only_equal_bits_share_the_plain_models_answer",
        ),
    ),
    Defect(
        "a stored result is read without its checksum",
        "rope_patch/runs/run_folder.py",
        "        return checksums.unseal((self.path / name).read_bytes(), **entries)\n",
        "        return json.loads((self.path / name).read_bytes())\n",
        (
            "tests/evaluation/test_stored_results.py::test_damaged_results_are_measured_again_and_reported_once",
        ),
    ),
    Defect(
        "a full disk counts as one missing measurement, and the run goes on",
        _SESSION,
        "    aborting: tuple[type[Exception], ...] = (NotWritten,)\n",
        "    aborting: tuple[type[Exception], ...] = ()\n",
        ("tests/evaluation/test_stored_results.py::test_a_full_disk_stops_the_run_at_once",),
    ),
    Defect(
        "a run that uses an earlier run's pieces says that it is not continued",
        _SESSION,
        "        self.continued = self.continued or bool(earlier)\n",
        "",
        (
            "tests/evaluation/test_stored_results.py::test_a_run_that_uses_pieces_of_an_earlier_one_says_so_and_counts_their_time",
        ),
    ),
    Defect(
        "the time of an earlier run's pieces is counted in no part",
        _SESSION,
        "sum(seconds[key] for key in earlier))\n",
        "0.0)\n",
        (
            "tests/evaluation/test_stored_results.py::test_a_run_that_uses_pieces_of_an_earlier_one_says_so_and_counts_their_time",
        ),
    ),
    Defect(
        "a failure replaces the answer of an earlier run",
        "rope_patch/inference/answers.py",
        '            if not self.is_answered(entry["key"]):\n',
        "            if True:\n",
        (
            "tests/inference/test_answers.py::test_an_answer_is_never_replaced_by_a_later_failure_or_answer",
        ),
    ),
    Defect(
        "a repaired file of answers keeps its damaged lines",
        "rope_patch/inference/answers.py",
        "            journal.rewrite(checked.valid)\n",
        "",
        ("tests/inference/test_answers.py::test_junk_in_the_file_is_dropped_with_a_warning",),
    ),
    Defect(
        "questions of other prompts are paired as the same ones",
        _MERGING,
        "        mine[name] == theirs[name] and not (in_chat and mine[name] is None)\n",
        "        True\n",
        ("tests/evaluation/test_other_models.py::test_questions_of_other_prompts_are_not_paired",),
    ),
    Defect(
        "results that do not say what was asked are paired in a chat template with a clock",
        _MERGING,
        "mine[name] == theirs[name] and not (in_chat and mine[name] is None)",
        "mine[name] == theirs[name]",
        ("tests/evaluation/test_other_models.py::test_questions_of_other_prompts_are_not_paired",),
    ),
    Defect(
        "merged runs are corrected for the fewer looks",
        _MERGING,
        '"looks": max((first.get("looks") or [], second.get("looks") or []), key=len),',
        '"looks": first.get("looks") or [],',
        (
            "tests/evaluation/report/test_conclusions.py::test_runs_that_are_merged_are_corrected_for_the_more_looks",
        ),
    ),
    Defect(
        "the mean of all tasks pools their samples",
        _RETRIEVAL,
        "        return statistics.stratified_mean([c.accuracy for c in cells]) if cells else None\n",
        "        names = self.averaged_tasks if task is None else [task]\n"
        "        pooled = [s for name in names for s in self.samples(label, name, lengths, depth)]\n"
        "        return _accuracy(pooled) if cells else None\n",
        (
            "tests/evaluation/report/test_task_means.py::test_each_task_counts_the_same_whatever_its_number_of_samples",
        ),
    ),
    Defect(
        "retention counts what a guess gets",
        _RETRIEVAL,
        "statistics.stratified_mean([cells[task].above_chance for",
        "statistics.stratified_mean([cells[task].accuracy for",
        ("tests/evaluation/report/test_task_means.py::test_what_a_guess_gets_is_nothing_kept",),
    ),
    Defect(
        "a plain model that guesses has an accuracy to keep",
        _RETRIEVAL,
        "        if not base_above.low > 0:\n            return None\n",
        "",
        (
            "tests/evaluation/report/test_task_means.py::test_a_plain_model_that_guesses_has_nothing_to_keep",
        ),
    ),
    Defect(
        "a question and its twins count twice in means over tasks",
        _RETRIEVAL,
        "        return written or next(filter(None, by_suffix), [])\n",
        "        return self.tasks\n",
        ("tests/evaluation/report/test_task_means.py::test_a_question_and_its_twins_count_once",),
    ),
    Defect(
        "RULER's threshold is applied to likelihoods, which it is not for",
        _RETRIEVAL,
        "        return set(self.tasks) >= _RULER\n",
        "        return {question_of(task) for task in self.tasks} >= _RULER\n",
        (
            "tests/evaluation/report/test_task_means.py::test_rulers_threshold_is_for_written_answers_of_all_its_tasks",
        ),
    ),
    Defect(
        "questions about one text are independent evidence of likelihoods",
        _LIKELIHOOD,
        '            (text_of(s["task"]), s["length"], s["text"]),\n',
        '            (s["task"], s["length"], s["id"]),\n',
        (
            "tests/evaluation/report/test_conclusions.py::test_questions_about_one_text_are_one_piece_of_evidence",
        ),
    ),
    Defect(
        "tasks of a ladder, which ask about the same texts, are independent evidence",
        "rope_patch/tasks/__init__.py",
        "    return TEXTS_OF.get(question, question)\n",
        "    return question\n",
        (
            "tests/evaluation/report/test_conclusions.py::test_tasks_that_ask_about_the_same_texts_are_one_piece_of_evidence",
        ),
    ),
    Defect(
        "a method is shown to help by a p-value that is not corrected over the methods",
        "rope_patch/statistics/verdict.py",
        "        key: Verdict(test, min(1.0, look_factor * p), level)\n",
        "        key: Verdict(test, test.p_value, level)\n",
        ("tests/evaluation/report/test_conclusions.py::test_methods_are_one_family_at_the_length",),
    ),
    Defect(
        "the best of many methods is named though others are not shown to be worse",
        "rope_patch/evaluation/report/conclusions.py",
        "        if length is None or self.best is None or self.rivals:\n",
        "        if length is None or self.best is None:\n",
        (
            "tests/evaluation/report/test_ranking.py::test_the_best_is_marked_only_where_all_others_are_shown_to_be_worse",
        ),
    ),
    Defect(
        "methods are ranked by few right answers, where likelihoods tell them apart",
        "rope_patch/evaluation/report/conclusions.py",
        "            return (loss.mean.estimate if loss else math.inf, within)\n",
        "            accuracy = stats.accuracy(label, None, (length,))\n"
        "            return (-accuracy.estimate if accuracy else 0.0, within)\n",
        (
            "tests/evaluation/report/test_ranking.py::test_methods_are_sorted_by_the_likelihood_of_right_answers",
        ),
    ),
    Defect(
        "a method helps though its answers are no likelier than without them in the text",
        "rope_patch/evaluation/report/conclusions.py",
        "    return is_better and (stats.floor is None or stats.reads_answers(label, length))\n",
        "    return is_better\n",
        (
            "tests/evaluation/report/test_conclusions.py::test_answers_are_held_against_questions_without_them",
        ),
    ),
    Defect(
        "the headline recommends a method by right answers that are right without the text, too",
        "rope_patch/evaluation/report/conclusions.py",
        "return is_better and p_value < SIGNIFICANCE_LEVEL and not _averaged_guesses(stats)\n",
        "return is_better and p_value < SIGNIFICANCE_LEVEL\n",
        ("tests/evaluation/report/test_recorded_texts.py::test_sentences_of_each_kind_of_result",),
    ),
    Defect(
        "an undecided headline names the best method where the plain model leads",
        "rope_patch/evaluation/report/conclusions.py",
        "leader = who if mean.estimate < 0 else plain",
        "leader = who",
        ("tests/evaluation/report/test_recorded_texts.py::test_sentences_of_each_kind_of_result",),
    ),
    Defect(
        "a report of fewer texts than decide says that it cannot be sure, as if more samples would do",
        "rope_patch/statistics/verdict.py",
        "            return Outcome.TOO_FEW_TEXTS\n",
        "            return Outcome.NOT_TOLD_APART\n",
        (
            "tests/evaluation/report/test_conclusions.py::test_nothing_is_shown_with_fewer_texts_than_decide",
        ),
    ),
    Defect(
        "ordinary tasks are tested without a correction over the methods",
        "rope_patch/evaluation/report/results/run_statistics.py",
        "        adjusted = statistics.holm([test.p_value for test in tests.values()])\n",
        "        adjusted = [test.p_value for test in tests.values()]\n",
        (
            "tests/evaluation/report/test_conclusions.py::test_short_tasks_are_tested_together_and_corrected_over_the_methods",
        ),
    ),
    Defect(
        "looks at growing data are not corrected for",
        "rope_patch/evaluation/report/results/retrieval.py",
        "        return statistics.look_factor(self.looks)\n",
        "        return 1\n",
        ("tests/evaluation/report/test_conclusions.py::test_looks_at_growing_data_are_corrected",),
    ),
    Defect(
        "a run that looks at too few texts to decide spends a look",
        "rope_patch/evaluation/retrieval_run.py",
        "        if stats.has_enough_texts:\n            self.looks = looks\n",
        "        self.looks = looks\n",
        ("tests/evaluation/test_until_decided.py::test_fewer_texts_than_decide_are_no_look",),
    ),
]
