"""Test that figures follow dark screens, and that images in them keep their pixels."""

import base64
import io
import re

import numpy
import pytest
from matplotlib.figure import Figure
from PIL import Image

from rope_patch.utils.figure_file import render_figure
from rope_patch.utils.plot_style import PALETTE


def figure(values):
    drawing = Figure(figsize=(2, 2))
    axes = drawing.add_axes((0, 0, 1, 1))
    axes.imshow(values, interpolation="none")
    axes.plot([0, 1], [0, 1], color=PALETTE["m0"][0])
    axes.text(0, 0, "words", color=PALETTE["ink"][0])
    return drawing


def test_each_colour_has_a_rule_for_dark_screens():
    svg = render_figure(figure(numpy.zeros((2, 2))), "svg").decode()
    (rules,) = re.findall(r"<style>@media \(prefers-color-scheme:dark\)\{(.*?)\}</style>", svg)
    assert f'[style*="stroke: {PALETTE["m0"][0]}"]{{stroke:{PALETTE["m0"][1]} ' in rules
    assert f'[style*="fill: {PALETTE["ink"][0]}"]{{fill:{PALETTE["ink"][1]} ' in rules
    assert f'[style*="fill: #ffffff"]{{fill:{PALETTE["paper"][1]} ' in rules
    assert PALETTE["m1"][0] not in rules  # nothing has it
    drawing = svg.partition("</style>")[2]
    assert f"stroke: {PALETTE['m0'][0]}" in drawing  # viewers without rules see the light one
    assert PALETTE["m0"][1] not in drawing


@pytest.mark.parametrize(("colours", "mode"), [(200, "P"), (2000, "RGBA")])
def test_images_keep_their_pixels(colours, mode):
    values = numpy.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=numpy.uint8)
    values = values.reshape(-1, 3)[numpy.arange(2000) % colours].reshape(50, 40, 3)
    svg = render_figure(figure(values), "svg").decode()
    (encoded,) = re.findall(r"data:image/png;base64,([^\"]+)\"", svg)
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert image.mode == mode
    pixels = numpy.asarray(image.convert("RGBA"))[..., :3]
    assert any(numpy.array_equal(each, values) for each in (pixels, pixels[::-1]))
