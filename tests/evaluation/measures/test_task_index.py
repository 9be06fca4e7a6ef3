"""Test the index of lm-eval's tasks and of users' folders."""

import pytest
from helpers.user_tasks import write_tasks

from rope_patch.evaluation.measures.task_index import TaskIndex


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("user") / "tasks")


@pytest.fixture(scope="module")
def index(folder):
    return TaskIndex([folder])


def test_a_folder_has_its_tasks_tags_and_groups(index):
    assert set(index.own) == {"my_lists", "my_sums", "my_pages", "my_tag", "my_group"}
    assert index.members("my_tag") == ["my_lists", "my_sums"]
    assert index.members("my_group") == ["my_lists", "my_pages"]
    assert index.members("my_sums") == ["my_sums"]


def test_a_users_task_takes_a_length_if_its_metadata_have_one(index, tmp_path):
    names = ("my_lists", "my_sums", "my_pages")
    assert [index.accepts_length(name) for name in names] == [True, False, False]
    assert index.length_metadata("my_lists", 4096) == {"length": 4096}
    text = "task: like_ruler\nmetadata: {max_seq_lengths: [4096]}\n"
    (tmp_path / "a.yaml").write_text(text)
    assert TaskIndex([str(tmp_path)]).length_metadata("like_ruler", 8192) == {
        "max_seq_lengths": [8192]
    }


def test_lm_evals_tasks_are_known_beside_a_folder(index):
    assert index.accepts_length("longcxt")
    assert len(index.members("ruler")) == len(index.members("longcxt")) == 13
    assert index.length_metadata("babilong", 4096) == {"max_seq_lengths": "4k"}
    assert index.length_metadata("niah_single_1", 4096) == {"max_seq_lengths": [4096]}
    assert not index.accepts_length("arc_easy")


def test_unknown_names_get_a_hint(index):
    with pytest.raises(ValueError, match=r"'niah_singel_1' \(did you mean 'niah_single_1'"):
        index.entry("niah_singel_1")
    with pytest.raises(ValueError, match=r"'my_list' \(did you mean 'my_lists'.*--include-path"):
        index.entry("my_list")


def test_folders_that_are_no_folders_of_tasks_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none is not there, expected a folder"):
        TaskIndex([str(tmp_path / "none")])
    (tmp_path / "file.yaml").write_text("task: [a\n")
    with pytest.raises(ValueError, match=r"file.yaml is a file, expected a folder"):
        TaskIndex([str(tmp_path / "file.yaml")])
    with pytest.raises(ValueError, match=r"file.yaml cannot be read as a task of lm-eval: .*line"):
        TaskIndex([str(tmp_path)])
    (tmp_path / "file.yaml").write_text("task: a\ninclude: missing.yaml\n")
    with pytest.raises(ValueError, match=r"file.yaml cannot be read .*missing.yaml"):
        TaskIndex([str(tmp_path)])
    (tmp_path / "file.yaml").write_text("doc_to_text: a\n")
    with pytest.raises(ValueError, match="has no task, expected YAML files with the key `task`"):
        TaskIndex([str(tmp_path)])


def test_a_group_with_a_task_of_ours_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("group: mine\ntask: [rp_vt]\n")
    with pytest.raises(ValueError, match="'rp_vt' is a task of this package: name it in --tasks"):
        TaskIndex([str(tmp_path)]).members("mine")


def test_a_name_in_two_folders_is_refused(folder, tmp_path):
    (tmp_path / "a.yaml").write_text("task: my_sums\n")
    with pytest.raises(ValueError, match="both have a task 'my_sums'; rename"):
        TaskIndex([folder, str(tmp_path)])
