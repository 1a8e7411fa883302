"""BERT samples: invariants of every objective and masking, and unusable data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron01.config import BertDataConfig
from megatron01.data import BertDataset, SampleCounts, Tokenizer, build_bert_datasets
from megatron01.errors import UserError
from tests.unit.data.conftest import loader_of

SEQ_LENGTH = 48


def documents(tokenizer: Tokenizer) -> list[list[list[int]]]:
    """Documents whose sentences differ, with words of several pieces."""
    random = np.random.RandomState(0)
    words = ["unquestionableness", "tree", "house", "antidisestablishment", "river", "zygomorphic", "runs", "the", "a"]
    return [
        [tokenizer.encode(f"{d} {s} " + " ".join(random.choice(words, 3 + s))) for s in range(2 + d % 12)]
        for d in range(40)
    ]


@pytest.fixture
def config(write_pair: Callable[..., str], bert_tokenizer: Tokenizer) -> BertDataConfig:
    return BertDataConfig(data_path=(write_pair(documents(bert_tokenizer)),), seq_length=SEQ_LENGTH, split="8,1,1")


def build(config: BertDataConfig, tokenizer: Tokenizer, seed: int = 1234) -> BertDataset:
    dataset = build_bert_datasets(config, tokenizer, SampleCounts(300), seed).train
    assert dataset is not None
    return dataset


def original_tokens(sample: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """The tokens before masking, without padding."""
    unmasked = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])
    return unmasked[sample["padding_mask"] == 1]


@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
@pytest.mark.parametrize("masking", ["whole_word_ngram", "token"])
@pytest.mark.parametrize("max_predictions", [None, 3])
def test_invariants(
    config: BertDataConfig, bert_tokenizer: Tokenizer, objective: Any, masking: Any, max_predictions: int | None
) -> None:
    config = replace(config, objective=objective, masking=masking, max_predictions_per_seq=max_predictions)
    dataset = build(config, bert_tokenizer)
    special = bert_tokenizer.masking
    assert special is not None
    kept = replaced = masked = swapped = 0
    for index in range(len(dataset)):
        sample = dataset[index]
        rows = ("text", "types", "labels", "loss_mask", "padding_mask")
        assert all(sample[key].shape == (SEQ_LENGTH,) for key in rows)
        assert sample["is_random"].shape == sample["truncated"].shape == ()
        assert {value.dtype for value in sample.values()} == {np.dtype(np.int64)}
        real, loss_mask = sample["padding_mask"] == 1, sample["loss_mask"] == 1
        tokens = original_tokens(sample)
        length = len(tokens)
        assert real[:length].all() and not real[length:].any()
        assert (sample["text"][~real] == special.pad).all() and (sample["types"][~real] == 0).all()
        assert ((sample["labels"] == -1) == ~loss_mask).all() and not loss_mask[~real].any()
        assert tokens[0] == special.cls and tokens[-1] == special.sep
        separators = np.flatnonzero(tokens == special.sep)
        assert len(separators) == (1 if objective == "none" else 2)
        assert not np.isin(sample["labels"][loss_mask], [special.cls, special.sep]).any()
        second = np.arange(length) > separators[0]
        assert (sample["types"][real] == (second if objective != "none" else 0)).all()
        target = dataset._mapping[index, 2]
        limit = max(1, round(0.15 * length))
        if masking == "whole_word_ngram":
            limit = int(min(0.15 * target, limit))
        assert loss_mask.sum() <= min(limit, max_predictions or limit)
        if masking == "token":
            assert loss_mask.sum() == min(limit, max_predictions or limit)
        else:  # a word is masked whole
            continues = special.is_continuation[tokens]
            inside = continues[1:] & ~np.isin(tokens[:-1], [special.cls, special.sep])
            assert (loss_mask[1:length] == loss_mask[: length - 1])[inside].all()
        masked += int((sample["text"][loss_mask] == special.mask).sum())
        kept += int((sample["text"] == sample["labels"])[loss_mask].sum())
        replaced += int(loss_mask.sum())
        swapped += int(sample["is_random"])
    assert 0.7 < masked / replaced < 0.9 and 0.05 < kept / replaced < 0.16
    assert swapped == 0 if objective == "none" else 0.4 < swapped / len(dataset) < 0.6


def test_samples_are_functions_of_seed_and_index(config: BertDataConfig, bert_tokenizer: Tokenizer) -> None:
    first, second, other = (build(config, bert_tokenizer, seed) for seed in (1, 1, 2))
    for index in [5, 0, 5, len(first) - 1]:
        a, b = first[index], second[index]
        assert all((a[key] == b[key]).all() for key in a)
    assert any((first[i]["text"] != other[i]["text"]).any() for i in range(5))
    assert first.fingerprint == second.fingerprint != other.fingerprint


def test_each_sentence_is_used_once_an_epoch(config: BertDataConfig, bert_tokenizer: Tokenizer) -> None:
    dataset = build_bert_datasets(config, bert_tokenizer, SampleCounts(1), 3).train
    assert dataset is not None
    ranges = dataset._mapping[:, :2].tolist()
    used = sorted(sentence for first, last in ranges for sentence in range(first, last))
    assert used == list(range(int(dataset._documents[-1])))
    starts = np.searchsorted(dataset._documents, [first for first, _ in ranges], side="right")
    ends = np.searchsorted(dataset._documents, [last - 1 for _, last in ranges], side="right")
    assert (starts == ends).all()  # no sample crosses a document boundary


def test_epochs_are_passes_over_the_text(config: BertDataConfig, bert_tokenizer: Tokenizer) -> None:
    one = build_bert_datasets(config, bert_tokenizer, SampleCounts(1), 3)
    assert one.sources[0].num_epochs == pytest.approx(1 / len(one.train))
    three = build_bert_datasets(config, bert_tokenizer, SampleCounts(3 * len(one.train)), 3)
    assert three.sources[0].num_epochs == pytest.approx(3.0, rel=0.1)  # short samples fall differently in each


def test_one_of_a_whole_number_of_samples_is_short(config: BertDataConfig, bert_tokenizer: Tokenizer) -> None:
    """Of 7 for a share of 0.15, as 1 / 0.15 is 6.7."""
    found, seventh, sixth = (
        build(replace(config, short_seq_prob=share), bert_tokenizer)._mapping for share in (0.15, 1 / 7, 1 / 6)
    )
    assert np.array_equal(found, seventh) and not np.array_equal(found, sixth)


def test_nsp_takes_the_second_segment_from_another_document(
    write_pair: Callable[..., str], bert_tokenizer: Tokenizer
) -> None:
    # Every token of document d is 100 + d; two documents are empty.
    texts = [[[100 + d] * 6] * 4 if d not in (3, 7) else [] for d in range(10)]
    config = BertDataConfig(
        data_path=(write_pair(texts),), seq_length=40, split="1", objective="nsp", short_seq_prob=0.0
    )
    dataset = build(config, bert_tokenizer)
    special = bert_tokenizer.masking
    assert special is not None
    seen = set()
    for index in range(len(dataset)):
        sample = dataset[index]
        tokens = original_tokens(sample)
        types = sample["types"][: len(tokens)]
        (a,) = set(tokens[types == 0].tolist()) - {special.cls, special.sep}
        (b,) = set(tokens[types == 1].tolist()) - {special.sep}
        assert (a != b) == bool(sample["is_random"])
        seen.add((a, b))
    assert len(seen) > 30


def test_documents_with_long_sentences_are_left_out(write_pair: Callable[..., str], bert_tokenizer: Tokenizer) -> None:
    texts = [[[10] * 513, [10] * 5], [], [[11] * 512, [11] * 5], [[12] * 513], [[13] * 5, [13] * 600, [13] * 700]]
    config = BertDataConfig(data_path=(write_pair(texts),), seq_length=SEQ_LENGTH, split="1")
    splits = build_bert_datasets(config, bert_tokenizer, SampleCounts(300), 1)
    assert set(splits.train._mapping[:, 0].tolist()) == {2}
    (note,) = splits.notes
    assert "2 of 5 documents" in note and "more than 512 tokens" in note
    short = [[10] * 5, [11] * 5]
    halves = write_pair([short, short, short, texts[0], short, texts[0]], "halves")
    config = BertDataConfig(data_path=(halves,), seq_length=SEQ_LENGTH, split="1,1")
    (note,) = build_bert_datasets(config, bert_tokenizer, SampleCounts(3, 3), 1).notes
    assert note.startswith("2 of 3 documents in the valid split")


def test_a_blend_notes_them_once(write_pair: Callable[..., str], bert_tokenizer: Tokenizer) -> None:
    long = [[10] * 513, [10] * 5]
    some, none = write_pair([[[10] * 5, [11] * 5], long], "some"), write_pair([long], "none")
    config = BertDataConfig(train_data_path=(some,), valid_data_path=(some, none), seq_length=SEQ_LENGTH)
    notes = build_bert_datasets(config, bert_tokenizer, SampleCounts(3, 3), 1).notes
    assert [note.split(" ", 1)[0] for note in notes] == ["1", "1", "the"]


def test_unusable_data(
    config: BertDataConfig, write_pair: Callable[..., str], bert_tokenizer: Tokenizer, gpt2_tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError, match=r"lacks the tokens \[CLS\]"):
        build_bert_datasets(config, gpt2_tokenizer, SampleCounts(1), 1)
    with pytest.raises(UserError, match="seq_length is 4"):
        build(replace(config, seq_length=4), bert_tokenizer)
    unsplit = replace(config, data_path=(write_pair([[[5, 6]], [[7]]], name="unsplit"),), split="1")
    with pytest.raises(UserError, match="no pairs of sentences; preprocess the text with split_sentences"):
        build(unsplit, bert_tokenizer)
    assert len(build(replace(unsplit, objective="none"), bert_tokenizer)) >= 300
    empty = replace(config, data_path=(write_pair([[], [[5], [6]], [], []], name="empty"),), split="1")
    assert len(build(empty, bert_tokenizer)) >= 300  # of the one document that has sentences
    single = replace(config, data_path=(write_pair([[[5], [6]]], name="single"),), split="1")
    assert len(build(single, bert_tokenizer)) >= 300
    with pytest.raises(UserError, match=r"train split .* has no usable text; expected two documents"):
        build(replace(single, objective="nsp"), bert_tokenizer)
    with pytest.raises(UserError, match=r"train split .* has no usable text"):
        build(replace(config, data_path=(write_pair([[[5] * 600] * 2], name="long"),), split="1"), bert_tokenizer)


def test_what_a_model_is_given(config: BertDataConfig, bert_tokenizer: Tokenizer) -> None:
    dataset = build(config, bert_tokenizer)
    padded = dataset.batch(range(8))
    assert not padded["padding_mask"].all()
    batch = dataset.collate(padded)
    for name, wanted in (("masked_positions", padded["labels"] >= 0), ("token_positions", padded["padding_mask"] == 1)):
        assert batch[name].dtype == np.int64
        assert np.array_equal(batch[name], [i for i, chosen in enumerate(wanted.flatten()) if chosen])
    assert all(batch[name] is rows for name, rows in padded.items())
    full = {name: rows[padded["padding_mask"].all(1)] for name, rows in padded.items()}
    assert len(full["text"]) > 0
    assert dataset.collate(full).keys() == full.keys() - {"padding_mask"} | {"masked_positions"}
    loaded = next(iter(loader_of(dataset, micro_batch_size=8)))
    assert np.array_equal(loaded["token_positions"].numpy(), batch["token_positions"])


def test_a_share_of_no_masks(config: BertDataConfig, bert_tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"mask_prob 0\.05 of seq_length 22 is less than one token"):
        build(replace(config, mask_prob=0.05, seq_length=22), bert_tokenizer)
    build(replace(config, mask_prob=0.05, seq_length=23), bert_tokenizer)
    build(replace(config, mask_prob=0.05, seq_length=22, masking="token"), bert_tokenizer)
    with pytest.raises(UserError, match=r"mask_prob is 0\.0; expected a number in"):
        replace(config, mask_prob=0.0)
    assert build(replace(config, mask_prob=1.0), bert_tokenizer)[0]["loss_mask"].sum() > 0.5 * SEQ_LENGTH


def test_a_share_of_short_samples_beyond_64_bits(config: BertDataConfig, bert_tokenizer: Tokenizer) -> None:
    mapping = [build(replace(config, short_seq_prob=share), bert_tokenizer)._mapping for share in (1e-300, 0.0)]
    assert mapping[0].tolist() == mapping[1].tolist()
