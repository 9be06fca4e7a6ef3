"""Test that a diagnosis counts the distances of a position map, not the length of the text."""

from helpers.tiny_models import TRAINED, make_config

import rope_patch


def test_maps_keep_pairs_within_the_angles_of_training():
    config = make_config()
    plain = rope_patch.diagnose(config, length=8 * TRAINED)
    mapped = rope_patch.diagnose(config, method="rerope", length=8 * TRAINED)
    ((_, before),), ((_, after),) = plain.rotations.items(), mapped.rotations.items()
    assert any(pair.extrapolates for pair in before.pairs)
    assert not any(pair.extrapolates for pair in after.pairs)
    assert [pair.turns_at_length for pair in after.pairs] == [pair.turns for pair in after.pairs]
    stretched = rope_patch.diagnose(config, method="string", length=4 * TRAINED, on="linear:4")
    ((_, linear),) = stretched.rotations.items()
    assert linear.pairs[0].stretch == 4
