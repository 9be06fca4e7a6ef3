"""Test RopePatchCallback in transformers' Trainer on two processes, against one process.

For each kind of parallelism, two CPU processes are started once; see trainer_worker.py.
"""

import json
from functools import cache

import pytest
import shims
import torch
import transformers
from helpers.processes import launch, shared_folder
from helpers.tiny_models import forward, tokens
from safetensors.torch import load_file
from test_shared_recipes import variables

import rope_patch

MODES = ["data parallel", "FSDP2"]
CLOSE = 5e-4  # logits are about 10
ALMOST = 1e-4

pytestmark = pytest.mark.skipif(
    shims.unsupported_reason() is not None, reason=str(shims.unsupported_reason())
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a mode's folder and its processes' reports; the first to ask starts them."""

    def run(mode):
        processes = 1 if mode == "one" else 2
        with shared_folder(tmp_path_factory, f"trainer_{mode.replace(' ', '_')}") as folder:
            paths = [folder / f"{rank}.json" for rank in range(processes)]
            if not all(path.exists() for path in paths):
                launch("trainer_worker.py", folder, processes=processes, **variables(mode))
            return folder, [json.loads(path.read_text()) for path in paths]

    return cache(run)


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("mode", MODES)
def test_losses_equal_those_of_one_process(runs, mode, kind):
    _, reports = runs(mode)
    _, (reference,) = runs("one")
    assert len(reference[kind]["losses"]) == 2
    for report in reports:
        assert report[kind]["losses"] == pytest.approx(reference[kind]["losses"], rel=ALMOST)
        assert report[kind]["patch"].startswith("yarn ×2")
        assert (report[kind]["sharded"] > 0) == (mode == "FSDP2")
        assert mode == "FSDP2" or report[kind]["wrapped"] == "DistributedDataParallel"


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("mode", MODES)
def test_resumed_run_equals_the_whole_one(runs, mode, kind):
    folder, reports = runs(mode)
    for report in reports:
        assert report[f"{kind} resumed"]["losses"] == report[kind]["losses"]
    name = "adapter_model" if kind == "lora" else "model"
    whole, resumed = (
        load_file(folder / each / "final" / f"{name}.safetensors")
        for each in (kind, f"{kind} resumed")
    )
    assert whole.keys() == resumed.keys()
    assert all(tensor.equal(resumed[key]) for key, tensor in whole.items())


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("name", ["checkpoint-1", "final"])
@pytest.mark.parametrize("mode", MODES)
def test_saved_folders_hold_the_rotation(runs, mode, name, kind):
    folder, _ = runs(mode)
    one, _ = runs("one")
    ids = tokens(500) + 3
    loaded = rope_patch.load(folder / kind / name)
    reference = rope_patch.load(one / kind / name)
    torch.testing.assert_close(
        forward(loaded, ids), forward(reference, ids), rtol=0, atol=20 * CLOSE
    )
    if kind == "full":
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder / kind / name)
        torch.testing.assert_close(forward(plain, ids), forward(loaded, ids), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_of_another_rotation_is_refused_by_every_process(runs, mode):
    _, reports = runs(mode)
    for report in reports:
        assert "cannot be resumed: it was trained with yarn ×2" in report["other"]["refused"]
