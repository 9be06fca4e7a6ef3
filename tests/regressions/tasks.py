"""Defects of tasks, of the measures of an evaluation, and of reading prompts."""

from regressions.defect import Defect

DEFECTS = [
    Defect(
        "a chat template's clock goes on, so that prompts of another day are others",
        "rope_patch/tasks/chat_template.py",
        "    with frozen_clock(_NOW):\n        text = _run_template(fill)\n",
        "    text = _run_template(fill)\n",
        ("tests/tasks/test_chat_template.py::test_the_date_in_a_prompt_does_not_change",),
    ),
    Defect(
        "a chat template that raises ends in its own error",
        "rope_patch/tasks/chat_template.py",
        "    except Exception as error:\n        raise ValueError(_advice(describe_error(error))) from error\n",
        "    except ZeroDivisionError:\n        raise\n",
        (
            "tests/tasks/test_chat_template.py::test_any_error_of_a_template_is_one_line_with_the_way_out",
        ),
    ),
    Defect(
        "a choice's template tokens do not count towards the length",
        "rope_patch/tasks/samples.py",
        "    if not chat:\n        return _count_tokens",
        "    if True:\n        return _count_tokens",
        (
            "tests/tasks/test_chat_template.py::test_a_sample_has_the_tokens_of_the_prompt_that_lm_eval_makes",
        ),
    ),
    Defect(
        "choices count by their likelihood, so that short and usual words win",
        "rope_patch/tasks/scoring.py",
        "    gains = [mine - prior for mine, prior in zip(after, without, strict=True)]\n",
        "    gains = after[: len(without)]\n",
        (
            "tests/tasks/test_choice_tasks.py::test_the_choice_that_the_prompt_makes_likelier_scores",
        ),
    ),
    Defect(
        "of several references that may be given, the score is a share",
        "rope_patch/tasks/scoring.py",
        '        float(any(a.lower() in written for a in doc["answers"])), results[0]\n',
        '        sum(a.lower() in written for a in doc["answers"]) / len(doc["answers"]), results[0]\n',
        (
            "tests/tasks/test_scoring.py::test_any_of_the_answers_scores_in_full_where_lm_eval_divides",
        ),
    ),
    Defect(
        "the number 7 is found in 7.5 and 1,000 counts as 1",
        "rope_patch/tasks/scoring.py",
        'rf"\\d+(?:[.,]\\d+)*|',
        'rf"\\d+|',
        ("tests/tasks/test_scoring.py::test_the_score_is_that_of_the_tasks_rule",),
    ),
    Defect(
        "generation stops at an answer that its next token may change",
        "rope_patch/tasks/settled.py",
        "_UNSETTLED_END = 2\n",
        "_UNSETTLED_END = 0\n",
        ("tests/tasks/test_scoring.py::test_no_continuation_changes_a_settled_score",),
    ),
    Defect(
        "a text's needles are as many as its questions, so that two commands ask other tasks",
        "rope_patch/tasks/needles.py",
        '    return metadata | {"per_text": min(int(metadata.get("per_text", 1)), SEVERAL)}\n',
        "    return metadata\n",
        (
            "tests/tasks/test_needles.py::test_a_text_has_four_needles_however_many_samples_share_it",
        ),
    ),
    Defect(
        "needles follow titles such as Mr., as if these ended sentences",
        "rope_patch/tasks/needles.py",
        "    return word.endswith(_SENTENCE_ENDS) and word not in _TITLES\n",
        "    return word.endswith(_SENTENCE_ENDS)\n",
        ("tests/tasks/test_needles.py::test_needles_do_not_follow_titles",),
    ),
    Defect(
        "documents of a control hold the answer by chance",
        "rope_patch/tasks/questions.py",
        "        others = _without_answers(others, chosen)\n",
        "        pass\n",
        ("tests/tasks/test_every_task.py::test_no_control_holds_an_answer",),
    ),
    Defect(
        "an unanswerable question of SQuAD 2.0 is asked",
        "rope_patch/tasks/questions.py",
        '                if entry.get("is_impossible"):\n                    continue\n',
        "",
        (
            "tests/tasks/test_ruler_tasks.py::test_a_file_of_the_users_gives_questions_and_documents",
        ),
    ),
    Defect(
        "assignments of variable tracking stand in the middle of lines, as in RULER before May 2025",
        "rope_patch/tasks/variables.py",
        '    return "\\n".join(pieces)\n',
        '    return " ".join(pieces)\n',
        ("tests/tasks/test_ruler_tasks.py::test_each_assignment_has_a_line_of_its_own",),
    ),
    Defect(
        "answers of common words are in an order of their own, which a likelihood cannot know",
        "rope_patch/tasks/frequent_words.py",
        "            renamed.setdefault(entry, common[len(renamed)])\n",
        "            renamed.setdefault(entry, entry)\n",
        (
            "tests/tasks/test_ruler_tasks.py::test_common_words_are_counted_as_in_ruler_and_so_are_its_examples",
        ),
    ),
    Defect(
        "the control of a latent list has numbers that are an answer",
        "rope_patch/tasks/list_operations.py",
        "    answers = set() if text.planted else {str(value) for _, _, value in questions}\n",
        "    answers: set[str] = set()\n",
        ("tests/tasks/test_every_task.py::test_no_control_holds_an_answer",),
    ),
    Defect(
        "samples of one text get filler of their own lengths, and share nothing",
        "rope_patch/tasks/samples.py",
        "            units = _fit_to_length(size, length, room, task, units)\n",
        "            units = _fit_to_length(size, length, room, task, None)\n",
        ("tests/tasks/test_samples.py::test_samples_of_one_text_have_the_filler_of_the_longest",),
    ),
    Defect(
        "a control of perplexity has half the trained length, which nobody would cut to",
        "rope_patch/evaluation/perplexity_run.py",
        "self.control_context = session.trained_length if context is None else context",
        "self.control_context = session.trained_length // 2 if context is None else context",
        (
            "tests/evaluation/test_evaluation_pipeline.py::test_all_requested_measures_are_in_the_results",
        ),
    ),
    Defect(
        "lm-eval's rolling tasks read whole documents in one window",
        "rope_patch/evaluation/pipeline.py",
        "                lm.rolling_window = max(session.request.lengths)\n",
        "                lm.rolling_window = _UNLIMITED\n",
        (
            "tests/evaluation/measures/test_user_tasks.py::test_documents_are_read_in_windows_of_the_longest_length",
        ),
    ),
    Defect(
        "rows of a batch are padded where the rotation follows their length, and count padding",
        "rope_patch/inference/scorer.py",
        "    logits = model(padded, attention_mask=mask, **given).logits\n",
        "    logits = model(padded, **given).logits\n",
        (
            "tests/evaluation/test_language_model.py::test_likelihoods_are_right_on_both_sides_of_the_trained_length",
        ),
    ),
    Defect(
        "targets that are scored in one pass see one another",
        "rope_patch/inference/scorer.py",
        "    own = (owner[:, None] == owner[None]).tril()\n",
        "    own = (owner[:, None] >= owner[None]).tril()\n",
        ("tests/evaluation/test_language_model.py::test_choices_are_scored_in_one_pass",),
    ),
    Defect(
        "a token of one row is written to all rows of a reserved cache",
        "rope_patch/inference/decoding.py",
        "        if key_states.shape[0] != rows or key_states.shape[-2] > left:\n",
        "        if key_states.shape[-2] > left:\n",
        ("tests/inference/test_cache_batch.py::test_a_token_of_one_row_is_not_written_to_all",),
    ),
    Defect(
        "negative rows of a reserved cache count from rows that were dropped",
        "rope_patch/inference/decoding.py",
        "        indices = torch.arange(self.keys.shape[0], device=self.device)[indices.to(self.device)]\n",
        "        indices = torch.arange(self._buffers[0].shape[0], device=self.device)[indices.to(self.device)]\n",
        (
            "tests/inference/test_cache_batch.py::test_negative_rows_are_counted_from_the_last_one_in_use",
        ),
    ),
    Defect(
        "caches that drop keys are put together as if they kept all",
        "rope_patch/inference/decoding.py",
        "    return type(layer) is DynamicLayer and bool(layer.is_initialized)\n",
        "    return bool(layer.is_initialized)\n",
        ("tests/inference/test_cache_batch.py::test_layers_that_drop_keys_are_refused",),
    ),
    Defect(
        "the keys that a position map keeps are counted in no memory",
        "rope_patch/evaluation/measures/speed.py",
        '            record_bytes["turned keys"] = sum(map(_storage_bytes, copies))\n',
        "            del copies\n",
        (
            "tests/evaluation/measures/test_speed.py::test_the_keys_that_a_position_map_keeps_are_counted",
        ),
    ),
    Defect(
        "the plan takes texts that are asked at the same depths for as varied as others",
        "rope_patch/evaluation/decision_plan.py",
        "    answers = DEPTH_ANSWER_DEVIATION if has_equal_depths else ANSWER_DEVIATION\n",
        "    answers = ANSWER_DEVIATION\n",
        ("tests/evaluation/test_until_decided.py::test_texts_asked_at_the_same_depths_vary_less",),
    ),
    Defect(
        "a request of speed with the plain model alone asks for a ratio to nothing",
        "rope_patch/evaluation/profiles.py",
        "    ratios = {SPEED} if names == (BASELINE,) else set()\n",
        "    ratios: set[str] = set()\n",
        (
            "tests/evaluation/test_eval_request.py::test_profile_of_the_plain_model_alone_asks_for_no_ratio_of_times",
        ),
    ),
    Defect(
        "a number of 0 in a request of an evaluation counts as not given",
        "rope_patch/evaluation/request.py",
        "        if value is not None and value < least:\n",
        "        if value and value < least:\n",
        (
            "tests/evaluation/test_eval_request.py::test_bad_requests_read_no_weights_and_write_nothing",
        ),
    ),
    Defect(
        "a saved patch is patched again in an evaluation",
        "rope_patch/evaluation/request.py",
        "    if saved is None or set(request.methods) == {BASELINE}:\n",
        "    if True:\n",
        (
            "tests/evaluation/test_evaluation_pipeline.py::test_a_saved_patch_is_evaluated_without_patching_twice",
        ),
    ),
    Defect(
        "a saved patch without a native form is evaluated as the plain model",
        "rope_patch/evaluation/session.py",
        "        self.model = (read_model if patch_to_restore(self.path) is None else load)(\n",
        "        self.model = read_model(\n",
        (
            "tests/evaluation/test_evaluation_pipeline.py::test_a_saved_patch_is_evaluated_without_patching_twice",
        ),
    ),
    Defect(
        "one method that vLLM cannot do leaves the others without commands",
        "rope_patch/evaluation/report/vllm_commands.py",
        "            refusals.append(error)\n",
        "            raise\n",
        (
            "tests/evaluation/test_vllm_commands.py::TestCommands::test_a_refused_method_leaves_the_others_their_commands",
        ),
    ),
]
