"""Test RopePatchCallback in TRL's trainers: supervised, and reinforcement with a rule's reward."""

import logging
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers
from trainer_runs import (
    METHOD,
    TARGET,
    TINY,
    assert_same_weights,
    callback,
    logits,
    losses,
    read_model,
    read_tokenizer,
    settings,
    tokenized_rows,
    weights,
)

import rope_patch

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

SIDECAR = "rope_patch.json"
CLOSE = 5e-4  # logits are about 10, and transformers computes frequencies in float32
NEW = 12  # tokens of a completion
ROWS = (400, 60, 300, 500, 90, 350, 200, 450)


def lora():
    return peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)


def sft(folder, *, adapter=False, model=None, callbacks=None, **changes):
    changes = {"packing": True, "max_length": TARGET, "bf16": False, **changes}
    return trl.SFTTrainer(
        model=read_model() if model is None else model,
        args=settings(folder, trl.SFTConfig, **changes),
        train_dataset=tokenized_rows(ROWS).remove_columns("labels"),
        processing_class=read_tokenizer(),
        callbacks=[callback()] if callbacks is None else callbacks,
        peft_config=lora() if adapter else None,
    )


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def sft_run(request, tmp_path_factory):
    """Return a finished run on packed rows: folder, trainer, whether it trained an adapter."""
    folder = tmp_path_factory.mktemp("sft")
    trainer = sft(folder, adapter=request.param)
    trainer.train()
    trainer.save_model(folder / "final")
    return folder, trainer, request.param


def test_resumed_sft_equals_the_whole_run(sft_run, tmp_path):
    folder, whole, adapter = sft_run
    resumed = sft(tmp_path, adapter=adapter)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    resumed.save_model(tmp_path / "final")
    assert_same_weights(tmp_path / "final", folder / "final")
    assert losses(resumed) == losses(whole)


def test_saved_sft_model_is_reloaded_by_us_and_by_transformers(sft_run):
    folder, trainer, adapter = sft_run
    expected = logits(trainer.model)
    assert (folder / "checkpoint-4" / SIDECAR).is_file()
    loaded = rope_patch.load(folder / "final")
    assert logits(loaded).equal(expected)
    if not adapter:
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
        assert (logits(plain) - expected).abs().max() < CLOSE
        return
    # PEFT alone puts the adapter on an unpatched base, and load_adapter on a patched one.
    bare = peft.PeftModel.from_pretrained(read_model(), folder / "final")
    assert (logits(bare) - expected).abs().max() > 100 * CLOSE
    ours = rope_patch.load_adapter(read_model(), folder / "final")
    assert logits(ours).equal(expected)


def test_packed_loss_is_that_of_each_document_alone(tmp_path):
    trainer = sft(tmp_path, max_steps=1, per_device_train_batch_size=8, save_strategy="no")
    documents = [
        part
        for row in trainer.train_dataset
        for part in torch.tensor(row["input_ids"]).split(row["seq_lengths"])
    ]
    assert sorted(map(len, documents)) == sorted(ROWS)
    assert any(len(row["seq_lengths"]) > 1 for row in trainer.train_dataset)
    rope_patch.patch_checkpoint(TINY, tmp_path / "native", **METHOD)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    with torch.no_grad():
        terms = [
            torch.nn.functional.cross_entropy(
                native(ids[None]).logits[0, :-1].double(), ids[1:], reduction="none"
            )
            for ids in documents
        ]
    trainer.train()
    assert losses(trainer)[1] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-4)


def test_packed_documents_beyond_the_length_are_refused(tmp_path):
    trainer = sft(tmp_path, max_length=2 * TARGET, max_steps=1)
    trainer.train()  # no document is longer, though rows are
    trainer = sft(tmp_path, max_length=450, callbacks=[callback(factor=1.5)])
    with pytest.raises(rope_patch.Refused, match=r"450 tokens.*384"):
        trainer.train()


PROMPTS = datasets.Dataset.from_dict(
    {"prompt": ["the brown fox " * 50, "a b c d e f " * 60, "one two " * 70, "red blue " * 60]}
)


def reward(completions, **_):
    """Reward completions of many different letters."""
    return [float(len(set(completion))) for completion in completions]


class RecordingTrainer(trl.GRPOTrainer):
    """Keep each step's completions, with the log-probabilities that the trainer computed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        kept = output["completion_ids"].shape[1]
        with torch.no_grad():
            policy, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, kept)
        self.seen.append((ids, mask, kept, policy, output.get("ref_per_token_logps")))
        return output


def grpo(folder, model=None, callbacks=None, *, adapter=False, **changes):
    changes = {"beta": 0.1, "max_steps": 2, "bf16": False, "temperature": 1.0, **changes}
    options = {"num_generations": 2, "max_completion_length": NEW, "save_strategy": "no"}
    return RecordingTrainer(
        model=read_model() if model is None else model,
        reward_funcs=reward,
        args=settings(folder, trl.GRPOConfig, **{**options, **changes}),
        train_dataset=PROMPTS,
        processing_class=read_tokenizer(),
        callbacks=[callback()] if callbacks is None else callbacks,
        peft_config=lora() if adapter else None,
    )


@torch.no_grad()
def log_probabilities(model, ids, mask, kept):
    """Return those of the last `kept` tokens, of each row by itself and without its padding."""
    rows = []
    for row, row_mask in zip(ids, mask, strict=True):
        own = row[row_mask.bool()]
        scores = model.eval()(own[None]).logits[0].log_softmax(-1)
        values = scores[:-1].gather(1, own[1:, None])[:, 0]
        count = int(row_mask[-kept:].sum())
        rows.append(torch.nn.functional.pad(values[-count:], (0, kept - count)))
    return torch.stack(rows)


def difference(got, expected, mask):
    return ((got - expected).abs() * mask[:, -got.shape[1] :]).max().item()


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory):
    """Return a finished run from a patched folder, with a reference model, and its folder."""
    folder = tmp_path_factory.mktemp("grpo")
    rope_patch.patch_checkpoint(TINY, folder / "patched", **METHOD)
    trainer = grpo(folder, str(folder / "patched"), [rope_patch.RopePatchCallback()])
    trainer.train()
    trainer.save_model(folder / "final")
    return folder, trainer


def test_rollouts_of_the_exported_checkpoint_have_the_trainers_log_probabilities(grpo_run):
    """Plain transformers stands for the rollout engine: it reads the folder's config alone."""
    folder, trainer = grpo_run
    ids, mask, kept, policy, _ = trainer.seen[0]
    assert mask.sum(1).max() > TARGET // 2  # beyond the trained length
    engine = transformers.AutoModelForCausalLM.from_pretrained(folder / "patched")
    assert rope_patch.current(engine) is None
    assert difference(policy, log_probabilities(engine, ids, mask, kept), mask) < CLOSE
    unpatched = log_probabilities(read_model(), ids, mask, kept)
    assert difference(policy, unpatched, mask) > 20 * CLOSE


def test_saved_policy_has_the_log_probabilities_of_the_trained_one(grpo_run):
    folder, trainer = grpo_run
    ids, mask, kept, before, _ = trainer.seen[-1]
    with torch.no_grad():
        now, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, kept)
    engine = transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
    assert difference(now, log_probabilities(engine, ids, mask, kept), mask) < CLOSE
    assert difference(now, before, mask) > 20 * CLOSE  # the last step changed the policy


def test_export_states_what_the_trained_policy_rotates_by(grpo_run):
    folder, trainer = grpo_run
    exported = rope_patch.export(trainer.model, "vllm")
    saved = rope_patch.export(transformers.AutoConfig.from_pretrained(folder / "final"), "vllm")
    assert exported.config == saved.config
    assert exported.config["rope_parameters"]["rope_type"] == "yarn"


def test_reference_of_a_patched_folder_is_patched(grpo_run):
    _, trainer = grpo_run
    *_, policy, reference = trainer.seen[0]
    assert trainer.ref_model.config.rope_parameters["rope_type"] == "yarn"
    mask = trainer.seen[0][1]
    assert difference(policy, reference, mask) < CLOSE  # before the first step


def test_reference_of_a_patched_model_is_not_patched_and_is_warned_of(tmp_path, caplog):
    trainer = grpo(tmp_path, max_steps=1)
    assert rope_patch.current(trainer.ref_model) is None
    with caplog.at_level(logging.WARNING, logger="rope_patch"):
        trainer.train()
    assert "is not patched: beyond the trained length" in caplog.text
    ids, mask, kept, policy, reference = trainer.seen[0]
    assert difference(reference, log_probabilities(read_model(), ids, mask, kept), mask) < CLOSE
    assert difference(policy, reference, mask) > 20 * CLOSE


def test_reference_can_be_patched_by_hand(tmp_path):
    own = callback()
    trainer = grpo(tmp_path, callbacks=[own], max_steps=1)
    rope_patch.patch(trainer.ref_model, own.handle.extension)
    trainer.train()
    _, mask, _, policy, reference = trainer.seen[0]
    assert difference(policy, reference, mask) == 0


def test_reference_of_an_adapter_is_its_patched_base(tmp_path, caplog):
    trainer = grpo(tmp_path, adapter=True, max_steps=1)
    with caplog.at_level(logging.WARNING, logger="rope_patch"):
        trainer.train()
    assert "reference" not in caplog.text
    ids, mask, kept, _, reference = trainer.seen[0]
    rope_patch.patch_checkpoint(TINY, tmp_path / "patched", **METHOD)
    engine = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert difference(reference, log_probabilities(engine, ids, mask, kept), mask) < CLOSE
    trainer.save_model(tmp_path / "final")
    assert weights(tmp_path / "final")
    assert rope_patch.load(tmp_path / "final").peft_config


def test_vllm_on_an_unpatched_checkpoint_is_refused(tmp_path):
    args = SimpleNamespace(use_vllm=True, vllm_mode="colocate")

    def begin(model):
        rope_patch.RopePatchCallback().on_init_end(args, None, None, model=model)

    model = read_model()
    rope_patch.patch(model, **METHOD)
    with pytest.raises(rope_patch.Refused, match=r"rollout engine.*patch_checkpoint"):
        begin(model)
    rope_patch.patch_checkpoint(TINY, tmp_path / "patched", **METHOD)
    folder_model = rope_patch.load(tmp_path / "patched")
    begin(folder_model)
    rope_patch.patch(folder_model, "yarn", factor=4)
    with pytest.raises(rope_patch.Refused, match="sample from another model"):
        begin(folder_model)
    args.vllm_mode = "server"  # runs on whatever its operator gave it
    begin(model)
