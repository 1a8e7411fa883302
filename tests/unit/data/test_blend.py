"""Blends: Megatron's order, shares after any number of samples, and splits made of several files."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config import BertDataConfig, GPTDataConfig
from megatron01.data import SampleCounts, Splits, Tokenizer, build_bert_datasets, build_gpt_datasets
from megatron01.data import datasets as datasets_module
from megatron01.data.datasets import BlendedDataset, SampleDataset, blend_order, samples_per_dataset
from megatron01.errors import UserError

weight_lists = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8)


def order_by_loop(weights: list[float], num_samples: int) -> tuple[list[int], list[int]]:
    """Megatron-LM's rule: the largest of weight x max(i, 1) - drawn; ties go to the first."""
    shares = np.array(weights) / np.sum(weights)
    drawn = [0] * len(weights)
    datasets, samples = [], []
    for i in range(num_samples):
        lags = [share * max(i, 1) - count for share, count in zip(shares, drawn, strict=True)]
        chosen = lags.index(max(lags))
        datasets.append(chosen)
        samples.append(drawn[chosen])
        drawn[chosen] += 1
    return datasets, samples


@given(weights=weight_lists, num_samples=st.integers(0, 300))
def test_order_equals_a_plain_loop(weights: list[float], num_samples: int) -> None:
    order = blend_order(weights, num_samples)
    assert (order["dataset"].tolist(), order["sample"].tolist()) == order_by_loop(weights, num_samples)
    assert order["drawn"].tolist() == np.bincount(order["dataset"], minlength=len(weights)).tolist()
    assert (order["dataset"].dtype, order["sample"].dtype) == (np.int16, np.int64)


@given(weights=weight_lists, num_samples=st.integers(1, 2000))
def test_every_dataset_has_given_its_share_at_every_moment(weights: list[float], num_samples: int) -> None:
    order = blend_order(weights, num_samples)
    shares = np.array(weights) / np.sum(weights)
    drawn = np.cumsum(order["dataset"][:, None] == np.arange(len(weights)), axis=0)
    expected = shares * np.arange(1, num_samples + 1)[:, None]
    assert (drawn <= expected + 2).all() and (drawn >= expected - len(weights)).all()
    requested = samples_per_dataset(weights, num_samples, order["drawn"])
    assert all(count >= needed for count, needed in zip(requested, order["drawn"].tolist(), strict=True))
    assert (blend_order(weights, num_samples // 2)["dataset"] == order["dataset"][: num_samples // 2]).all()


def corpora(write_pair: Callable[..., str], sizes: list[int]) -> list[str]:
    """Files of ``sizes`` documents of 20 tokens each; every token of file k is 10 + k."""
    return [write_pair([[[10 + k] * 20]] * size, name=f"file{k}") for k, size in enumerate(sizes)]


def origins(dataset: SampleDataset | None) -> list[int]:
    assert dataset is not None
    tokens = dataset.batch(range(len(dataset)))["tokens"]
    assert (tokens == tokens[:, :1]).all()
    return (tokens[:, 0] - 10).tolist()


def build(tokenizer: Tokenizer, counts: SampleCounts, **settings: Any) -> Splits:
    return build_gpt_datasets(GPTDataConfig(seq_length=10, **settings), tokenizer, counts, 1234)


def test_splits_are_mixed_by_weight(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    a, b, c = corpora(write_pair, [40, 400, 20])
    paths = ("1", a, "2", b, "1", c)
    splits = build(gpt2_tokenizer, SampleCounts(400, 40, 8), data_path=paths, split="8,1,1")
    assert Counter(origins(splits.train)) == {0: 100, 1: 200, 2: 100}
    assert Counter(origins(splits.valid)) == {0: 10, 1: 20, 2: 10}
    assert Counter(origins(splits.test)) == {0: 2, 1: 4, 2: 2}
    assert [(item.split, item.num_documents, item.num_samples) for item in splits.sources[:3]] == [
        ("train", 32, 100),
        ("train", 320, 200),
        ("train", 16, 100),
    ]
    assert splits.sources[2].num_epochs == pytest.approx(100 / (16 * 20 / 10))
    # not from the cache, which holds the mix above
    others = [(paths, {0: 50, 1: 100, 2: 50}, 200), (("1", a, "1", b, "2", c), {0: 100, 1: 100, 2: 200}, 400)]
    for other_paths, expected, num_samples in others:
        found = build(gpt2_tokenizer, SampleCounts(num_samples), data_path=other_paths, split="8,1,1").train
        assert Counter(origins(found)) == expected


def test_without_weights_tokens_count(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    paths = tuple(corpora(write_pair, [10, 30]))
    splits = build(gpt2_tokenizer, SampleCounts(400), data_path=paths, split="1")
    assert Counter(origins(splits.train)) == {0: 100, 1: 300}


def test_splits_from_files_of_their_own(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    a, b, c = corpora(write_pair, [5, 7, 3])
    splits = build(gpt2_tokenizer, SampleCounts(60, 20, 20), train_data_path=("1", a, "2", b), valid_data_path=(c,))
    assert Counter(origins(splits.train)) == {0: 20, 1: 40}
    assert set(origins(splits.valid)) == {2} and splits.test is None
    assert [item.num_documents for item in splits.sources] == [5, 7, 3]  # all of each: nothing is split
    assert splits.notes == ("test_data_path is not given: there is no test split",)


def test_a_file_that_runs_out_is_read_again(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    a, b = corpora(write_pair, [1, 1000])
    splits = build(gpt2_tokenizer, SampleCounts(1000), data_path=("999", a, "0.001", b), split="1")
    assert Counter(origins(splits.train)) == {0: 999, 1: 1}


def test_files_without_text_for_a_part(write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer) -> None:
    a, b = corpora(write_pair, [1, 20])
    splits = build(gpt2_tokenizer, SampleCounts(40, 20), data_path=("1", a, "1", b), split="8,2")
    assert Counter(origins(splits.train)) == {0: 20, 1: 20}
    assert set(origins(splits.valid)) == {1}
    (note,) = splits.notes
    assert note.startswith(f"the valid split of {a}") and note.endswith("the others fill its share")
    with pytest.raises(UserError, match=r"the train split of .*file0 \(documents 0 to 0, split 2,8\) has no usable"):
        build(gpt2_tokenizer, SampleCounts(40), data_path=("1", a, "1", b), split="2,8")
    with pytest.raises(UserError, match="file0"):
        build(gpt2_tokenizer, SampleCounts(40), data_path=(a, a), split="2,8")
    none = build(gpt2_tokenizer, SampleCounts(40, 9), data_path=(a, a), split="8,2")
    assert none.valid is None and all(note.endswith("it is not evaluated") for note in none.notes)
    with pytest.raises(UserError, match="data_path is not given"):
        build(gpt2_tokenizer, SampleCounts(40))


def test_a_blend_of_many_files(
    write_pair: Callable[..., str], gpt2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = corpora(write_pair, [20] * 9)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 25
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        with monkeypatch.context() as patch:
            patch.setattr(datasets_module, "allow_many_open_files", lambda: None)
            with pytest.raises(UserError, match=r"Too many open files; raise the limit with ulimit -n"):
                build(gpt2_tokenizer, SampleCounts(40), data_path=tuple(paths))
        blend = build(gpt2_tokenizer, SampleCounts(40), data_path=tuple(paths)).train
        assert blend is not None and len(blend) == 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_blend_reads_what_its_datasets_read(write_pair: Callable[..., str], bert_tokenizer: Tokenizer) -> None:
    numbers = np.random.RandomState(0)
    paths = [
        write_pair([[numbers.randint(10, 500, 9).tolist() for _ in range(6)] for _ in range(9)], name=name)
        for name in ("x", "y")
    ]
    config = BertDataConfig(data_path=("1", paths[0], "3", paths[1]), seq_length=32, split="1")
    blend = build_bert_datasets(config, bert_tokenizer, SampleCounts(50), 5).train
    assert isinstance(blend, BlendedDataset)
    datasets, samples = order_by_loop([1, 3], 50)
    batch = blend.batch(np.arange(50)[::-1])
    for i, (k, number) in enumerate(zip(datasets, samples, strict=True)):
        alone = blend.datasets[k][number]
        assert all((batch[name][49 - i] == alone[name]).all() for name in alone)
    assert blend.collate is blend.datasets[0].collate is not dict
    with pytest.raises(IndexError):
        blend[50]
    other = build_bert_datasets(replace(config, seq_length=31), bert_tokenizer, SampleCounts(50), 5).train
    again = build_bert_datasets(config, bert_tokenizer, SampleCounts(48), 5).train
    assert other is not None and again is not None
    assert blend.fingerprint == again.fingerprint != other.fingerprint
