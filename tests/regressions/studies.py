"""Defects of searching, recommending, extending and the lab."""

from regressions.defect import Defect

DEFECTS = [
    Defect(
        "a search goes on with measurements of the config before an edit",
        "rope_patch/searching/model.py",
        '        "config": provenance.config_fingerprint(model.config),\n',
        "",
        (
            "tests/searching/test_search_pipeline.py::test_the_journal_of_a_model_with_another_config_is_refused",
        ),
    ),
    Defect(
        "a search goes on with the measurements of a model with another config",
        "rope_patch/searching/model.py",
        '        "config": provenance.config_fingerprint(model.config),\n',
        "",
        (
            "tests/searching/test_search_pipeline.py::test_the_journal_of_a_model_with_another_config_is_refused",
        ),
    ),
    Defect(
        "a damaged measurement of a search is dropped from memory and left in its file",
        "rope_patch/searching/journal.py",
        "            if self._is_damaged:\n                folder.journal(JOURNAL_FILE).rewrite(self._valid_lines)\n",
        "",
        (
            "tests/searching/test_search_journal.py::test_a_damaged_measurement_is_reported_and_dropped",
        ),
    ),
    Defect(
        "a journal that was read before its lock keeps what another search added since from sight",
        "rope_patch/searching/journal.py",
        "            self._read(folder)  # other processes may have written since\n",
        "",
        (
            "tests/searching/test_search_journal.py::test_changes_by_another_search_since_reading_are_respected",
        ),
    ),
    Defect(
        "what a journal held before is kept when it is read again",
        "rope_patch/searching/journal.py",
        "        self._entries, self._valid_lines = {}, []\n        self._has_header = self._is_damaged = False\n        if not lines:\n",
        "        self._valid_lines = []\n        if not lines:\n",
        (
            "tests/searching/test_search_journal.py::test_changes_by_another_search_since_reading_are_respected",
        ),
    ),
    Defect(
        "a line of another search in a journal counts as its own",
        "rope_patch/searching/journal.py",
        "        checked = check_lines(lines[1:], first=2, search=self._search_id)\n",
        "        checked = check_lines(lines[1:], first=2)\n",
        (
            "tests/searching/test_search_journal.py::test_a_damaged_measurement_is_reported_and_dropped",
        ),
    ),
    Defect(
        "a search that plans by its budget goes on under another one",
        "rope_patch/searching/journal.py",
        '        if first is not None and first["budget"] != budget and not resumable:\n',
        "        if False:\n",
        (
            "tests/searching/test_search_pipeline.py::test_a_larger_budget_is_refused_if_the_strategy_plans_by_it",
        ),
    ),
    Defect(
        "maps of positions are one candidate, because their frequencies are the plain model's",
        "rope_patch/searching/candidates.py",
        "        others = [json.dumps(changes, sort_keys=True)] if changes else []\n",
        "        others = []\n",
        (
            "tests/recommending/test_variants.py::test_maps_are_kept_apart_though_their_frequencies_are_the_plain_models",
        ),
    ),
    Defect(
        "fewer right answers at the same loss are no worse",
        "rope_patch/recommending/decision_rule.py",
        "            and answers.losses > answers.wins\n",
        "            and False\n",
        (
            "tests/recommending/test_decision_rule.py::test_fewer_right_answers_are_worse_at_the_same_loss",
        ),
    ),
    Defect(
        "a recommendation shows a gain on fewer than six texts by their bootstrap",
        "rope_patch/recommending/decision_rule.py",
        "    return mean_test(differences, range(len(differences))).mean\n",
        "    return bootstrap_mean([[difference] for difference in differences])\n",
        (
            "tests/recommending/test_decision_rule.py::test_nothing_is_worse_and_no_gain_is_shown_below_six_texts",
        ),
    ),
    Defect(
        "a significant but negligible difference decides between methods",
        "rope_patch/recommending/decision_rule.py",
        "        return is_shown and self.nll.estimate > NEGLIGIBLE\n",
        "        return is_shown\n",
        (
            "tests/recommending/test_decision_rule.py::test_a_significant_but_tiny_difference_is_a_tie",
        ),
    ),
    Defect(
        "a method is recommended whose true answers are no likelier than ones the text lacks",
        "rope_patch/recommending/decision_rule.py",
        "    if information_gain is not None and not information_gain.low > 0:\n",
        "    if False:\n",
        ("tests/recommending/test_decision_rule.py::test_a_method_must_beat_the_control",),
    ),
    Defect(
        "a recommendation's choices go by the clock, so that a kill changes them",
        "rope_patch/recommending/budget.py",
        "        self._spent += seconds\n        self._counted_at",
        "        self._spent += time.monotonic() - self._counted_at\n        self._counted_at",
        (
            "tests/recommending/test_recommending.py::test_a_run_killed_within_its_budget_comes_to_the_same_choices",
        ),
    ),
    Defect(
        "an extension goes on with finished steps after the weights have changed",
        "rope_patch/extending/request.py",
        "        readers.digest_file(file, hasher)\n",
        '        hasher.update(f"{file.stat().st_size}".encode())\n',
        (
            "tests/extending/test_request.py::test_files_that_keep_their_name_and_size_are_others_by_their_contents",
        ),
    ),
    Defect(
        "an extension goes on with finished steps after its texts or data have changed",
        "rope_patch/extending/request.py",
        "        if contents := _contents(self):\n",
        "        if contents := {}:\n",
        (
            "tests/extending/test_request.py::test_files_that_keep_their_name_and_size_are_others_by_their_contents",
        ),
    ),
    Defect(
        "a step has less of the budget where a kill lost some time",
        "rope_patch/runs/run_folder.py",
        "            left = max(0.0, self.budget - used)\n",
        "            left = max(0.0, self.budget - self.spent() + self.spent(step))\n",
        (
            "tests/extending/test_request.py::test_shares_are_of_the_time_left_and_stay_when_a_run_continues",
        ),
    ),
    Defect(
        "a killed pilot comes to another number of samples, as it asks only what is left",
        "rope_patch/extending/proof.py",
        '    parts = results["run"]["stored_seconds"]\n',
        '    parts = results["run"]["seconds"]\n',
        ("tests/extending/test_proof.py::test_a_killed_pilot_comes_to_the_same_number_of_samples",),
    ),
    Defect(
        "a trained model is published that is not shown to be better than its rotation alone",
        "rope_patch/extending/proof.py",
        "if test is not None and Verdict(test, test.p_value).outcome is Outcome.BETTER:",
        "if test is not None and test.mean.estimate < 0:",
        (
            "tests/extending/test_proof.py::test_a_trained_model_is_chosen_where_it_is_shown_to_be_better",
        ),
    ),
    Defect(
        "the budget of an extension may not grow although nothing was measured",
        "rope_patch/extending/work_folder.py",
        "        if differences.keys() == {_GROWING} and not self._has_results():\n",
        "        if False:\n",
        ("tests/extending/test_request.py::test_the_budget_may_grow_until_something_is_measured",),
    ),
    Defect(
        "a model's name is HTML in the card of an extension",
        "rope_patch/pretrained/model_card.py",
        'return escape_markdown(demo.NAME if model == "demo" else Path(model).name)',
        'return demo.NAME if model == "demo" else Path(model).name',
        ("tests/utils/test_escaping.py::test_recommendations_and_cards_show_the_words_of_others",),
    ),
    Defect(
        "novels that a model was trained on are those that it is measured on",
        "rope_patch/extending/fine_tuning.py",
        "    novels = (name for name in texts.names() if name not in MEASURED_NOVELS)\n",
        "    novels = texts.names()\n",
        (
            "tests/extending/test_fine_tuning.py::test_novels_that_are_trained_on_are_not_measured_on",
        ),
    ),
    Defect(
        "one seed of the lab agrees or disagrees with papers",
        "rope_patch/lab/statements.py",
        "LEAST_SEEDS = 2",
        "LEAST_SEEDS = 1",
        ("tests/lab/test_statements.py::test_one_seed_says_nothing_about_papers",),
    ),
    Defect(
        "the lab's intervals hold over samples alone, whatever seeds differ by",
        "rope_patch/lab/results.py",
        "        low, high = math.hypot(low, half), math.hypot(high, half)\n",
        "        del half\n",
        (
            "tests/lab/test_statements.py::test_one_half_width_is_that_of_samples_and_seeds_together",
        ),
    ),
]
