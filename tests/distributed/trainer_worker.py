"""Run transformers' Trainer with RopePatchCallback in one of several processes.

Run as `trainer_worker.py FOLDER` with the variables that torchrun and accelerate's launcher set;
writes `FOLDER/RANK.json`, which test_shared_trainer.py checks.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import datasets
import peft
import shims
import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from helpers.processes import leave_process_group
from torch.distributed.tensor import DTensor

import rope_patch

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
METHOD = {"method": "yarn", "factor": 2}
ROWS = 4  # of one step, in all processes together


def rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 400, (16, 400), generator=generator).tolist()
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def train(folder, *, lora=False, resume=None, method=METHOD):
    """Train, save and describe a run; return the error of a refused one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    if lora:
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    callback = rope_patch.RopePatchCallback(**method)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            per_device_train_batch_size=ROWS // SIZE,
            learning_rate=1e-3,
            save_steps=2,
            logging_steps=1,
            seed=7,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows(),
        callbacks=[callback],
    )
    try:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    except rope_patch.Refused as error:
        return {"refused": str(error)}
    trainer.save_model(folder / "final")
    history = trainer.state.log_history
    return {
        "losses": [log["loss"] for log in history if "loss" in log],
        "sharded": sum(isinstance(p, DTensor) for p in trainer.model_wrapped.parameters()),
        "wrapped": type(trainer.model_wrapped).__name__,
        "patch": str(rope_patch.current(trainer.model)),
    }


def wait():
    """Synchronise all processes, and reset accelerate's state."""
    if dist.is_initialized():
        dist.barrier()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def main(folder):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    PartialState.destroy_process_group = lambda *_: None  # all runs share it
    if SIZE > 1:
        dist.init_process_group(
            "gloo",
            init_method=(folder / "rendezvous").as_uri(),
            rank=RANK,
            world_size=SIZE,
            timeout=timedelta(seconds=60),
        )
    if "ACCELERATE_USE_FSDP" in os.environ:
        shims.allow_fsdp2_on_cpu()
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    reports = {}
    for name, changes in {
        "full": {},
        "lora": {"lora": True},
        "full resumed": {"resume": folder / "full" / "checkpoint-2"},
        "lora resumed": {"lora": True, "resume": folder / "lora" / "checkpoint-2"},
        "other": {"resume": folder / "full" / "checkpoint-2", "method": {**METHOD, "factor": 4}},
    }.items():
        wait()
        reports[name] = train(folder / name, **changes)
        print("----", name, reports[name], flush=True)
    wait()
    (folder / f"{RANK}.json").write_text(json.dumps(reports))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
