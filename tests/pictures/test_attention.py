"""Test pictures of what attention makes of equal words."""

import pytest
import torch

from rope_patch.pictures.attention import SENTENCE, dog_outputs
from rope_patch.pictures.picture import make_picture


def test_equal_words_are_equal_without_positions_alone():
    outputs = dog_outputs(64, 10000.0)
    for name, rows in outputs.items():
        gap = float((rows[1] - rows[4]).abs().max())
        assert (gap < 1e-12) is (name == "no positions"), name
        assert float((rows[0] - rows[1]).abs().max()) > 0.1  # the layer tells words apart
    # The last word sees the same words behind the mask, and no positions.
    torch.testing.assert_close(outputs["no positions"][4], outputs["no positions, causal mask"][4])
    assert SENTENCE[1] == SENTENCE[4]


def test_the_picture_shows_the_outputs_and_their_gap():
    panels = make_picture("dogs", width=32, base=500.0).panels
    for panel, (name, rows) in zip(panels, dog_outputs(32, 500.0).items(), strict=True):
        first, second = panel.curves
        assert torch.equal(first.y, rows[1, :24])
        assert torch.equal(second.y, rows[4, :24])
        gap = float((rows[1] - rows[4]).abs().max())
        expected = f"{name}: equal" if name == "no positions" else f"{name}: gap {gap:.2g}"
        assert panel.title == expected


def test_the_dogs_do_not_depend_on_the_callers_seed():
    torch.manual_seed(1)
    first, state = dog_outputs(32, 500.0), torch.get_rng_state()
    assert torch.equal(first["RoPE"], dog_outputs(32, 500.0)["RoPE"])
    assert torch.equal(state, torch.get_rng_state())


def test_four_terms_add_up_to_the_logits():
    panels = make_picture("four-terms", width=16).panels
    terms = {panel.title: panel.values for panel in panels}
    assert list(terms) == [
        "content-content",
        "content-position",
        "position-content",
        "position-position",
    ]
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(16, generator=generator, dtype=torch.float64) for _ in range(4)]
    words = torch.stack([draw[n] for n in (0, 1, 2, 3, 1)])
    query, key = (
        torch.randn(16, 16, generator=generator, dtype=torch.float64) / 4 for _ in range(2)
    )
    angles = torch.arange(5)[:, None] * 1e4 ** (-torch.arange(8).double() / 8)
    places = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
    logits = ((words + places) @ query) @ ((words + places) @ key).T / 4
    torch.testing.assert_close(sum(terms.values()), logits)
    # Content does not know where it is: both dogs have one row and one column.
    torch.testing.assert_close(terms["content-content"][1], terms["content-content"][4])
    assert not torch.allclose(terms["content-position"][:, 1], terms["content-position"][:, 4])
    torch.testing.assert_close(terms["content-position"][1], terms["content-position"][4])
    assert sum(terms.values())[1, 0] != pytest.approx(float(sum(terms.values())[4, 0]))
