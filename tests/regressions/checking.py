"""Defects of diagnosing a model and of verifying a running engine."""

from regressions.defect import Defect

_CHECKS = "tests/diagnosing/checks"

DEFECTS = [
    Defect(
        "an engine's noise is measured on tokens that engine and model find impossible",
        "rope_patch/verifying/reference.py",
        "        if second not in possible:\n            second = possible[second % len(possible)]\n",
        "",
        ("tests/verifying/test_verdicts.py::test_noise_is_measured_on_tokens_that_are_possible",),
    ),
    Defect(
        "saved frequencies meet new angles, because float32 and float64 differ in the last bit",
        "rope_patch/diagnosing/advice.py",
        "self.turns_at_length > self.turns * (1 + _ROUNDING)",
        "self.turns_at_length > self.turns",
        ("tests/diagnosing/test_diagnosis.py::test_rounding_is_no_new_angle",),
    ),
    Defect(
        "a table of pairs counts a map's texts by their length, not by its distances",
        "rope_patch/diagnosing/advice.py",
        "    distance = length if largest_distance is None else largest_distance\n",
        "    distance = length\n",
        ("tests/diagnosing/test_diagnosis.py::test_maps_keep_pairs_within_the_angles_of_training",),
    ),
    Defect(
        "overwritten frequencies are called an edit of the config that nobody made",
        "rope_patch/diagnosing/live_checks.py",
        "    if same or not as_built:\n        return None\n",
        "    return None\n",
        (f"{_CHECKS}/test_initialisation.py::test_overwritten_frequencies_are_no_edited_config",),
    ),
    Defect(
        "a softmax scale of latent attention that lost its mscale is healthy",
        "rope_patch/diagnosing/live_checks.py",
        "    lost = list(lost_softmax_scales(subject.model, subject.handle))\n",
        "    lost = []\n",
        (
            f"{_CHECKS}/test_initialisation.py::test_softmax_scale_that_lost_mscale_is_named_and_restored",
        ),
    ),
    Defect(
        "frequencies that were never computed are healthy where a patched model lost them",
        "rope_patch/diagnosing/live_checks.py",
        "    for rotary, name in lost_patched_buffers(subject.model, subject.handle):\n",
        "    for rotary, name in ():\n",
        (
            f"{_CHECKS}/test_initialisation.py::test_patched_model_that_transformers_initialised_again",
        ),
    ),
    Defect(
        "uneven factors of a config count as frequencies that were lost",
        "rope_patch/diagnosing/live_checks.py",
        "            continue  # transformers computes the same, however odd the config's factors\n",
        "            pass\n",
        (
            f"{_CHECKS}/test_initialisation.py::test_uneven_factors_of_a_config_are_not_lost_frequencies",
        ),
    ),
    Defect(
        "a misspelt key of rope_parameters is not named",
        "rope_patch/diagnosing/config_checks.py",
        "        yield from _misspelt_keys(layer)\n",
        "",
        (f"{_CHECKS}/test_silent_misconfigurations.py::test_misspelt_keys",),
    ),
    Defect(
        "a longer max_position_embeddings on a live model counts as an extension",
        "rope_patch/diagnosing/live_checks.py",
        "            yield from _raised_max_positions_finding(facts, rotary)\n",
        "",
        (f"{_CHECKS}/test_silent_misconfigurations.py::test_length_edited_after_loading",),
    ),
    Defect(
        "a flat dict beside layer types, which transformers ignores, counts as a scaling",
        "rope_patch/diagnosing/config_checks.py",
        "    yield from _flat_dict_finding(facts)\n",
        "",
        (
            f"{_CHECKS}/test_silent_misconfigurations.py::test_flat_dict_on_a_model_with_layer_types",
        ),
    ),
    Defect(
        "the key is sent to whatever server a redirect names",
        "rope_patch/verifying/clients.py",
        "        if _origin(newurl) != _origin(req.full_url):\n",
        "        if False:\n",
        (
            "tests/verifying/test_hostile_servers.py::test_the_key_goes_to_the_server_that_was_named_alone",
        ),
    ),
    Defect(
        "a redirect to another port of one host counts as the same server",
        "rope_patch/verifying/clients.py",
        "    return parts.scheme, parts.hostname, standard if parts.port is None else parts.port\n",
        "    return parts.scheme, parts.hostname, standard\n",
        (
            "tests/verifying/test_hostile_servers.py::test_the_key_goes_to_the_server_that_was_named_alone",
        ),
    ),
    Defect(
        "a server that sends a byte a second never meets the deadline",
        "rope_patch/verifying/clients.py",
        "        thread.join(max(left, 0.0))\n",
        "        thread.join(20.0)\n",
        (
            "tests/verifying/test_hostile_servers.py::test_a_server_that_drips_bytes_meets_the_deadline",
        ),
    ),
    Defect(
        "each answer may take the whole time budget",
        "rope_patch/verifying/clients.py",
        "        left = self.seconds - self._waited\n",
        "        left = self.seconds\n",
        (
            "tests/verifying/test_hostile_servers.py::test_the_budget_is_that_of_all_answers_together",
        ),
    ),
    Defect(
        "a garbage status line is a crash",
        "rope_patch/verifying/clients.py",
        "        except http.client.HTTPException as error:\n",
        "        except ZeroDivisionError as error:\n",
        (
            "tests/verifying/test_hostile_servers.py::test_a_server_that_is_no_engine_is_an_error_and_no_verdict",
        ),
    ),
    Defect(
        "the deadline amid an answer throws the verdict of those before it away",
        "rope_patch/verifying/pipeline.py",
        "                        if not self._is_over():\n                            raise\n",
        "                        raise\n",
        (
            "tests/verifying/test_hostile_servers.py::test_the_deadline_amid_an_answer_leaves_the_verdict_of_those_before_it",
        ),
    ),
    Defect(
        "hypotheses that the prompts cannot tell apart are one verdict",
        "rope_patch/verifying/verdict.py",
        "    elif not set(explains).isdisjoint(RIGHT):\n",
        "    elif False:\n",
        ("tests/verifying/test_verdicts.py::test_hypotheses_within_the_noise_floor_are_one_group",),
    ),
    Defect(
        "the closest hypothesis explains an engine whose rotation none has",
        "rope_patch/verifying/verdict.py",
        "    if not _is_explained(rest, noise, rivals, closest):\n",
        "    if False:\n",
        ("tests/verifying/test_verdicts.py::test_rotation_that_no_hypothesis_has_is_no_verdict",),
    ),
    Defect(
        "a checkpoint's own LongRoPE counts as right by its short factors at any length",
        "rope_patch/verifying/asked_rotation.py",
        "return self._own_rotation_at(length) if self._own_follows_length else own",
        "return own",
        (
            "tests/verifying/test_verdicts.py::test_scaling_of_a_checkpoint_is_asked_for_where_no_method_is_named",
        ),
    ),
    Defect(
        "the constants of a checkpoint's own scaling are no hypotheses",
        "rope_patch/verifying/hypotheses.py",
        "            return _if_possible(_own_with, asked, name, value)\n",
        "            return None\n",
        (
            "tests/verifying/test_verdicts.py::test_scaling_of_a_checkpoint_is_asked_for_where_no_method_is_named",
        ),
    ),
    Defect(
        "what early prompts rule out for one hypothesis stays out when another one is closest",
        "rope_patch/verifying/pipeline.py",
        "            behind = [each for each in self.open if self.evidence.unread(each.name)]\n",
        "            behind = []\n",
        ("tests/verifying/test_verdicts.py::test_hypothesis_that_comes_back_reads_all_prompts",),
    ),
    Defect(
        "the file of a graph that llama.cpp lacks is verified as transformers rotates it",
        "rope_patch/verifying/engine_detection.py",
        "    if what_graph_reads(architecture) is None:\n",
        "    if False:\n",
        (
            "tests/verifying/test_local_files.py::test_gguf_file_that_llama_cpp_rotates_otherwise_is_refused",
        ),
    ),
    Defect(
        "a folder that was saved with a patch is verified as the plain model",
        "rope_patch/verifying/engine_detection.py",
        "    read = read_model if patch_to_restore(path) is None else load\n",
        "    read = read_model\n",
        ("tests/verifying/test_local_files.py::test_folder_that_save_wrote",),
    ),
]
