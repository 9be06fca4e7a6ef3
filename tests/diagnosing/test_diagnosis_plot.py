"""Test the plot: a file with the lengths, the critical dimension and both rotations."""

import re
import struct

import pytest
from helpers.tiny_models import TARGET, TRAINED, make_config

import rope_patch
from rope_patch.utils.plot_style import PALETTE

pytest.importorskip("matplotlib")

TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


def plot_words(path, config, *arguments, **options):
    diagnosis = rope_patch.diagnose(config, *arguments, **options)
    path.parent.mkdir(exist_ok=True)
    diagnosis.plot(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary files
    return diagnosis, " ".join(TEXT.findall(path.read_text()))


def test_plot_names_lengths_pairs_and_the_method(tmp_path):
    diagnosis, words = plot_words(tmp_path / "a.svg", make_config(), "yarn", factor=4)
    assert f"trained on {TRAINED} tokens" in words
    assert f"target {TARGET} tokens" in words
    critical = diagnosis.rotations[None].critical_dimension
    assert f"critical dimension: pair {critical}" in words
    assert f"llama: yarn ×4, at {TARGET} tokens, attention factor 1.139" in words
    assert "before" in words
    assert "beyond the angles of training" not in words  # YaRN stretches them all


def test_extrapolating_and_stopped_pairs_are_marked(tmp_path):
    config = make_config()
    _, words = plot_words(tmp_path / "one" / "a.svg", config, length=TARGET)
    assert "beyond the angles of training" in words
    assert "as it is" in words
    assert "before" not in words
    _, words = plot_words(tmp_path / "two" / "a.svg", config, "proportional", factor=4)
    assert "no longer turns" in words


def test_every_layer_type_has_a_panel(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    config = make_config("gemma3")
    _, words = plot_words(tmp_path / "a.svg", config, "linear", factor=4, layer_types=kinds)
    assert "gemma3_text, sliding attention: linear" in words
    assert "gemma3_text, full attention: linear" in words


def test_the_same_diagnosis_makes_the_same_file(tmp_path):
    diagnosis = rope_patch.diagnose(make_config(), "yarn", factor=4)
    for name in ("a.svg", "b.svg"):
        diagnosis.plot(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_png_is_large_enough_to_print(tmp_path):
    rope_patch.diagnose(make_config(), "yarn", factor=4).plot(tmp_path / "a.PNG")
    data = (tmp_path / "a.PNG").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1800  # six inches at 300 dots
    assert height >= 800


def test_colours_differ_in_lightness():
    """Before and after differ in lightness and markers, for readers without colour."""

    def lightness(colour):
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    light = [lightness(PALETTE[name][0]) for name in ("plain", "m0")]
    assert max(light) / min(light) > 1.3


@pytest.mark.parametrize("name", ["a.pdf", "a", "svg"])
def test_other_file_types_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"an \.svg or a \.png file"):
        rope_patch.diagnose(make_config()).plot(tmp_path / name)
    assert not list(tmp_path.iterdir())
