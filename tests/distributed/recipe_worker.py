"""Run recipes one after another in one of several processes, and report observations.

Run as `recipe_worker.py FOLDER` with the variables that torchrun and accelerate's launcher set;
reads `FOLDER/jobs.json` and writes `FOLDER/RANK.json`, which test_shared_recipes.py checks.
"""

import contextlib
import inspect
import io
import json
import os
import shutil
import sys
from pathlib import Path

import shims
import torch
from helpers.processes import leave_process_group
from torch.distributed.tensor import DTensor
from training_loop import loop
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rope_patch import cli
from rope_patch.training import finetune, parse_settings, write_finished_model

RECIPES = {"finetune": finetune, "loop": loop}
FINISH = write_finished_model.__name__  # what both call at their end


class Observed:
    """Observe a run in this process: the layers' lengths, and the placement of weights."""

    def __init__(self):
        self.lengths, self.wrapped = set(), []
        self.elements = self.here = self.sharded = 0

    def __enter__(self):
        self.hook = torch.nn.modules.module.register_module_forward_pre_hook(self.see_layer)
        for entry_point in RECIPES.values():
            inspect.unwrap(entry_point).__globals__[FINISH] = self.finish
        return self

    def __exit__(self, *_):
        self.hook.remove()
        for entry_point in RECIPES.values():
            inspect.unwrap(entry_point).__globals__[FINISH] = write_finished_model

    def finish(self, run, model):
        self.see_model(model)
        return write_finished_model(run, model)

    def see_layer(self, module, args):
        if isinstance(module, LlamaDecoderLayer) and module.training:
            self.lengths.add(args[0].shape[1])

    def see_model(self, model):
        self.wrapped = [base_class.__name__ for base_class in type(model).__mro__]
        for parameter in model.parameters():
            is_sharded = isinstance(parameter, DTensor)
            self.elements += parameter.numel()
            self.here += (parameter.to_local() if is_sharded else parameter).numel()
            self.sharded += is_sharded


def run_job(job, folder):
    """Run a recipe; return its exit code, its output and the observations."""
    if job["resumes"] is not None and shims.RANK == 0:
        # Restore the state of a run that was stopped before its last step.
        shutil.copytree(folder / job["resumes"], folder / job["name"])
        shutil.rmtree(folder / job["name"] / "model")
        stage = folder / job["name"] / "stage-2"
        if stage.exists():
            shutil.rmtree(stage / "model")
            (stage / "finished.json").unlink()
        shutil.rmtree((stage if stage.exists() else stage.parent) / "checkpoint-2")
    shims.wait()
    os.environ["ACCELERATE_MIXED_PRECISION"] = job["precision"]  # as the launcher does
    command = [
        *("--config", str(folder / f"{job['name']}.yaml")),
        *("--output_dir", str(folder / job["name"])),
        *("--resume", "no" if job["resumes"] is None else "auto"),
    ]
    stderr, code = io.StringIO(), 0
    with Observed() as observed, contextlib.redirect_stderr(stderr):
        try:
            cli.run(lambda: RECIPES[job["recipe"]](parse_settings(command)[0]))
        except SystemExit as exit_info:
            code = exit_info.code
    print(f"---- {job['name']}: {code}", stderr.getvalue(), sep="\n", flush=True)
    shims.wait()
    return {
        "code": code,
        "said": stderr.getvalue(),
        "lengths": sorted(observed.lengths),
        "wrapped": observed.wrapped,
        "elements": observed.elements,
        "here": observed.here,
        "sharded": observed.sharded,
    }


def main(folder):
    shims.join(folder)
    if "ACCELERATE_USE_FSDP" in os.environ:
        shims.allow_fsdp2_on_cpu()
        shims.allow_ring_attention_on_cpu()
    jobs = json.loads((folder / "jobs.json").read_text())
    observations = {job["name"]: run_job(job, folder) for job in jobs}
    (folder / f"{shims.RANK}.json").write_text(json.dumps(observations))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
