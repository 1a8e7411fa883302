"""GPT-2 samples: the index against a plain loop, coverage, multi-epoch order, document ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.config import GPTDataConfig
from megatron01.data import GPTDataset, SampleCounts, Tokenizer, build_gpt_datasets
from megatron01.data.gpt import build_gpt_index
from megatron01.data.indexed import write_origin
from megatron01.errors import UserError
from tests.unit.data.conftest import DATA, loader_of

lengths_strategy = st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(any)


def sample_index_by_loop(lengths: list[int], num_samples: int, seq_length: int) -> list[list[int]]:
    """The loop of Megatron-LM's helpers: walk through the documents, one sample after the other."""
    rows = [[0, 0]]
    position = offset = 0
    for _ in range(num_samples):
        remaining = seq_length + 1
        while remaining:
            available = lengths[position] - offset
            remaining -= available
            if remaining <= 0:
                offset += remaining + available - 1
                remaining = 0
            else:
                position, offset = position + 1, 0
        rows.append([position, offset])
    return rows


@given(lengths=lengths_strategy, seq_length=st.integers(1, 9), num_samples=st.integers(1, 60), seed=st.integers(0, 99))
def test_index_equals_a_plain_loop(lengths: list[int], seq_length: int, num_samples: int, seed: int) -> None:
    sizes = np.array([99, *lengths, 99], dtype=np.int32)
    last = len(lengths) + 1
    index = build_gpt_index(sizes, 1, last, num_samples=num_samples, seq_length=seq_length, seed=seed)

    per_epoch = sum(lengths)
    epochs = next(e for e in range(1, 10**6) if (e * per_epoch - 1) // seq_length >= num_samples)
    total = (epochs * per_epoch - 1) // seq_length
    before = ((epochs - 1) * per_epoch - 1) // seq_length if epochs > 1 else 0
    separate = epochs > 1 and num_samples - before < int(0.80 * ((per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)
    documents, order = [], []
    for count in [epochs - 1, 1] if separate else [epochs]:
        part = np.array(list(range(1, last)) * count, dtype=np.int32)
        random.shuffle(part)
        documents += part.tolist()
    for start, stop in [(0, before), (before, total)] if separate else [(0, total)]:
        part = np.arange(start, stop, dtype=np.uint32)
        random.shuffle(part)
        order += part.tolist()

    assert index["document"].tolist() == documents
    assert index["shuffle"].tolist() == order
    assert index["sample"].tolist() == sample_index_by_loop(sizes[documents].tolist(), total, seq_length)
    assert [index[name].dtype for name in ("document", "sample", "shuffle")] == [np.int32, np.int32, np.uint32]


@given(lengths=lengths_strategy, seq_length=st.integers(1, 9), num_samples=st.integers(1, 40))
def test_samples_make_up_the_stream(
    write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, lengths: list[int], seq_length: int, num_samples: int
) -> None:
    ids = iter(range(1, 5000))
    stream_of = [[next(ids) for _ in range(length)] for length in lengths]
    prefix = write_pair([[document] for document in stream_of])
    config = GPTDataConfig(data_path=(prefix,), seq_length=seq_length, split="1")
    dataset = build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(num_samples), 7).train
    assert dataset is not None and len(dataset) >= num_samples
    index = build_gpt_index(
        np.array(lengths, dtype=np.int32), 0, len(lengths), num_samples=num_samples, seq_length=seq_length, seed=7
    )
    stream = [token for document in index["document"].tolist() for token in stream_of[document]]
    assert sorted(index["shuffle"].tolist()) == list(range(len(dataset)))
    for position, sample in enumerate(index["shuffle"].tolist()):
        start = sample * seq_length
        assert dataset[position]["tokens"].tolist() == stream[start : start + seq_length]
        assert dataset[position]["labels"].tolist() == stream[start + 1 : start + seq_length + 1]


def corpus(write_pair: Callable[..., str], tokenizer: Tokenizer, num_documents: int = 40) -> GPTDataConfig:
    documents = [
        [[*tokenizer.encode(f"Document number {i}, which has some words."), tokenizer.eod]]
        for i in range(num_documents)
    ]
    return GPTDataConfig(data_path=(write_pair(documents),), seq_length=16, split="8,1,1")


def test_splits_have_different_documents(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    config = corpus(write_pair, gpt2_tokenizer)
    splits = build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(100, 20, 20), 1234)

    def numbers(dataset: GPTDataset | None) -> set[int]:
        assert dataset is not None
        texts = [gpt2_tokenizer.decode(dataset[i]["tokens"].tolist()) for i in range(len(dataset))]
        found = {int(number) for text in texts for number in re.findall(r"number (\d+), which", text)}
        assert found
        return found

    assert numbers(splits.train) <= set(range(32))
    assert numbers(splits.valid) <= set(range(32, 36))
    assert numbers(splits.test) <= set(range(36, 40))


def test_types_shapes_and_document_ends(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    config = replace(corpus(write_pair, gpt2_tokenizer), reset_position_ids=True, eod_mask_loss=True)
    dataset = build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(100), 1234).train
    assert dataset is not None
    for index in range(20):
        sample = dataset[index]
        assert {key: (value.dtype, value.shape) for key, value in sample.items()} == {
            "tokens": (np.int64, (16,)),
            "labels": (np.int64, (16,)),
            "loss_mask": (np.int64, (16,)),
            "position_ids": (np.int64, (16,)),
        }
        position = 0
        for token, mask, expected in zip(sample["tokens"], sample["loss_mask"], sample["position_ids"], strict=True):
            assert position == expected
            assert mask == (token != gpt2_tokenizer.eod)
            position = 0 if token == gpt2_tokenizer.eod else position + 1
    plain = build_gpt_datasets(corpus(write_pair, gpt2_tokenizer), gpt2_tokenizer, SampleCounts(100), 1234).train
    assert plain is not None
    assert plain[0]["position_ids"].tolist() == list(range(16)) and plain[0]["loss_mask"].all()
    for outside in (-1, len(plain)):
        with pytest.raises(IndexError):
            plain[outside]


@settings(max_examples=25)
@given(
    replicas=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    batches=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stop=st.integers(0, 9),
)
def test_an_epoch_reads_every_token_once_over_all_replicas(
    write_pair: Callable[..., str],
    gpt2_tokenizer: Tokenizer,
    replicas: tuple[int, int],
    batches: tuple[int, int],
    stop: int,
) -> None:
    """Also if the run is stopped and resumed with other numbers of replicas and micro-batch sizes."""
    ids = list(range(5, 5 + 36 * 8 + 1))  # 17 documents of 17 tokens
    prefix = write_pair([[ids[start : start + 17]] for start in range(0, len(ids), 17)])
    config = GPTDataConfig(data_path=(prefix,), seq_length=8, split="1")
    dataset = build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(36), 3).train
    assert dataset is not None and len(dataset) == 36
    consumed, seen = 0, []
    for number, batch, steps in zip(replicas, batches, (stop, 99), strict=True):
        loaders = [
            loader_of(dataset, consumed_samples=consumed, micro_batch_size=batch, replica=replica, num_replicas=number)
            for replica in range(number)
            if (36 - consumed) >= batch * number
        ]
        for _, *together in zip(range(steps if loaders else 0), *loaders, strict=False):
            seen += [token for part in together for token in part["labels"].flatten().tolist()]
            consumed += batch * number
    seen += dataset.batch(range(consumed, 36))["labels"].flatten().tolist()  # less than a whole step
    sizes = np.full(17, 17, dtype=np.int32)
    document = build_gpt_index(sizes, 0, 17, num_samples=36, seq_length=8, seed=3)["document"]
    stream = [token for number in document.tolist() for token in ids[number * 17 : number * 17 + 17]]
    assert sorted(seen) == sorted(stream[1 : 36 * 8 + 1])


@pytest.mark.parametrize("eod_mask_loss", [False, True])
@pytest.mark.parametrize("reset_position_ids", [False, True])
@pytest.mark.parametrize("reset_attention_mask", [False, True])
def test_document_ends_token_by_token(
    write_pair: Callable[..., str],
    gpt2_tokenizer: Tokenizer,
    eod_mask_loss: bool,
    reset_position_ids: bool,
    reset_attention_mask: bool,
) -> None:
    eod = gpt2_tokenizer.eod
    documents = [[[eod]], [[5, eod]], [[6, 7, 8, 9, eod]], [[10, 11]], [[eod, eod, 12]], [[13] * 30 + [eod]]]
    config = GPTDataConfig(
        data_path=(write_pair(documents),),
        seq_length=11,
        split="1",
        eod_mask_loss=eod_mask_loss,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
    )
    dataset = build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(30), 1).train
    assert dataset is not None
    batch = dataset.batch(range(30))
    assert ("document_ids" in batch) == reset_attention_mask
    for row, tokens in enumerate(batch["tokens"].tolist()):
        position = document = 0
        for i, token in enumerate(tokens):
            assert batch["loss_mask"][row, i] == (not eod_mask_loss or token != eod)
            assert batch["position_ids"][row, i] == (position if reset_position_ids else i)
            assert not reset_attention_mask or batch["document_ids"][row, i] == document
            position += 1
            if token == eod:
                position, document = 0, document + 1


@settings(max_examples=30)
@given(lengths=lengths_strategy, seq_length=st.integers(1, 9), epochs=st.integers(1, 3))
def test_padded_held_out_text_is_predicted_once_a_pass(
    write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, lengths: list[int], seq_length: int, epochs: int
) -> None:
    ids = iter(range(1, 4999))
    documents = [[next(ids) for _ in range(length)] for length in lengths]
    stream = [token for document in documents for token in document]
    prefix = write_pair([[document] for document in documents])
    config = GPTDataConfig(
        train_data_path=(prefix,), valid_data_path=(prefix,), seq_length=seq_length, pad_last_sequence=True
    )
    per_pass = -(-(len(stream) - 1) // seq_length)
    splits = build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(1, max(1, epochs * per_pass)), 7)
    assert splits.train is not None and splits.train.batch(range(1))["loss_mask"].all()
    if per_pass == 0:
        assert splits.valid is None
        return
    assert splits.valid is not None and len(splits.valid) == epochs * per_pass
    assert splits.sources[1].num_epochs == epochs
    batch = splits.valid.batch(range(len(splits.valid)))
    counts = batch["loss_mask"] == 1
    assert batch["tokens"][counts].tolist() == stream[:-1] * epochs
    assert batch["labels"][counts].tolist() == stream[1:] * epochs
    assert (batch["labels"][~counts] == gpt2_tokenizer.eod).all()


def test_the_order_of_samples_is_part_of_their_fingerprint(
    write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer
) -> None:
    """Of a single document, of which a seed changes nothing else."""
    config = GPTDataConfig(data_path=(write_pair([[[*range(1, 200)]]]),), seq_length=16, split="1")
    one, same, other = (
        build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(10), seed).train.fingerprint for seed in (1, 1, 2)
    )
    assert one == same != other


def test_index_is_cached_by_what_it_depends_on(
    write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = corpus(write_pair, gpt2_tokenizer)
    cache = tmp_path / "cache"

    def entries(config: GPTDataConfig, seed: int = 1) -> set[str]:
        build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(100), seed)
        return {path.name for path in cache.iterdir()}

    first = entries(config)
    assert entries(config) == first and len(first) == 2  # the index, and the hash and range of the token files
    assert len(entries(config, seed=2)) == 3
    assert len(entries(replace(config, seq_length=8))) == 4
    assert len(entries(replace(config, split="7,2,1"))) == 5
    elsewhere = replace(config, data_cache_path=str(tmp_path / "elsewhere"))
    assert len(entries(elsewhere)) == 5 and len(list((tmp_path / "elsewhere").iterdir())) == 2


def test_ends_of_documents_that_are_not_there_are_noted(
    write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer
) -> None:
    config = replace(corpus(write_pair, gpt2_tokenizer), reset_attention_mask=True)
    (prefix,) = config.data_path or ()
    origin: dict[str, Any] = {"tokenizer": {"fingerprint": gpt2_tokenizer.fingerprint}}
    lacking = f"reset_attention_mask has no effect on {prefix}, whose"
    # of a file that does not say it, nothing is known
    for said, expected in (({"append_eod": True}, ()), ({"append_eod": False}, (lacking,)), ({}, ())):
        write_origin(prefix, origin | said)
        notes = build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(1), 1).notes
        assert len(notes) == len(expected) and all(map(str.startswith, notes, expected))


def test_sentences_are_noted(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    prefix = write_pair([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9]]], name="sentences")
    config = replace(corpus(write_pair, gpt2_tokenizer), data_path=(prefix,), split="1")
    (note,) = build_gpt_datasets(config, gpt2_tokenizer, SampleCounts(1), 1).notes
    assert note.startswith(f"{prefix} has 3 sequences in 2 documents: its sentences are taken as documents")


def test_unusable_data(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, bert_tokenizer: Tokenizer) -> None:
    config = corpus(write_pair, gpt2_tokenizer)
    with pytest.raises(UserError, match="no end-of-document token"):
        build_gpt_datasets(config, bert_tokenizer, SampleCounts(1), 1)
    with pytest.raises(UserError, match=r"train split .* has no usable text"):
        build_gpt_datasets(replace(config, split="0,1,0"), gpt2_tokenizer, SampleCounts(1), 1)
    with pytest.raises(UserError, match=r"train split .* has no usable text"):
        hollow = replace(config, data_path=(write_pair([[[]], [[]]], name="hollow"),), split="1")
        build_gpt_datasets(hollow, gpt2_tokenizer, SampleCounts(1), 1)
    with pytest.raises(UserError, match="train split"):
        build_gpt_datasets(
            replace(config, data_path=(write_pair([], name="none"),)), gpt2_tokenizer, SampleCounts(1), 1
        )
    splits = build_gpt_datasets(replace(config, split="1"), gpt2_tokenizer, SampleCounts(1, 5, 0), 1)
    assert splits.valid is None and splits.test is None


def test_shipped_files_of_another_project(tmp_path: Path) -> None:
    """100 documents of GPT-2 tokens that Megatron-DeepSpeed wrote: they decode to English."""
    from megatron01.data import build_tokenizer

    golden = Path(__file__).parents[2] / "golden" / "data" / "bigscience_ag_news_prompt_inputs_document"
    config = GPTDataConfig(
        data_path=(str(golden),),
        seq_length=64,
        split="1",
        data_cache_path=str(tmp_path),
        vocab_file=str(DATA / "vocab" / "gpt2-vocab.json"),
        merge_file=str(DATA / "vocab" / "gpt2-merges.txt"),
    )
    tokenizer = build_tokenizer(config)
    dataset = build_gpt_datasets(config, tokenizer, SampleCounts(90), 1234).train
    assert dataset is not None
    text = " ".join(tokenizer.decode(dataset[i]["tokens"].tolist()) for i in range(90))
    assert text.count(" the ") > 50
