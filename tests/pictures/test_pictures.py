"""Test that pictures show the right numbers, and the command that draws them."""

import dataclasses
import json
import math

import pytest
import torch
from helpers.commands import run_in_this_process
from PIL import Image
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import rope_patch
from rope_patch.pictures import (
    BIASES,
    ENCODINGS,
    PICTURES,
    Curves,
    Dials,
    HeatMap,
    PictureOptions,
    dog_outputs,
    make_picture,
)

MODELS = ("rope", "learned")  # two panels; needs a model


def panels(name, **options):
    return make_picture(name, **options).panels


def curve(panel, label):
    return next(each for each in panel.curves if each.label == label)


@pytest.mark.parametrize("name", PICTURES)
def test_each_picture_has_finite_numbers_labels_and_a_caption(name):
    drawing = make_picture(name)
    assert drawing.caption.endswith(".")
    for panel in drawing.panels:
        assert panel.title
        if isinstance(panel, HeatMap):
            assert panel.x_label
            assert panel.y_label
            assert panel.values.isfinite().any()
        elif isinstance(panel, Curves):
            assert panel.x_label
            assert panel.y_label
            assert len({each.label for each in panel.curves}) == len(panel.curves)
            for each in panel.curves:
                assert each.x.shape == each.y.shape
                assert each.y.double().isfinite().all() or name == "grid"


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name not in MODELS])
def test_all_encodings_have_a_table(encoding):
    (panel,) = panels("table", encoding=encoding, length=20, width=12)
    assert panel.values.shape == (20, 12)
    assert len({tuple(row) for row in panel.values.tolist()}) == 20


def test_tables_are_sines_and_cosines():
    """Tensor2Tensor's has the sines first, and ends at the base."""
    (table,) = panels("table", length=9, width=6, base=100.0)
    (halves,) = panels("table", encoding="tensor2tensor", length=9, width=8, base=100.0)
    for t in range(9):
        for k in range(3):
            angle = t * 100 ** (-2 * k / 6)
            assert table.values[t, 2 * k] == pytest.approx(math.sin(angle), abs=1e-12)
            assert table.values[t, 2 * k + 1] == pytest.approx(math.cos(angle), abs=1e-12)
        for k in range(4):
            angle = t * 100 ** (-k / 3)
            assert halves.values[t, k] == pytest.approx(math.sin(angle), abs=1e-12)
            assert halves.values[t, 4 + k] == pytest.approx(math.cos(angle), abs=1e-12)


@pytest.mark.parametrize("base", [2, 4, 8, 16])
def test_digits_make_up_the_position(base):
    panel = panels("bases", length=50)[(2, 4, 8, 16).index(base)]
    digits = (panel.values * (base - 1)).round().long()
    assert digits.max() < base
    numbers = (digits * base ** torch.arange(digits.shape[1])).sum(1)
    assert numbers.tolist() == list(range(50))
    encoding = "binary" if base == 2 else f"base{base}"
    (table,) = panels("table", encoding=encoding, length=50, width=8)
    assert torch.equal(table.values[:, : digits.shape[1]], panel.values)
    assert table.values[:, digits.shape[1] :].eq(0).all()


def test_waves_and_differences_are_of_the_table():
    (table,) = panels("table", length=100, width=12)
    (waves,) = panels("waves", length=100, width=12)
    assert torch.equal(curve(waves, "component 4").y, table.values[:, 4])
    (difference,) = panels("difference", length=100, width=12, position=50)
    got = curve(difference, "50 minus 0").y
    assert torch.equal(got, table.values[50] - table.values[0])


def test_sines_have_the_periods_of_the_bits():
    bits, waves = panels("digits", length=32)
    for k in range(5):
        period = 2 ** (k + 1)
        for values in (bits.values, waves.values):
            assert torch.allclose(values[period:, k], values[:-period, k], atol=1e-9)
        # Where the bit is 1, the sine of the second half of the period is not below 0.
        assert (waves.values[bits.values[:, k] > 0, k] > -1e-9).all()


def test_stretched_tables_pass_through_the_trained_rows():
    (panel,) = panels("stretch", trained=20, factor=3.0)
    linear, rows = curve(panel, "linear"), curve(panel, "trained rows")
    assert torch.equal(linear.y[::3], rows.y)
    assert torch.equal(linear.x[::3].long(), rows.x)


def test_steps_of_sinusoids_are_short_and_even():
    bits, smooth = (path.points.double().diff(dim=0).norm(dim=1) for path in panels("walk"))
    assert bits.max() == pytest.approx(3**0.5)
    assert smooth.max() < 0.9
    assert smooth.max() / smooth.min() < 1.1


# -- rotations -------------------------------------------------------------------------------------


def test_rope_is_shown_as_transformers_computes_it():
    cosine, sine = panels("table", encoding="rope", length=9, width=16)
    config = LlamaConfig(hidden_size=32, num_attention_heads=2)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(9)[None])
    torch.testing.assert_close(cosine.values.float(), cos[0, :, :8])
    torch.testing.assert_close(sine.values.float(), sin[0, :, :8])
    (difference,) = panels("difference", encoding="rope", length=9, width=16, position=5)
    got = curve(difference, "5 minus 0").y
    # A vector of ones in complex numbers: (1 + i) e^(i angle).
    angles = 5 * 1e4 ** (-torch.arange(8).double() / 8)
    turned = (1 + 1j) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(got, torch.view_as_real(turned - (1 + 1j)).flatten())


def test_hands_turn_as_the_model_rotates():
    (panel,) = panels("clock", position=100, trained=64, width=16)
    assert isinstance(panel, Dials)
    frequencies = rope_patch.frequencies("default", head_dim=16, theta=1e4, trained_length=64)
    assert len(panel.dials) == 8
    for dial, frequency in zip(panel.dials, frequencies.inv_freq.tolist(), strict=True):
        turned = (dial.angle - 100 * frequency) / (2 * math.pi)
        assert turned == pytest.approx(round(turned), abs=1e-9)
        assert dial.trained_arc == pytest.approx(min(2 * math.pi, 63 * frequency))


def test_wavelengths_are_2_pi_over_frequencies():
    (panel,) = panels("wavelengths", width=128)
    lengths = curve(panel, "wavelength").y
    assert lengths[[0, 32, 63]].tolist() == pytest.approx([6.2832, 628.32, 54410.1], rel=1e-4)


@pytest.mark.parametrize("method", ["yarn", "linear", "ntk", "llama3"])
def test_angles_are_those_of_the_method(method):
    (panel,) = panels("angles", method=method, factor=8.0, trained=512, width=64)
    keys = {"head_dim": 64, "theta": 1e4, "trained_length": 512}
    scaled = rope_patch.frequencies(method, factor=8, **keys).inv_freq.double()
    plain = rope_patch.frequencies("default", **keys).inv_freq.double()
    turns = curve(panel, f"target length, {method}").y
    torch.testing.assert_close(turns, scaled * 4095 / (2 * math.pi))
    torch.testing.assert_close(curve(panel, "seen in training").y, plain * 511 / (2 * math.pi))


def test_pairs_of_a_grid_turn_with_one_axis_or_with_both():
    halves, dealt, mixed = panels("grid", width=16, base=100.0)
    for panel, frequency in (
        (halves, lambda pair: 100 ** (-(pair % 4) / 4)),
        (dealt, lambda pair: 100 ** (-((pair % 4) * 2 + pair // 4) / 8)),
    ):
        rows, columns = (each.y for each in panel.curves)
        for pair in range(8):
            one, other = (rows, columns) if pair < 4 else (columns, rows)
            assert one[pair] == pytest.approx(frequency(pair))
            assert other[pair].isnan()
    # The directions are orthogonal: together they turn as much as the axes did.
    squares = sum(each.y**2 for each in mixed.curves)
    torch.testing.assert_close(squares, 100 ** (-(torch.arange(8).double() % 4) / 2))


# -- distances and biases --------------------------------------------------------------------------


def test_decays_begin_at_the_top_and_random_projections_lose_it():
    products, biases, fire = panels("decay", length=200, width=128)
    assert products.curves[0].y[0] == 1
    assert products.curves[0].y[1:].max() < 1
    for each in products.curves[1:]:
        assert each.y[0] < 0.9  # nothing singles out distance 0
    for each in biases.curves:
        assert each.y[0] == 0
        assert each.y[1:].max() < 0
    steps = curve(biases, "T5, synthetic table").y
    assert steps[[1, 15]].tolist() == pytest.approx([-math.log(2), -math.log(16)])
    assert len(steps.unique()) == 32  # as many as there are buckets
    assert len(steps[128:].unique()) == 1
    for query in (199, 1599):
        share = curve(fire, f"query at {query:,}").y
        longest = math.log(1 + 0.1 * max(512, query))
        for d in (0, 1, 50, 199):
            assert share[d] == pytest.approx(math.log(1 + 0.1 * d) / longest, abs=1e-12)


def test_squeezed_distances_use_trained_buckets_alone():
    (panel,) = panels("buckets", trained=64, factor=8.0)
    trained, squeezed = curve(panel, "as trained").y, curve(panel, "far distances squeezed").y
    known = set(trained[:64].tolist())
    assert set(squeezed.tolist()) == known
    assert not set(trained.tolist()) <= known
    assert torch.equal(squeezed[:16], trained[:16])
    assert not torch.equal(curve(panel, "all distances divided").y[:16], trained[:16])


N = 24


def biases(**options):
    """Return the matrices of four heads as trained, and extended."""
    shown = [panel.values for panel in panels("bias", length=N, heads=4, **options)]
    return shown[:4], shown[4:]


@pytest.mark.parametrize("encoding", BIASES)
def test_biases_are_causal_and_lowest_far_away(encoding):
    # T5's tail begins at 16 tokens, so the trained length must be longer.
    before, after = biases(encoding=encoding, factor=1.2)
    # ALiBi leaves its first head alone.
    assert not torch.equal(before[1].nan_to_num(), after[1].nan_to_num())
    for matrix in (*before, *after):
        assert matrix[torch.ones(N, N).triu(1).bool()].isnan().all()
        assert matrix.diagonal().eq(0).all()
        assert matrix[N - 1, 0] == matrix[N - 1].min() < 0


@pytest.mark.parametrize("method", ["ntk", "linear"])
def test_alibi_falls_by_its_slopes(method):
    before, after = biases(method=method, factor=4.0)
    for head in range(4):
        slope = 2.0 ** (-8 * (head + 1) / 4)
        scale = 4.0 ** (-head / 3) if method == "ntk" else 0.25
        assert before[head][20, 5] == pytest.approx(-15 * slope)
        assert after[head][20, 5] == pytest.approx(-15 * slope * scale)


def test_kerple_and_sandwich_fall_as_published():
    kerple, _ = biases(encoding="kerple")
    sandwich, squeezed = biases(encoding="sandwich", factor=2.0)
    rates = [10000 ** (-2 * k / 128) for k in range(64)]
    for head in range(4):
        share = (head + 1) / 4
        assert kerple[head][20, 5] == pytest.approx(-2 * share * math.log(1 + share * 15))
        for matrix, distance in ((sandwich, 15), (squeezed, 7.5)):
            expected = (sum(math.cos(distance * w) for w in rates) - 64) / (8 * (head + 1) / 4)
            assert matrix[head][20, 5] == pytest.approx(expected)


def test_fire_takes_the_share_of_the_querys_position():
    shown = panels("bias", encoding="fire", length=700, heads=4, factor=2.0)
    for panel, scale in ((shown[3], 1), (shown[7], 2)):
        for query in (100, 699):
            longest = math.log(1 + 0.1 * max(512, query / scale))
            expected = -8 * math.log(1 + 0.1 * 50 / scale) / longest
            assert panel.values[query, query - 50] == pytest.approx(expected)


# -- what attention makes of equal words -----------------------------------------------------------


def test_equal_words_are_equal_without_positions_alone():
    outputs = dog_outputs(64, 10000.0)  # the second and the fifth word are equal
    for name, rows in outputs.items():
        gap = float((rows[1] - rows[4]).abs().max())
        assert (gap < 1e-12) is (name == "no positions"), name
        assert float((rows[0] - rows[1]).abs().max()) > 0.1  # the layer tells words apart
    # The last word sees the same words behind the mask, and no positions.
    torch.testing.assert_close(outputs["no positions"][4], outputs["no positions, causal mask"][4])


def test_the_picture_shows_the_outputs_and_their_gap():
    """They do not depend on the caller's seed, nor change it."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    shown = panels("dogs", width=32, base=500.0)
    for panel, (name, rows) in zip(shown, dog_outputs(32, 500.0).items(), strict=True):
        first, second = panel.curves
        assert torch.equal(first.y, rows[1, :24])
        assert torch.equal(second.y, rows[4, :24])
        gap = float((rows[1] - rows[4]).abs().max())
        expected = f"{name}: equal" if name == "no positions" else f"{name}: gap {gap:.2g}"
        assert panel.title == expected
    assert torch.equal(state, torch.get_rng_state())


def test_four_terms_add_up_to_the_logits():
    terms = {panel.title: panel.values for panel in panels("four-terms", width=16)}
    words_of = ("content", "position")
    assert list(terms) == [f"{query}-{key}" for query in words_of for key in words_of]
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


# -- the command and the function ------------------------------------------------------------------


def test_the_command_writes_the_same_file_again(tmp_path):
    path, again = tmp_path / "a.svg", tmp_path / "b.svg"
    result = run_in_this_process("picture", "table", "--out", path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"wrote {path}\n")
    run_in_this_process("picture", "table", "--out", again)
    assert again.read_bytes() == path.read_bytes()


def test_png_and_json(tmp_path):
    path = tmp_path / "clock.png"
    result = run_in_this_process("picture", "clock", "--out", path, "--json")
    assert json.loads(result.stdout)["file"] == str(path)
    assert Image.open(path).width == 1824


def test_the_list_names_all_pictures():
    listed = json.loads(run_in_this_process("picture", "--json").stdout)
    assert {name: list(listed[name]["options"]) for name in listed} == {
        name: list(kind.options) for name, kind in PICTURES.items()
    }
    lines = iter(run_in_this_process("picture").stdout.splitlines())
    for name, kind in PICTURES.items():
        assert next(lines).split() == [name, *kind.about.split()]
        words = [word for word in next(lines).split() if word.startswith("--")]
        assert words == [f"--{option}" for option in kind.options]


@pytest.mark.parametrize("name", PICTURES)
def test_an_option_of_another_picture_is_refused(name):
    fields = {field.name for field in dataclasses.fields(PictureOptions)} - {"given"}
    others = fields - set(PICTURES[name].options)
    assert others
    for option in others:
        with pytest.raises(rope_patch.Refused, match=f"{option} .*{name!r}"):
            make_picture(name, **{option: getattr(PictureOptions(), option)})


def test_python_returns_a_figure_and_refuses_unknown_options():
    figure = rope_patch.picture("table", encoding="binary", length=16, width=8)
    assert figure.axes[0].get_xlabel() == "component"
    with pytest.raises(TypeError, match="'lenght'"):
        rope_patch.picture("table", lenght=3)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("clok", "'clock'"),
        ("dogs --length 5", "--length must be left out"),
        ("table --encoding binary --base 4", "--base must be left out"),
        ("table --encoding learned", "needs a model"),
        ("bias --encoding alibbi", "'alibi'"),
        ("bias --method yarn", "'yarn' does not extend alibi"),
        ("table --encoding sinusoid", "'sinusoidal'"),
        ("table --model no/folder/none", "no/folder/none"),
        ("table --base 1", "--base must be above 1"),
        ("clock --out clock.pdf", ".svg or a .png"),
        ("clock --position 0", "--position"),
        ("table --width 7", "--width must be an even number of at least 6"),
        ("grid --width 10", "--width must be a multiple of 4"),
        ("angles --factor 1", "--factor must be above 1"),
        ("angles --method yarm", "'yarm'"),
        ("angles --method self-extend", "self-extend"),
        ("buckets --trained 16", "exact < trained < length"),
        ("table --encoding binary --length 300 --width 6", "9 digits"),
    ],
)
def test_wrong_words_are_one_error_and_write_nothing(tmp_path, monkeypatch, words, fact):
    monkeypatch.chdir(tmp_path)
    result = run_in_this_process("picture", *words.split())
    assert result.returncode != 0
    assert fact in result.stderr
    assert list(tmp_path.iterdir()) == []
