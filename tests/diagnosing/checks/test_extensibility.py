"""Test the count of OlmPool's choices against the architectures that the paper compares."""

import pytest
import transformers

import rope_patch

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 8192,
}
LONG = 32768


def note(family, **changes):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    findings = rope_patch.diagnose(config, length=LONG).findings
    return next((f for f in findings if f.code == "hard-to-extend"), None)


# The count of each architecture, by olmpool.com's table of Llama 3, OLMo 3 and Qwen 3.
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"num_key_value_heads": 2}),
        ("Olmo3", {"sliding_window": 4096}),
        ("Qwen3", {"num_key_value_heads": 2}),
        ("Llama", {"num_key_value_heads": 2, "max_position_embeddings": 4096}),
    ],
)
def test_up_to_two_choices_are_no_note(family, changes):
    assert note(family, **changes) is None


def test_windows_with_grouped_heads_and_a_query_norm():
    finding = note("Olmo3", sliding_window=4096, num_key_value_heads=2)
    assert finding.severity == "note"
    assert finding.numbers == {
        "choices": 3,
        "query_norm": 1,
        "query_heads": 8,
        "key_heads": 2,
        "window": 4096,
        "windowed_layers": 3,
        "layers": 4,
    }
    assert "3 of 4 layers see 4,096 tokens back" in finding.evidence
    assert "arXiv:2608.10296" in finding.what


def test_all_four():
    finding = note(
        "Olmo3", sliding_window=2048, num_key_value_heads=2, max_position_embeddings=4096
    )
    assert finding.numbers["choices"] == 4
    assert finding.numbers["trained"] == 4096
    assert finding.evidence.count(";") == 3


def test_short_pretraining_with_a_query_norm_and_grouped_heads():
    finding = note("Qwen3", num_key_value_heads=2, max_position_embeddings=4096)
    assert set(finding.numbers) == {"choices", "query_norm", "query_heads", "key_heads", "trained"}


def test_windows_that_are_switched_off_or_wide_do_not_count():
    short = {"num_key_value_heads": 2, "max_position_embeddings": 4096}
    assert note("Mistral", **short, sliding_window=4096).numbers["windowed_layers"] == 4
    assert note("Mistral", **short, sliding_window=None) is None
    assert note("Mistral", **short, sliding_window=LONG) is None
    off = {"use_sliding_window": False, "sliding_window": 4096}
    assert note("Qwen2", **short, **off) is None


def test_two_query_heads_a_key_head_do_not_count():
    """16 key heads of 32 are what OlmPool's best model has."""
    windows = {"sliding_window": 4096, "max_position_embeddings": 4096}
    assert "key_heads" not in note("Olmo3", num_key_value_heads=4, **windows).numbers
    assert note("Olmo3", num_key_value_heads=2, **windows).numbers["key_heads"] == 2


def test_model_stays_healthy():
    config = transformers.Qwen3Config(
        **{**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    )
    diagnosis = rope_patch.diagnose(config, length=LONG)
    assert diagnosis.healthy
    assert "hard-to-extend" in {f.code for f in diagnosis.findings}
