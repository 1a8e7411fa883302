"""Compiled loops against plain Python with numpy's generators, written from the description of Megatron's format."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.data import kernels
from megatron01.data.bert import build_bert_mapping

CLS, SEP, MASK, PAD = 2, 3, 4, 0
VOCABULARY = 60
ROWS = ("text", "types", "labels", "loss_mask", "padding_mask")
IS_CONTINUATION = np.array([i >= 8 and i % 3 == 0 for i in range(VOCABULARY)])


@numba.njit
def seed_generator(seed: int) -> None:
    np.random.seed(seed)


@numba.njit
def random_unit() -> float:
    return np.random.random()


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**32 - 1])
def test_generator_is_that_of_numpy(seed: int) -> None:
    random = np.random.RandomState(seed)
    seed_generator(seed)
    for count in (1, 2, 3, 7, 1000, 30522, 2**31, 2**32):
        for _ in range(100):
            assert random_unit() == random.random_sample()
            assert kernels.random_below(count) == random.randint(0, count, dtype=np.int64)


def words_64(seed: int) -> Iterator[int]:
    """C++'s std::mt19937_64, after the definition of the algorithm."""
    full, upper = 2**64 - 1, 0xFFFFFFFF80000000
    state = [seed]
    for i in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + i) & full)
    while True:
        for i in range(312):
            x = (state[i] & upper) | (state[(i + 1) % 312] & 0x7FFFFFFF)
            state[i] = state[(i + 156) % 312] ^ (x >> 1) ^ (0xB5026F5AA96619E9 * (x & 1))
        for word in state:
            word ^= (word >> 29) & 0x5555555555555555
            word ^= (word << 17) & 0x71D67FFFEDA60000 & full
            word ^= (word << 37) & 0xFFF7EEE000000000 & full
            yield word ^ (word >> 43)


def test_generator_64_is_that_of_cpp() -> None:
    # The standard fixes the 10000th draw of a default-constructed std::mt19937_64 (seed 5489).
    generator = words_64(5489)
    assert [next(generator) for _ in range(10_000)][-1] == 9981545732273789042
    rows = np.arange(1000, dtype=np.uint32)[:, None] * np.ones(3, dtype=np.uint32)
    kernels.shuffle_rows(rows, 5489)
    expected, generator = list(range(1000)), words_64(5489)
    for i in range(999, 0, -1):
        j = next(generator) % (i + 1)
        expected[i], expected[j] = expected[j], expected[i]
    assert rows.tolist() == [[value] * 3 for value in expected]


def map_by_loop(
    documents: list[int], sizes: list[int], num_samples: int, max_length: int, ratio: int, seed: int, least: int
) -> list[list[int]]:
    generator = np.random.MT19937()
    generator._legacy_seeding(seed)
    word = np.random.Generator(generator)

    def target() -> int:
        if ratio == 0:
            return max_length
        draw = int(word.bit_generator.random_raw())
        return 2 + draw % (max_length - 1) if draw % ratio == 0 else max_length

    rows: list[list[int]] = []
    while len(rows) < num_samples:
        for begin, end in pairwise(documents):
            if end - begin < least or (end - begin > 1 and max(sizes[begin:end]) > 512):
                continue
            goal, first = target(), begin
            for sentence in range(begin, end):
                left, held = end - sentence - 1, sentence + 1 - first
                if left == 0 or (sum(sizes[first : sentence + 1]) >= goal and left > 1 and held >= least):
                    rows.append([first, sentence + 1, goal])
                    goal, first = target(), sentence + 1
        if not rows:
            return rows
    shuffle = words_64(seed + 1)
    for i in range(len(rows) - 1, 0, -1):
        j = next(shuffle) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


@given(
    documents=st.lists(st.lists(st.integers(1, 20) | st.sampled_from([512, 513]), max_size=8), min_size=1, max_size=8),
    num_samples=st.integers(1, 40),
    seq_length=st.integers(5, 40),
    short_seq_prob=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 2**31 - 1),
    min_sentences=st.sampled_from([1, 2]),
)
def test_mapping_equals_a_plain_loop(
    documents: list[list[int]], num_samples: int, seq_length: int, short_seq_prob: float, seed: int, min_sentences: int
) -> None:
    starts = np.cumsum([0, *map(len, documents)])
    sizes = [size for document in documents for size in document]
    mapping = build_bert_mapping(
        starts,
        np.array(sizes, dtype=np.int32),
        num_samples=num_samples,
        seq_length=seq_length,
        short_seq_prob=short_seq_prob,
        seed=seed,
        min_sentences=min_sentences,
    )["mapping"]
    ratio = {0.0: 0, 0.1: 10, 0.3: 3}[short_seq_prob]
    expected = map_by_loop(starts.tolist(), sizes, num_samples, seq_length - 3, ratio, seed, min_sentences)
    assert mapping.tolist() == expected and mapping.dtype == np.uint32


def sample_by_lists(
    random: np.random.RandomState,
    a: list[int],
    b: list[int],
    target: int,
    prob: float,
    whole_word: bool,
    length: int,
    limit: int | None = None,
) -> dict[str, list[int]]:
    """Truncation (to ``limit``, else to the target) and masking with lists and numpy's generator."""
    a, b = list(a), list(b)
    while len(a) + len(b) > (limit or target):
        longer = a if len(a) > len(b) else b
        longer.pop(0 if random.random_sample() < 0.5 else -1)
    tokens = [CLS, *a, SEP] + ([*b, SEP] if b else [])
    types = [0] * (len(a) + 2) + [1] * (len(tokens) - len(a) - 2)
    words: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token in (CLS, SEP):
            continue
        if whole_word and words and IS_CONTINUATION[token]:
            words[-1].append(position)
        else:
            words.append([position])
    wanted = max(1.0, round(len(tokens) * prob))
    if whole_word:
        wanted = min(prob * target, wanted)
    candidates = [[list(chain(*words[i : i + n])) for n in (1, 2, 3)] for i in range(len(words))]
    random.shuffle(candidates)  # type: ignore[arg-type]
    shares = 1.0 / np.arange(1, 4)
    shares /= shares.sum(keepdims=True)
    labels: dict[int, int] = {}
    text = list(tokens)
    for candidate in candidates:
        if len(labels) >= wanted:
            break
        n = int(random.choice([1, 2, 3], p=shares / shares.sum(keepdims=True))) if whole_word else 1
        while n > 1 and len(labels) + len(candidate[n - 1]) > wanted:
            n -= 1
        chosen = candidate[n - 1]
        if len(labels) + len(chosen) > wanted or any(position in labels for position in chosen):
            continue
        for position in chosen:
            labels[position] = tokens[position]
            if random.random_sample() < 0.8:
                text[position] = MASK
            elif random.random_sample() >= 0.5:
                text[position] = int(random.randint(0, VOCABULARY))
    rest = length - len(tokens)
    return {
        "text": text + [PAD] * rest,
        "types": types + [0] * rest,
        "labels": [labels.get(position, -1) for position in range(length)],
        "loss_mask": [int(position in labels) for position in range(length)],
        "padding_mask": [1] * len(tokens) + [0] * rest,
    }


segments = st.lists(st.integers(5, VOCABULARY - 1) | st.sampled_from([CLS, SEP]), min_size=1, max_size=40)


@given(
    a=segments,
    b=segments | st.just([]),
    target=st.integers(2, 50),
    prob=st.sampled_from([0.0, 0.15, 0.4]),
    seed=st.integers(0, 2**32 - 1),
    whole_word=st.booleans(),
)
def test_samples_equal_a_plain_implementation(
    a: list[int], b: list[int], target: int, prob: float, seed: int, whole_word: bool
) -> None:
    seed_generator(seed)
    sample = np.empty((5, 53), dtype=np.int64)
    truncated = kernels.fill_sample(
        np.array(a, dtype=np.uint16),
        np.array(b, dtype=np.uint16),
        target,
        target,
        kernels.Masking(prob, 10**9, whole_word, IS_CONTINUATION, CLS, SEP, MASK, PAD),
        kernels.Rows(*sample),
    )
    expected = sample_by_lists(np.random.RandomState(seed), a, b, target, prob, whole_word, 53)
    assert dict(zip(expected, sample.tolist(), strict=True)) == expected
    assert truncated == (len(a) + len(b) > target)


def whole_sample_by_lists(
    seed: int, task: int, documents: list[list[list[int]]], first: int, last: int, target: int, whole_word: bool
) -> dict[str, list[int]]:
    """The choice of the two segments, after the descriptions of Megatron-LM and of the original BERT."""
    random = np.random.RandomState(seed % 2**32)
    sentences = list(chain(*documents))[first:last]
    if task == kernels.NO_PAIRS:
        return sample_by_lists(random, list(chain(*sentences)), [], target, 0.15, whole_word, 43)
    pivot = random.randint(1, len(sentences)) if len(sentences) >= 3 else 1
    a, b = list(chain(*sentences[:pivot])), list(chain(*sentences[pivot:]))
    is_random = random.random_sample() < 0.5
    if is_random and task == kernels.ORDER:
        a, b = b, a
    elif is_random:
        ends = np.cumsum([len(document) for document in documents])
        own = int(np.searchsorted(ends, first, side="right"))
        other: list[list[int]] = []
        while not other:
            number = int(random.randint(0, len(documents) - 1))
            other = documents[number + (number >= own)]
        b = []
        for sentence in other[random.randint(0, len(other)) :]:
            b += sentence
            if len(b) >= target - len(a):
                break
    limit = 40 if task == kernels.NEXT else None
    sample = sample_by_lists(random, a, b, target, 0.15, whole_word, 43, limit)
    return {**sample, "is_random": [int(is_random)], "truncated": [int(len(a) + len(b) > (limit or target))]}


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(5, 59), min_size=1, max_size=15), max_size=6), min_size=2, max_size=6
    )
    .filter(lambda found: sum(map(bool, found)) >= 2)
    .filter(lambda found: any(len(document) > 1 for document in found)),
    task=st.sampled_from([kernels.NO_PAIRS, kernels.ORDER, kernels.NEXT]),
    whole_word=st.booleans(),
    short_seq_prob=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_whole_samples_equal_a_plain_implementation(
    documents: list[list[list[int]]], task: int, whole_word: bool, short_seq_prob: float, seed: int
) -> None:
    sentences = list(chain(*documents))
    sizes = np.array([len(sentence) for sentence in sentences], dtype=np.int32)
    starts = (np.cumsum(sizes, dtype=np.int64) - sizes) * 2
    bounds = np.cumsum([0, *(len(document) for document in documents)])
    mapping = build_bert_mapping(
        bounds, sizes, num_samples=9, seq_length=43, short_seq_prob=short_seq_prob, seed=seed % 2**31, min_sentences=2
    )["mapping"]
    rows = {name: np.empty((len(mapping), 43), dtype=np.int32) for name in ROWS}
    flags = {name: np.empty(len(mapping), dtype=np.uint8) for name in ("is_random", "truncated")}
    assert kernels.fill_samples(
        np.arange(len(mapping)),
        seed,
        task,
        mapping,
        bounds,
        sizes,
        starts,
        np.array(list(chain(*sentences)), dtype=np.uint16),
        kernels.Masking(0.15, 10**9, whole_word, IS_CONTINUATION, CLS, SEP, MASK, PAD),
        kernels.Rows(*rows.values()),
        *flags.values(),
    )
    for index, (first, last, target) in enumerate(mapping.tolist()):
        expected = whole_sample_by_lists(seed + index, task, documents, first, last, target, whole_word)
        found = {name: values[index].tolist() for name, values in rows.items()}
        found |= {name: [int(values[index])] for name, values in flags.items()}
        assert {name: found[name] for name in expected} == expected
