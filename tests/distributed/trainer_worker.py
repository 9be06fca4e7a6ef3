"""Run transformers' Trainer with RopePatchCallback in one of several processes.

Run as `trainer_worker.py FOLDER` with the variables that torchrun and accelerate's launcher set;
writes `FOLDER/RANK.json`, which test_shared_trainer.py checks.
"""

import json
import os
import sys
from pathlib import Path

import datasets
import peft
import shims
import torch
import transformers
from helpers.processes import leave_process_group
from torch.distributed.tensor import DTensor

import rope_patch

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
METHOD = {"method": "yarn", "factor": 2}
ROWS = 4  # of one step, in all processes together


def rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 400, (8, 280), generator=generator).tolist()
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
            max_steps=2,
            per_device_train_batch_size=ROWS // shims.SIZE,
            learning_rate=1e-3,
            save_steps=1,
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


def main(folder):
    shims.join(folder)
    transformers.logging.set_verbosity_error()
    if "ACCELERATE_USE_FSDP" in os.environ:
        shims.allow_fsdp2_on_cpu()
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    reports = {}
    for name, changes in {
        "full": {},
        "lora": {"lora": True},
        "full resumed": {"resume": folder / "full" / "checkpoint-1"},
        "lora resumed": {"lora": True, "resume": folder / "lora" / "checkpoint-1"},
        "other": {"resume": folder / "full" / "checkpoint-1", "method": {**METHOD, "factor": 4}},
    }.items():
        shims.wait()
        reports[name] = train(folder / name, **changes)
        print("----", name, reports[name], flush=True)
    shims.wait()
    (folder / f"{shims.RANK}.json").write_text(json.dumps(reports))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
