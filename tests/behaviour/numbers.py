"""Record frequencies, and logits, saved files and exports of tiny models under every method."""

import contextlib
import inspect
import json
import logging

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import rope_patch
from behaviour.cases import ENGINES

MODELS = ("tiny-llama", "tiny-qwen3", "tiny-gemma3")
FACTOR = 4
FACTORS = [1 + 0.25 * pair for pair in range(16)]  # of the tiny models' 16 pairs
OPTIONS = {
    "longrope": {"factor": FACTOR, "long_factor": FACTORS},
    "mixed-longrope": {"factor": FACTOR, "long_factor": FACTORS},
    "proportional": {"factor": FACTOR, "partial_rotary_factor": 0.5},
    "dpe": {"groups": [2]},
    "default": {"factor": 1},
    "nope": {},
} | {name: {} for name in ("rerope", "leaky-rerope", "self-extend", "jet-long", "dca", "string")}
OPTIONS |= {name: {} for name in ("lampe", "lm-infinite", "streaming")}
FURTHER = {
    "yarn with options": ("yarn", {"factor": 4, "beta_fast": 16, "truncate": False}),
    "yarn with a temperature": ("yarn", {"factor": 4, "temperature": 2.0}),
    "longrope with start tokens": ("longrope", {**OPTIONS["longrope"], "start_tokens": 4}),
    "self-extend on yarn": ("self-extend", {"on": "yarn:2", "window": 64}),
    "dynamic-yarn exact": ("dynamic-yarn", {"length": 1024, "growth": "exact"}),
}
GEOMETRIES = (
    {"head_dim": 32, "theta": 1e4, "trained_length": 256},
    {"head_dim": 128, "theta": 5e5, "trained_length": 8192},
    {"head_dim": 64, "theta": 1e6, "trained_length": 4096, "rotary_dim": 32},
)


def record_frequencies(record):
    """Record every method's frequencies, and the signatures of public names."""
    tensors, refusals = {}, {}
    for name in rope_patch.list_methods():
        for geometry in GEOMETRIES:
            options = dict(OPTIONS.get(name, {"factor": FACTOR}))
            pairs = geometry.get("rotary_dim", geometry["head_dim"]) // 2
            if "long_factor" in options:
                options["long_factor"] = [1 + 0.1 * pair for pair in range(pairs)]
            for turns in (None, 0.5, 2.5):
                seq_len = None if turns is None else turns * geometry["trained_length"]
                key = f"{name} {geometry} at {seq_len}"
                with refusals_in(refusals, key):
                    got = rope_patch.frequencies(name, seq_len=seq_len, **geometry, **options)
                    tensors[key] = torch.tensor([*got.inv_freq, got.attention_factor]).double()
    save_file(tensors, record / "numbers" / "frequencies.safetensors")
    write_json(record / "numbers" / "frequencies-refused.json", refusals)
    signatures = {}
    for name in rope_patch.__all__:
        with contextlib.suppress(ValueError):
            signatures[name] = str(inspect.signature(getattr(rope_patch, name)))
    write_json(record / "numbers" / "names.json", {"names": rope_patch.__all__, **signatures})


def record_model(path, record):
    """Record a model's logits, saved files and exports under every method and encoding."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    methods = {
        name: (name, OPTIONS.get(name, {"factor": FACTOR})) for name in rope_patch.list_methods()
    }
    changes = [
        (label, rope_patch.patch, method, options)
        for label, (method, options) in (methods | FURTHER).items()
    ]
    changes += [
        (f"encoding {name}", rope_patch.encode, name, {}) for name in rope_patch.list_encodings()
    ]
    tensors, facts = {}, {}
    for label, change, name, options in changes:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        torch.manual_seed(0)  # for what an encoding draws
        with refusals_in(facts, label):
            handle = change(model, name, **options)
            facts[label] = str(handle.summary()) if hasattr(handle, "summary") else str(handle)
            for kind, measure in MEASURES.items():
                with refusals_in(facts, f"{label}: {kind}"), torch.no_grad():
                    tensors[f"{label}: {kind}"] = measure(model).contiguous()
            save_and_export(
                model, record / "saved" / path.name / label.replace(" ", "-"), facts, label
            )
    save_file(tensors, record / "numbers" / f"logits-{path.name}.safetensors")
    write_json(record / "numbers" / f"facts-{path.name}.json", facts)


def save_and_export(model, folder, facts, label):
    with refusals_in(facts, f"{label}: save"):
        rope_patch.save(model, folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for engine in ENGINES:
        with refusals_in(facts, f"{label}: export to {engine}"):
            facts[f"{label}: export to {engine}"] = rope_patch.export(model, engine).to_dict()


IDS = torch.randint(5, 500, (2, 320), generator=torch.Generator().manual_seed(0))


def one_pass(model):
    return model(IDS[:1]).logits[:, ::8]


def cached(model):
    """Return logits of a prefill within the trained length, a chunk beyond it, and single steps."""
    cache, outputs = None, []
    for start, end in ((0, 250), (250, 300), (300, 301), (301, 302)):
        output = model(IDS[:1, start:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        outputs.append(output.logits[:, -4:])
    return torch.cat(outputs, dim=1)


def left_padded(model):
    mask = torch.ones_like(IDS)
    mask[0, :100] = 0
    return model(IDS, attention_mask=mask).logits[:, 104::8]


def generated(model):
    return model.generate(
        IDS[:1, :250],
        attention_mask=torch.ones(1, 250, dtype=torch.long),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )


MEASURES = {"pass": one_pass, "cached": cached, "padded": left_padded, "generated": generated}


@contextlib.contextmanager
def refusals_in(texts, key):
    """Note an error's text, which is behaviour, too."""
    try:
        yield
    except Exception as error:
        texts[key] = f"{type(error).__name__}: {error}"


def write_json(path, data):
    path.write_text(json.dumps(data, indent=1, default=str) + "\n")
