"""Test that evaluations of quantised weights are told apart from those of the checkpoint."""

import pytest
from helpers.evaluations import answer_lines, measured_numbers, request

from rope_patch.evaluation import vllm_commands
from rope_patch.evaluation.pipeline import evaluate

pytest.importorskip("gguf")
TASKS = ("rp_json_kv_ll", "perplexity")


def run(folder, **changes):
    fields = {"tasks": TASKS, "lengths": (336,), "depths": (50,), "per_text": 1, **changes}
    return evaluate(request(folder, **fields))


def test_quantised_weights_have_their_own_answers(tmp_path):
    plain = run(tmp_path)
    before = answer_lines(tmp_path)
    quantised = run(tmp_path, quantization="q4_0")
    assert plain["run"]["quantization"] is None
    assert quantised["run"]["quantization"] == "Q4_0"
    assert quantised["run"]["name"] == "tiny-llama, Q4_0"
    assert plain["run"]["weights"] != quantised["run"]["weights"]
    assert measured_numbers(plain) != measured_numbers(quantised)
    # No answer was taken over, and the same command finds all of its own.
    after = answer_lines(tmp_path)
    assert len(after) == 2 * len(before)
    again = run(tmp_path, quantization="Q4_0")
    assert answer_lines(tmp_path) == after
    assert measured_numbers(again) == measured_numbers(quantised)
    assert again["run"]["continued"]
    page = (tmp_path / "report.md").read_text()
    assert "Weights quantised to" in page
    assert "# tiny-llama, Q4\\_0" in page


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_bitsandbytes(tmp_path, name):
    pytest.importorskip("bitsandbytes")
    plain = run(tmp_path, tasks=("perplexity",))
    quantised = run(tmp_path, tasks=("perplexity",), quantization=name)
    assert quantised["run"]["quantization"] == name
    assert quantised["run"]["weights"] != plain["run"]["weights"]
    assert quantised["run"]["not_run"] == []
    assert measured_numbers(quantised) != measured_numbers(plain)


def test_refusals_come_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="unknown quantization 'int3'"):
        run(tmp_path, quantization="int3")
    with pytest.raises(ValueError, match="vllm quantises by itself"):
        vllm_commands.commands("vllm", request(tmp_path, quantization="Q4_0"))
