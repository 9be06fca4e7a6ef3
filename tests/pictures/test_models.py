"""Test pictures of models' own tables, biases and rotations."""

import math

import pytest
import torch
import transformers
from helpers.encoding_models import LENGTH, encoding_model
from transformers import LlamaConfig, LlamaForCausalLM

import rope_patch
from rope_patch.pictures import make_picture

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def panels(name, **options):
    return make_picture(name, **options).panels


def curve(panel, label):
    return next(each for each in panel.curves if each.label == label)


def llama(**rope):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0} | rope,
        )
    )


@pytest.mark.parametrize(
    ("family", "module", "first_row"),
    [
        ("GPT2LMHeadModel", "transformer.wpe", 0),
        ("OPTForCausalLM", "model.decoder.embed_positions", 2),
        ("RobertaForMaskedLM", "roberta.embeddings.position_embeddings", 2),
    ],
)
def test_a_learned_table_is_that_of_the_model(family, module, first_row, tmp_path):
    model = encoding_model(family)
    rows = model.get_submodule(module).weight[first_row:].double()
    (panel,) = panels("table", model=model)
    assert panel.title == f"learned, {module}, {LENGTH} positions"
    assert torch.equal(panel.values, rows)
    model.save_pretrained(tmp_path)
    (waves,) = panels("waves", encoding="learned", model=str(tmp_path), length=20)
    assert torch.equal(curve(waves, "component 16").y, rows[:20, 16])
    (difference,) = panels("difference", model=model, position=7)
    assert torch.equal(curve(difference, "7 minus 0").y, rows[7] - rows[0])


def test_an_encoder_and_a_decoder_have_a_panel_each():
    shown = panels("table", model=encoding_model("BartForConditionalGeneration"))
    assert {panel.title.split(", ")[1] for panel in shown} == {
        "model.encoder.embed_positions",
        "model.decoder.embed_positions",
    }


def test_a_models_table_is_stretched_as_a_patch_stretches_it():
    model = encoding_model("GPT2LMHeadModel")
    (panel,) = panels("stretch", model=model, factor=3.0)
    component = int(panel.title.rpartition(" ")[2].rstrip(")"))
    rows = model.transformer.wpe.weight[:16, component].double()
    assert torch.equal(curve(panel, "trained rows").y, rows)
    with rope_patch.patch(model, "linear", factor=3):
        patched = model.transformer.wpe.weight[:, component].double()
    line = curve(panel, "linear")
    torch.testing.assert_close(line.y, patched[: len(line.y)])
    torch.testing.assert_close(line.x.double() * 3, torch.arange(len(line.x)).double())


@pytest.mark.parametrize("method", ["ntk", "linear"])
def test_blooms_biases_are_those_it_adds(method):
    model = encoding_model("BloomForCausalLM", n_head=4)
    shown = panels("bias", model=model, method=method, length=12, factor=2.0)
    mask = torch.ones(1, 12)
    own = model.transformer.build_alibi_tensor(mask, 4, torch.float32)[:, 0]
    scaled = []
    hook = model.transformer.h[0].register_forward_hook(
        lambda m, a, k, o: scaled.append(k["alibi"][:, 0]), with_kwargs=True
    )
    with rope_patch.patch(model, method, factor=2, trained_length=6):
        model(torch.ones(1, 12).long())
    hook.remove()
    for head in range(4):
        for panel, bias in ((shown[head], own), (shown[4 + head], scaled[0])):
            for query in (3, 11):
                row = bias[head, : query + 1]
                expected = (row - row[-1]).double()
                torch.testing.assert_close(panel.values[query, : query + 1], expected)
                assert panel.values[query, query + 1 :].isnan().all()


@pytest.mark.parametrize("method", ["log-tail", "max-distance", "linear"])
def test_t5s_biases_are_those_it_adds(method):
    model = encoding_model("T5ForConditionalGeneration")
    attention = model.decoder.block[0].layer[0].SelfAttention
    drawing = make_picture("bias", model=model, method=method, length=160, factor=4.0)
    assert drawing.caption.startswith("decoder.block.0.layer.0.SelfAttention. ")

    def added():
        return attention.compute_bias(160, 160)[0].double()

    before = added()
    with rope_patch.patch(model, method, factor=4, trained_length=40, layer_types=["decoder"]):
        after = added()
    assert not torch.equal(before, after)
    ahead = torch.ones(160, 160).triu(1).bool()
    for bias, shown in ((before, drawing.panels[:4]), (after, drawing.panels[4:])):
        for head, panel in enumerate(shown):
            torch.testing.assert_close(panel.values[~ahead], bias[head][~ahead])
            assert panel.trained == 40


def test_a_clock_turns_as_the_model_rotates(tmp_path):
    model = llama(**LLAMA3, original_max_position_embeddings=128)
    inv_freq = model.model.rotary_emb.inv_freq.double()
    model.save_pretrained(tmp_path)
    for source in (model, str(tmp_path)):
        (panel,) = panels("clock", model=source, position=300)
        for dial in panel.dials:
            frequency = float(inv_freq[int(dial.title.split()[1])])
            turned = (dial.angle - 300 * frequency) / (2 * math.pi)
            assert turned == pytest.approx(round(turned), abs=1e-4)
            assert dial.trained_arc == pytest.approx(min(2 * math.pi, 511 * frequency), rel=1e-5)


def test_wavelengths_and_angles_are_of_the_models_geometry():
    model = llama()
    (panel,) = panels("wavelengths", model=model, factor=2.0)
    expected = 2 * math.pi * 500 ** (torch.arange(16).double() / 16)
    torch.testing.assert_close(curve(panel, "wavelength").y, expected)
    assert curve(panel, "target length, 1,024").y.unique().tolist() == [1024]
    with rope_patch.patch(model, "yarn", factor=2):
        (angles,) = panels("angles", model=model, factor=2.0)
        patched = model.model.rotary_emb.inv_freq.double()
    turns = curve(angles, "target length, yarn").y
    torch.testing.assert_close(turns, patched * 1023 / (2 * math.pi), rtol=1e-5, atol=0)
    shorter = panels("angles", model=model, trained=256)[0].title
    assert shorter == "LlamaForCausalLM: 256 to 1,024 tokens"


def test_layers_that_see_far_are_shown():
    config = transformers.Gemma3TextConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=6, num_attention_heads=2, head_dim=16
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    (panel,) = panels("wavelengths", model=model)
    assert panel.title == "Gemma3ForCausalLM, full attention"
    theta = config.rope_parameters["full_attention"]["rope_theta"]
    assert curve(panel, "wavelength").y[1] == pytest.approx(2 * math.pi * theta ** (1 / 8))


def without_weights():
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(encoding_model("GPT2LMHeadModel").config)


@pytest.mark.parametrize(
    ("name", "make_model", "options", "fact"),
    [
        ("table", "BloomForCausalLM", {}, "learned table"),
        ("bias", "GPT2LMHeadModel", {}, "ALiBi's slopes"),
        ("table", "GPT2LMHeadModel", {"length": LENGTH + 1}, f"{LENGTH} rows"),
        ("table", "GPT2LMHeadModel", {"width": 8}, "width must be left out"),
        ("stretch", "GPT2LMHeadModel", {"trained": 8}, "trained must be left out"),
        ("clock", llama, {"base": 100.0}, "base must be left out"),
        ("table", lambda: 3, {}, "a transformers model, a folder or a name"),
        ("table", without_weights, {}, "no weights"),
    ],
)
def test_what_a_model_cannot_show_is_refused(name, make_model, options, fact):
    model = encoding_model(make_model) if isinstance(make_model, str) else make_model()
    with pytest.raises(rope_patch.Refused, match=fact):
        make_picture(name, model=model, **options)


@pytest.mark.parametrize("name", ["clock", "wavelengths", "rotation", "angles"])
def test_an_encoded_model_shows_no_rotation_that_it_does_not_do(name):
    model = llama()
    rope_patch.encode(model, "rope", base=50.0)
    make_picture(name, model=model)
    rope_patch.encode(model, "alibi")
    with pytest.raises(rope_patch.Refused, match=r"does not rotate.*'alibi'"):
        make_picture(name, model=model)
