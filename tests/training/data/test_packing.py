"""Test packed rows: tokens, labels, order, shares and refusals."""

import itertools
import json
import logging
import shutil
from collections import Counter

import pytest
import torch
from helpers.commands import run_in_this_process
from helpers.vision_models import SAMPLE, text_tokens, vision_model
from packed_rows import (
    END,
    KEYS,
    LENGTH,
    SETTINGS,
    TINY,
    CountingTokenizer,
    lengths,
    make_rows,
    packed,
    segments,
    tokens,
)
from torch.nn import functional
from training_runs import arguments as command_line
from transformers import HfArgumentParser, LlamaForCausalLM

from rope_patch.training import DataArguments, RowShare, collate, require_no_document_masks


def test_single_rows_are_slices_of_one_document(tokenizer, tmp_path):
    texts = ["Emma was rich. " * 40, "Short.", "Mr. Elton was vain. " * 30]
    for n, text in enumerate(texts):
        (tmp_path / f"{n}.txt").write_text(text)
    long = [[*tokenizer(texts[n]).input_ids, END] for n in (0, 2)]
    expected = [
        ids[i : i + LENGTH] for ids in long for i in range(0, len(ids) - LENGTH + 1, LENGTH)
    ]
    rows = make_rows(tokenizer, len(expected) + 1, [str(tmp_path)])
    assert len(expected) > 5
    assert [row["input_ids"].tolist() for row in rows] == [*expected, expected[0]]
    for row in rows:
        assert torch.equal(row["labels"], row["input_ids"])
        assert torch.equal(row["position_ids"], torch.arange(LENGTH))
        assert all(row[key].dtype == torch.int64 for key in KEYS)
    counts = rows[-1]["row"]["counts"][str(tmp_path)]
    used, total = len(expected) * LENGTH, sum(map(len, long))
    rest = len(tokenizer("Short.").input_ids) + 1
    assert counts == {
        "documents": 3, "tokens": used + LENGTH, "left_out": 1, "epochs": 1,
        "left_out_tokens": total - used + rest, "repetitive": 0, "noisy": 0,
        "questions": 0,
    }  # fmt: skip
    assert rows[0]["row"]["documents"] == [f"{tmp_path}/0.txt"]


@pytest.mark.parametrize("packing", ["concatenate", "masked"])
def test_packed_rows_are_the_documents_one_after_another(tokenizer, tmp_path, packing):
    texts = ["Emma was rich.", "Mr. Elton was vain. " * 20, "Nobody came.", "x"] * 3
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    documents = [[*tokenizer(text).input_ids, END] for text in texts]
    expected = [token for ids in documents for token in ids]
    count = len(expected) // LENGTH
    rows = make_rows(tokenizer, count, [str(path)], packing=packing, text_column="body")
    assert tokens(rows) == expected[: count * LENGTH]
    starts = {sum(map(len, documents[:n])) for n in range(len(documents))}
    for row in rows:
        first = row["row"]["index"] * LENGTH
        restarts = {n for n in range(LENGTH) if first + n in starts or n == 0}
        if packing == "concatenate":
            assert torch.equal(row["labels"], row["input_ids"])
            assert torch.equal(row["position_ids"], torch.arange(LENGTH))
            continue
        position = -1
        for n in range(LENGTH):
            position = 0 if n in restarts else position + 1
            assert row["position_ids"][n] == position
            assert row["labels"][n] == (-100 if n in restarts else row["input_ids"][n])
    assert rows[0]["row"]["documents"] == [f"{path}:1", f"{path}:2"]


def test_short_documents_are_left_out_by_min_document_length(tokenizer, source):
    path, documents = source("a.jsonl", [5, 30, 19, 20, 40, 90])
    rows = make_rows(tokenizer, 3, [path], packing="concatenate", min_document_length=20)
    assert tokens(rows) == [t for ids in documents if len(ids) >= 20 for t in ids][: 3 * LENGTH]
    assert rows[-1]["row"]["counts"][path]["left_out"] == 2


def test_labels_of_records_reach_the_rows(tokenizer, tmp_path):
    record = {"input_ids": list(range(3, 3 + LENGTH)), "labels": [-100] * 40 + list(range(43, 51))}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    (row,) = make_rows(tokenizer, 1, [str(tmp_path / "a.jsonl")])
    assert row["labels"].tolist() == record["labels"]


@pytest.mark.parametrize("packing", ["masked", "best_fit"])
def test_transformers_separates_the_documents_of_masked_rows(tokenizer, source, packing):
    # float32 sums differ by 1.4e-5 on some CPUs.
    model = LlamaForCausalLM.from_pretrained(TINY).double().eval()
    path, _ = source("a.jsonl", [9, 2, 30, 3, 3, 60, 7, 25, 40])
    rows = make_rows(tokenizer, 4, [path], packing=packing, packing_window=4)
    batch = collate(rows)
    assert "attention_mask" not in batch
    inputs = {key: batch[key] for key in ("input_ids", "position_ids")}
    with torch.no_grad():
        packed_logits = model(**inputs, use_cache=False).logits
        loss = model(**inputs, labels=batch["labels"], use_cache=False).loss
        plain = model(input_ids=batch["input_ids"], use_cache=False).logits
        separate = [
            torch.cat([model(input_ids=ids[None]).logits[0] for ids in segments(row)])
            for row in rows
        ]
    assert max(len(segments(row)) for row in rows) > 3
    torch.testing.assert_close(packed_logits, torch.stack(separate), atol=1e-5, rtol=1e-5)
    targets = torch.stack([row["labels"] for row in rows])[:, 1:]
    mean = functional.cross_entropy(torch.stack(separate)[:, :-1].flatten(0, 1), targets.flatten())
    # transformers' loss is float32 throughout
    torch.testing.assert_close(loss, mean.float(), atol=1e-5, rtol=1e-5)
    assert (plain - packed_logits).abs().max() > 0.1


@pytest.mark.parametrize("share", [0.1, 0.25, 0.29, 0.5, 0.7])
def test_short_share_is_exact(tokenizer, source, share):
    long, _ = source("long.jsonl", [200, 300])
    short, _ = source("short.jsonl", [5, 9])
    rows = make_rows(tokenizer, 100, [long], short_data=[short], short_share=share)
    is_short = [row["row"]["documents"][0].startswith(short) for row in rows]
    percent = round(100 * share)
    for i in range(100):
        assert sum(is_short[: i + 1]) == (i + 1) * percent // 100
        assert is_short[i] == ((i + 1) * percent // 100 > i * percent // 100)


def test_short_rows_are_packed_of_short_pieces(tokenizer, source):
    long, _ = source("long.jsonl", [200, 300])
    short, documents = source("short.jsonl", [5, 37, 9, 20, 48, 3, 60])
    rows = make_rows(tokenizer, 9, [long], short_data=[short], short_share=0.5, short_length=17)
    short_rows = rows[1::2]
    stream = [token for ids in documents for token in ids] * 2
    assert tokens(short_rows) == stream[: 4 * LENGTH]
    for row in short_rows:
        assert max(map(len, segments(row))) <= 17
        assert (row["labels"] == -100).equal(row["position_ids"] == 0)
    assert [len(piece) for piece in segments(short_rows[0])] == [5, 17, 17, 3, 6]
    for row in rows[::2]:
        assert torch.equal(row["position_ids"], torch.arange(LENGTH))
    counts = rows[-1]["row"]["counts"]
    assert counts[f"short: {short}"]["tokens"] == 4 * LENGTH
    assert counts[long]["tokens"] == 5 * LENGTH


def test_short_rows_of_the_same_data_at_the_trained_length(tokenizer, source):
    path, documents = source("a.jsonl", [200, 300])
    rows = make_rows(tokenizer, 4, [path], short_share=0.5)
    assert tokens(rows[::2]) == documents[0][: 2 * LENGTH] == tokens(rows[1::2])
    assert [len(piece) for piece in segments(rows[1])] == [16, 16, 16]


def test_data_weights_hold_to_within_a_row(tokenizer, source):
    paths = [source(f"{n}.jsonl", lengths(n, most=most))[0] for n, most in enumerate((9, 90, 400))]
    for weights, packing in itertools.product(([1, 2, 5], None), ("concatenate", "single")):
        rows = make_rows(tokenizer, 60, paths, data_weights=weights, packing=packing)
        shares = [w / sum(weights) for w in weights] if weights else [1 / 3] * 3
        for row in rows:
            total = (row["row"]["index"] + 1) * LENGTH
            for path, share in zip(paths, shares, strict=True):
                token_count = row["row"]["counts"][path]["tokens"]
                assert abs(token_count - share * total) <= LENGTH


def test_shuffling_changes_the_order_alone(tokenizer, source, tmp_path):
    (tmp_path / "all").mkdir()
    names = [source(f"all/{n}.jsonl", [LENGTH] * 10) for n in range(3)]
    documents = [ids for _, lines in names for ids in lines]
    folder = str(tmp_path / "all")

    def epochs(seed, window=4, count=2):
        rows = make_rows(
            tokenizer, count * 30, [folder], SETTINGS | {"seed": seed}, shuffle_window=window
        )
        order = [row["input_ids"].tolist() for row in rows]
        return [order[n : n + 30] for n in range(0, len(order), 30)]

    assert epochs(0, window=0) == [documents, documents]
    first, second = epochs(0)
    assert epochs(0) == [first, second]
    orders = [documents, first, second, *epochs(1), epochs(0, window=1)[0]]
    for order in orders:
        assert sorted(order) == sorted(documents)
    assert len({str(order) for order in orders}) == len(orders)
    path, lines = names[0]
    rows = make_rows(tokenizer, 8, [path], shuffle_window=4)
    places = [lines.index(row["input_ids"].tolist()) for row in rows]
    assert sorted(places[:4]) == list(range(4))
    assert [n + 4 for n in places[:4]] != places[4:]  # each block has a different order
    epoch = epochs(0)[0]  # a window of 4: blocks of neighbours, which files may share
    files = [next(n for n, (_, lines) in enumerate(names) if ids in lines) for ids in epoch]
    assert Counter(files) == dict.fromkeys(range(3), 10)
    assert len(list(itertools.groupby(files))) <= 7


def test_collate_stacks_rows_and_masks_the_first_label(tokenizer, source):
    path, _ = source("a.jsonl", [200])
    rows = make_rows(tokenizer, 2, [path])
    batch = collate(rows, has_gaps=True)
    assert batch["attention_mask"].equal(torch.ones(2, LENGTH, dtype=torch.int64))
    assert batch["rows"] == [row["row"] for row in rows]
    labels = torch.stack([row["labels"] for row in rows])
    assert batch["labels"][:, 1:].equal(labels[:, 1:])
    assert batch["labels"][:, 0].eq(-100).all()  # no token precedes it


def test_only_needed_documents_are_read(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"Number {n} came. " * 30}) for n in range(1000)]
    path.write_text("\n".join(lines) + "\nnot JSON, and never reached")
    counting_tokenizer = CountingTokenizer(tokenizer)
    assert len(make_rows(counting_tokenizer, 3, [str(path)])) == 3
    assert counting_tokenizer.calls <= 3


def test_epochs_and_left_out_documents_are_reported_once(tokenizer, source, caplog):
    caplog.set_level(logging.WARNING, logger="rope_patch")
    path, _ = source("a.jsonl", [5, 60, 7])
    make_rows(tokenizer, 1, [path])
    assert not caplog.messages
    make_rows(tokenizer, 5, [path])
    left_out, second = caplog.messages
    assert "2 of 3 documents were too short and left out" in left_out
    assert "packing: concatenate" in left_out
    assert second.startswith(path)
    assert "second epoch" in second
    caplog.clear()
    make_rows(tokenizer, 5, [path], settings=SETTINGS | {"share": RowShare(rank=1, world=2)})
    assert not caplog.messages


def test_data_without_a_long_enough_document_is_refused(tokenizer, source):
    path, _ = source("a.jsonl", [5, 47, 7])
    message = r"shorter train_length.*concatenate.* 47 tokens, expected 48"
    with pytest.raises(ValueError, match=message):
        make_rows(tokenizer, 1, [path])
    long_path, _ = source("b.jsonl", [500])
    with pytest.raises(ValueError, match=message):
        make_rows(tokenizer, 9, [long_path, path])
    with pytest.raises(ValueError, match=r"min_document_length.*47 tokens, expected 100"):
        make_rows(tokenizer, 1, [path], packing="masked", min_document_length=100)


def test_documents_that_shrink_during_reading_are_an_error(tokenizer, source):
    path, _ = source("a.jsonl", [60])
    rows = iter(packed(tokenizer, [path]))
    next(rows)
    source("a.jsonl", [9])
    with pytest.raises(ValueError, match=r"no row from .*all is too short"):
        next(rows)


def test_a_file_of_blank_lines_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"no documents in .*a\.jsonl"):
        make_rows(tokenizer, 1, [str(tmp_path / "a.jsonl")], packing="masked")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": []}, "say data"),
        ({"short_data": []}, "say short_data"),
        ({"data": ["novels:emma", "novels:emma"]}, "'novels:emma' twice: say data_weights"),
        ({"packing": "mask"}, "single, .*, got 'mask' .*mean 'masked'"),
        ({"short_share": 1.0}, "short_share .* 1.0"),
        ({"short_share": -0.1}, "short_share .* -0.1"),
        ({"short_share": float("nan")}, "short_share .* nan"),
        ({"data_weights": [1.0, 2.0]}, "each of 1 sources in data, got 2"),
        ({"data_weights": [0.0]}, r"data_weights .* \[0\.0\]"),
        ({"short_length": 49}, "short_length .* 1 to 48, .* 49"),
        ({"short_length": 0}, "short_length .* 1 to 48"),
        ({"min_document_length": -1}, "min_document_length .* -1"),
        ({"shuffle_window": -1}, "shuffle_window .* -1"),
        ({"packing_window": 0, "packing": "best_fit"}, "packing_window .* 0"),
    ],
)
def test_bad_arguments_are_refused(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        packed(tokenizer, **{"data": ["novels:emma"]} | arguments)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit_unmasked"])
def test_rows_without_masks_need_an_end_token(tokenizer, packing):
    counting_tokenizer = CountingTokenizer(tokenizer)
    counting_tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match=r"needs an end token: set tokenizer\.eos_token"):
        make_rows(counting_tokenizer, 1, ["novels:emma"], packing=packing)


@pytest.mark.parametrize("arguments", [{"packing": "masked"}, {"short_share": 0.2}])
def test_packing_that_needs_a_mask_is_refused_without_masks(arguments):
    require_no_document_masks(DataArguments(packing="concatenate"))
    with pytest.raises(ValueError, match=r"no mask: .* got packing"):
        require_no_document_masks(DataArguments(**arguments))


def test_transformers_parses_the_arguments():
    parser = HfArgumentParser(DataArguments)
    (parsed,) = parser.parse_args_into_dataclasses(
        ["--data", "a", "b", "--data_weights", "1", "2", "--short_share", "0.2"]
    )
    expected = {"data": ["a", "b"], "data_weights": [1.0, 2.0], "short_share": 0.2}
    assert parsed == DataArguments(**expected)
    assert parser.parse_dict({"data": "a"})[0].data == ["a"]


def saved_model(folder):
    model = vision_model(SAMPLE[0], vocab_size=512, max_position_embeddings=256)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return model


@pytest.mark.parametrize("packing", ["single", "masked"])
def test_models_with_three_positions_train_on_single_documents(packing, tmp_path):
    saved_model(tmp_path / "model")
    changes = {"model": tmp_path / "model", "packing": packing, "max_steps": 1}
    result = run_in_this_process("finetune", *command_line(tmp_path / "out", **changes))
    if packing == "single":
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 1
    assert "may see each other" in result.stderr


@torch.no_grad()
@pytest.mark.skipif(SAMPLE[0] != "qwen2_vl", reason="is another model")
def test_packed_documents_see_each_other_in_qwen2_vl():
    """The reason of the refusal: transformers makes no mask from its position_ids."""
    model = vision_model("qwen2_vl")
    first, second = text_tokens(10, seed=3), text_tokens(10, seed=4)
    packed = torch.cat([first, second], dim=1)
    positions = torch.arange(10).repeat(2)[None]
    logits = model(input_ids=packed, position_ids=positions, use_cache=False).logits
    alone = model(input_ids=second, use_cache=False).logits
    assert (logits[:, 10:] - alone).abs().max() > 0.1
