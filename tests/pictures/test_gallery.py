"""Test that docs/pictures.md shows all pictures, and that each is the one that the code draws."""

import base64
import io
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy
import pytest
import torch
from helpers.encoding_models import encoding_model
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

import rope_patch
from rope_patch.pictures import PICTURES, make_picture
from rope_patch.utils import render_figure

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "generate"))
import pictures as generate

SHOWN = [shown for group in generate.GALLERY.values() for shown in group]
_SVG = "{http://www.w3.org/2000/svg}"
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


def texts(svg):
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{_SVG}text")]


def numbers(svg):
    """Return the coordinates of all lines and marks."""
    root, found = ElementTree.fromstring(svg), []
    for node in root.iter():
        words = [node.get("d", "")] if node.tag == f"{_SVG}path" else []
        words += [node.get("x", ""), node.get("y", "")] if node.tag == f"{_SVG}use" else []
        found += [float(number) for word in words for number in _NUMBER.findall(word)]
    return numpy.array(found)


def images(svg):
    encoded = re.findall(rb"data:image/png;base64,([^\"]+)\"", svg)
    return [
        numpy.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("RGBA"), dtype=int)
        for image in encoded
    ]


def smollm2():
    """Return an empty model with the demo's rotation."""
    config = LlamaConfig(
        hidden_size=576,
        num_attention_heads=9,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_the_page_shows_every_picture():
    assert {shown.name for shown in SHOWN} == set(PICTURES)
    page = generate.PAGE.read_text()
    assert page.partition(generate.MARK)[2].strip() == generate.gallery().strip()
    assert all(f"| `{name}` |" in page for name in PICTURES)
    files = [shown.file for shown in SHOWN]
    assert len(set(files)) == len(files)
    assert {path.stem for path in generate.FOLDER.iterdir()} == set(files)


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.file)
def test_the_committed_picture_is_what_the_code_draws(shown):
    committed = (generate.FOLDER / f"{shown.file}.svg").read_bytes()
    assert len(committed) < 150_000
    assert b"prefers-color-scheme:dark" in committed
    options = dict(shown.options)
    if options.get("model") == generate.LEARNED:
        # The package with the weights is not installed: only words are compared.
        options["model"] = encoding_model("BertForMaskedLM")
        caption = make_picture(shown.name, **options).caption
        assert caption in " ".join(texts(committed))
        return
    if options.get("model") == "demo":
        options["model"] = smollm2()
    drawn = render_figure(rope_patch.picture(shown.name, **options), "svg")
    assert texts(committed) == [word.replace("LlamaForCausalLM", "demo") for word in texts(drawn)]
    if f"Matplotlib v{matplotlib.__version__}," not in committed.decode():
        return  # other versions place other numbers
    # Coordinates are hundredths of a pixel; another processor may round them otherwise.
    numpy.testing.assert_allclose(numbers(drawn), numbers(committed), atol=0.05)
    for new, old in zip(images(drawn), images(committed), strict=True):
        assert new.shape == old.shape
        assert abs(new - old).max() <= 6
