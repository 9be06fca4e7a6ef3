"""Train tiny models that really recall: the ones that tests and examples extend.

What: a tiny Llama, Qwen3 or Gemma 3 of 361k to 510k parameters, trained on 256 tokens at once, one
skill. In a long stretch of filler the model sees 8 key-value pairs; at the end it is asked the 8
keys in another order and must answer each value. A file of 1.5 or 2 MB thus shows what extension
methods are for: past its trained length the plain model forgets, with YaRN x4 it recalls up to
1,024 tokens. Linear x4 costs Llama and Qwen3 about half of their skill or more, at short lengths
too; Gemma 3, whose sliding layer it does not touch, pays little.

Why two tasks: recall alone is not learned at this size, the loss just stays flat. Half of every
batch is therefore a segment repeated at a random distance, another one in each row, so that
position alone is no shortcut and the model has to learn to look back for what it saw (induction).
With a curriculum of lengths on top, recall then takes about a thousand steps. The learning rate
falls to zero over the last 300, so that the seed matters little.

How, from the repository root (deterministic on its one thread, 2 to 6 minutes of one CPU core):

    python recipes/experiments/train_tiny.py --architecture llama

writes tests/assets/tiny-llama: weights, configs, tokenizer and a model card with a table of what
plain and scaled models recall. The tokenizer is a byte-level BPE of 512 ids, so any text
round-trips; the recall task merely borrows ids of that vocabulary. The models learn no English,
their perplexity on text means nothing.
"""

from __future__ import annotations

import argparse
import collections
import copy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

from rope_patch.lab import tasks
from rope_patch.tasks import texts

# The vocabulary: 3 special ids, then bytes and merges. The task uses disjoint ranges of the latter.
SPECIALS = ["<|pad|>", "<|eos|>", "<|unk|>"]
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
VOCAB_SIZE = 512
FILLER_IDS = range(3, 256)
KEY_IDS = range(256, 384)
VALUE_IDS = range(384, 512)

TRAINED_LENGTH = 256
STAGES = ((32, 3, 96), (64, 6, 64), (128, 8, 32), (256, 8, 16))  # (length, pairs, batch)
PASS_ACCURACY = 0.97  # over 20 steps, to move on
FINAL_STEPS = 300  # after the last stage is passed, as the learning rate falls to zero
WHOLE_SHARE = 0.2  # of the repeated segments that use the whole vocabulary
VOCABULARY = tasks.RecallVocabulary(FILLER_IDS, KEY_IDS, VALUE_IDS, VOCAB_SIZE, WHOLE_SHARE)
SEED = 6
FACTOR = 4.0
TABLE_LENGTHS = (128, 256, 512, 1024)


class Architecture(NamedTuple):
    """The differences between the tiny models.

    Attributes:
        title: The name in the model card.
        model_class: transformers' causal language model.
        settings: Settings of its config, which override SETTINGS.
        note: Text below the table of the model card.
    """

    title: str
    model_class: type[PreTrainedModel]
    settings: dict[str, Any]
    note: str


def _rope(theta: float) -> dict[str, Any]:
    """Return the rope_parameters of plain RoPE."""
    return {"rope_type": "default", "rope_theta": theta}


SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": TRAINED_LENGTH,
    "rope_parameters": _rope(1e4),
    "tie_word_embeddings": True,
    "pad_token_id": PAD_ID,
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
}
ARCHITECTURES = {
    "llama": Architecture("Llama", LlamaForCausalLM, {}, ""),
    "qwen3": Architecture("Qwen3", Qwen3ForCausalLM, {}, ""),
    "gemma3": Architecture(
        "Gemma 3",
        Gemma3ForCausalLM,
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 32,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {"sliding_attention": _rope(1e3), "full_attention": _rope(1e4)},
            # Embeddings, times sqrt(hidden_size), then start as large as what a layer adds behind
            # its norm. With the usual 0.02, recall was not learned in 1,600 steps.
            "initializer_range": 0.088,
        },
        " The first\nof 3 layers sees a window of 32 tokens; native scaling is for the other two.",
    ),
}


def build_config(architecture: str = "llama") -> PreTrainedConfig:
    """Return the config of a plain model: SETTINGS and those of its architecture."""
    spec = ARCHITECTURES[architecture]
    return spec.model_class.config_class(**copy.deepcopy(SETTINGS | spec.settings))


def scaled(model: PreTrainedModel, rope_type: str) -> PreTrainedModel:
    """Return the same weights under transformers' own scaling by FACTOR ("linear" or "yarn").

    With frequencies per layer type only full attention is scaled: a sliding window never sees
    further than in training.
    """
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = int(FACTOR * TRAINED_LENGTH)
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    parameters |= {"rope_type": rope_type, "factor": FACTOR}
    if rope_type == "yarn":
        parameters["original_max_position_embeddings"] = TRAINED_LENGTH
    twin = type(model)(config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def recall_batch(
    generator: torch.Generator, batch: int, length: int, pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences of this vocabulary with key-value pairs in them, and queries at the end."""
    return tasks.recall_batch(generator, VOCABULARY, batch, length, pairs)


def repeat_batch(
    generator: torch.Generator, batch: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens of this vocabulary with a repeated segment of S // 3."""
    return tasks.repeat_batch(generator, VOCABULARY, batch, length)


def correct_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return which labelled tokens the argmax gets right: `[B, S, V]`, `[B, S]` -> bool `[N]`."""
    labels = labels[:, 1:]
    scored = labels != -100
    return logits[:, :-1][scored].argmax(-1) == labels[scored]


def recall_accuracy(
    model: torch.nn.Module, length: int, sequences: int = 48, pairs: int = 8, seed: int = 1234
) -> float:
    """Return the share of values recalled, teacher forced; see `recalled`."""
    return recalled(model, length, sequences, pairs, seed).float().mean().item()


@torch.no_grad()
def recalled(
    model: torch.nn.Module, length: int, sequences: int, pairs: int, seed: int
) -> torch.Tensor:
    """Return which values are recalled, teacher forced, bool, `[sequences, pairs]`.

    Args:
        model: A causal language model on this vocabulary, on the CPU.
        length: Tokens per sequence, queries included.
        sequences: Number of sequences.
        pairs: Key-value pairs per sequence, each of which is asked for.
        seed: Seed of the sequences; the same seed asks every model the same questions.
    """
    batch = recall_batch(torch.Generator().manual_seed(seed), sequences, length, pairs)
    parts = (part.split(max(1, 8192 // length)) for part in batch)
    answers = ((model(input_ids=x, use_cache=False).logits, y) for x, y in zip(*parts, strict=True))
    return torch.cat([correct_tokens(*each) for each in answers]).view(sequences, pairs)


def train(seed: int = SEED, max_steps: int = 2000, architecture: str = "llama") -> PreTrainedModel:
    """Train a model.

    Args:
        seed: Seed of the weights and of everything drawn; the same seed trains the same model.
        max_steps: Steps after which training gives up.
        architecture: A key of ARCHITECTURES.

    Raises:
        RuntimeError: Recall was not learned within `max_steps`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ARCHITECTURES[architecture].model_class(build_config(architecture))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    recent: collections.deque[float] = collections.deque(maxlen=20)
    stage, passed_at = 0, None
    with tqdm(desc="training", unit="step", mininterval=2, file=sys.stderr) as bar:
        for step in range(max_steps):
            remaining = 1.0 if passed_at is None else 1 - (step - passed_at) / FINAL_STEPS
            if remaining <= 0:
                return model.eval()
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1, (step + 1) / 100) * remaining
            length, pairs, batch = STAGES[stage]
            recall_ids, recall_labels = recall_batch(generator, batch // 2, length, pairs)
            repeat_ids, repeat_labels = repeat_batch(generator, batch // 2, length)
            logits = model(torch.cat([recall_ids, repeat_ids]), use_cache=False).logits
            labels = torch.cat([recall_labels, repeat_labels])
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            correct = correct_tokens(logits[: batch // 2].detach(), recall_labels)
            recent.append(correct.float().mean().item())
            accuracy = sum(recent) / len(recent)
            bar.update()
            state = {"length": length, "loss": f"{loss.item():.3f}", "recall": f"{accuracy:.3f}"}
            bar.set_postfix(state, refresh=False)
            if passed_at is None and len(recent) == recent.maxlen and accuracy > PASS_ACCURACY:
                if stage + 1 < len(STAGES):
                    stage += 1
                    recent.clear()
                else:
                    passed_at = step
    raise RuntimeError(f"recall was not learned in {max_steps} steps; try another seed than {seed}")


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of VOCAB_SIZE ids with the special ids first; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[PAD_ID],
        eos_token=SPECIALS[EOS_ID],
        unk_token=SPECIALS[UNK_ID],
        clean_up_tokenization_spaces=False,
    )


def accuracy_table(model: PreTrainedModel) -> str:
    """Return recall at several lengths, plain and under transformers' scalings, as Markdown."""
    rows = {"plain": model}
    rows |= {
        f"native {kind}, factor {FACTOR:g}": scaled(model, kind) for kind in ("linear", "yarn")
    }
    lines = ["| accuracy at tokens | " + " | ".join(map(str, TABLE_LENGTHS)) + " |"]
    lines.append("|---" * (len(TABLE_LENGTHS) + 1) + "|")
    for name, twin in rows.items():
        scores = [f"{recall_accuracy(twin, length):.3f}" for length in TABLE_LENGTHS]
        lines.append(f"| {name} | " + " | ".join(scores) + " |")
    return "\n".join(lines)


def render_model_card(model: PreTrainedModel, architecture: str, seed: int) -> str:
    """Return the model card with the model's table."""
    title, *_, note = ARCHITECTURES[architecture]
    size = f"{model.num_parameters() / 1000:.0f}k"
    return f"""# Tiny {title}

{size} parameters, trained on 256 tokens at once to recall key-value pairs from filler, for tests
and examples of context extension. Made by
`python recipes/experiments/train_tiny.py --architecture {architecture} --seed {seed}`.

{accuracy_table(model)}

48 sequences of 8 queries each: plus or minus about 0.02.{note}

The tokenizer is a byte-level BPE whose merges come from Jane Austen's Emma (public domain). The
model knows no English: on text it only exercises code.
"""


def write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, readme: str):
    """Write model, tokenizer and card; each file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        new = Path(temporary)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / "README.md").write_text(readme)
        for path in new.iterdir():
            path.chmod(0o644)  # safetensors writes for its owner alone
            path.replace(folder / path.name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; train, write and print the card."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama")
    parser.add_argument("--out", type=Path, help="default: tests/assets/tiny-ARCHITECTURE")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--text", default="emma", help="a novel's name or a file, for the tokenizer"
    )
    options = parser.parse_args(arguments)
    try:
        text = texts.read_text(options.text)
    except ValueError as error:
        sys.exit(f"error: {error}")
    torch.set_num_threads(1)
    model = train(options.seed, architecture=options.architecture)
    readme = render_model_card(model, options.architecture, options.seed)
    folder = options.out or Path(f"tests/assets/tiny-{options.architecture}")
    write(folder, model, train_tokenizer(text), readme)
    print(readme)


if __name__ == "__main__":
    main()
