"""The loops of the BERT data pipeline, compiled by numba.

They stand in one file because numba's cache on disk notices changes of the file of the function that is called, not of
the functions that it calls. The random numbers are those of ``numpy.random.RandomState`` (C++ ``std::mt19937``) and
``std::mt19937_64``, draw for draw, so that samples are bit for bit those of Megatron-LM for the same seed.

A generator is an array that holds its state; the last element is the position in it. All 32-bit arithmetic is done in
int64: numba turns a mixture of uint64 and int64 into floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., Any])

_WORDS = 624  # state of mt19937, 32-bit words
_WORDS_64 = 312  # state of mt19937_64, 64-bit words
_LONG_SENTENCE = 512  # a document with a longer sentence is left out, as Megatron-LM does

# P(n) is proportional to 1/n for n-grams of 1 to 3 words, normalised twice as numpy's `choice` does.
MAX_NGRAM = 3
_WEIGHTS = 1.0 / np.arange(1, MAX_NGRAM + 1)
_SHARES = (_WEIGHTS / _WEIGHTS.sum()) / (_WEIGHTS / _WEIGHTS.sum()).sum()
_NGRAM_CDF = _SHARES.cumsum() / _SHARES.cumsum()[-1]


def _compiled(function: _Function) -> _Function:
    """Compile on the first call; keep the machine code on disk where a folder for it is writable."""
    try:
        return cast(_Function, numba.njit(cache=True)(function))
    except RuntimeError:  # numba found no folder to write to
        return cast(_Function, numba.njit(function))


def new_generator() -> NDArray[np.uint32]:
    """State of an mt19937; call ``seed_generator`` before the first draw."""
    return np.zeros(_WORDS + 1, dtype=np.uint32)


@_compiled
def seed_generator(state: NDArray[np.uint32], seed: int) -> None:
    """Start the stream of ``RandomState(seed)``; seed in [0, 2**32)."""
    state[0] = seed & 0xFFFFFFFF
    previous = np.int64(state[0])
    for i in range(1, _WORDS):
        previous = (1812433253 * (previous ^ (previous >> 30)) + i) & 0xFFFFFFFF
        state[i] = previous
    state[_WORDS] = _WORDS


@_compiled
def _twist(state: NDArray[np.uint32]) -> None:
    for i in range(_WORDS):
        y = (np.int64(state[i]) & 0x80000000) | (np.int64(state[(i + 1) % _WORDS]) & 0x7FFFFFFF)
        state[i] = np.int64(state[(i + 397) % _WORDS]) ^ (y >> 1) ^ ((y & 1) * 0x9908B0DF)
    state[_WORDS] = 0


@_compiled
def next_word(state: NDArray[np.uint32]) -> np.int64:
    """The next 32 random bits, as an int64."""
    if state[_WORDS] >= _WORDS:
        _twist(state)
    y = np.int64(state[state[_WORDS]])
    state[_WORDS] += 1
    y ^= y >> 11
    y ^= (y << 7) & 0x9D2C5680
    y ^= (y << 15) & 0xEFC60000
    y ^= y >> 18
    return y


@_compiled
def random_unit(state: NDArray[np.uint32]) -> float:
    """``RandomState.random()``: uniform in [0, 1) with 53 bits."""
    high = next_word(state) >> 5
    low = next_word(state) >> 6
    return (high * 67108864.0 + low) / 9007199254740992.0


@_compiled
def random_below(state: NDArray[np.uint32], count: int) -> np.int64:
    """``RandomState.randint(0, count)``: uniform in [0, count), count in [1, 2**32]; no draw when count is 1."""
    last = np.int64(count - 1)
    if last == 0:
        return last
    mask = last
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> shift
    value = next_word(state) & mask
    while value > last:
        value = next_word(state) & mask
    return value


@_compiled
def _next_word_64(state: NDArray[np.uint64]) -> np.uint64:
    """The next 64 random bits of ``std::mt19937_64``."""
    one = np.uint64(1)
    if state[_WORDS_64] >= np.uint64(_WORDS_64):
        for i in range(_WORDS_64):
            y = (state[i] & np.uint64(0xFFFFFFFF80000000)) | (state[(i + 1) % _WORDS_64] & np.uint64(0x7FFFFFFF))
            odd = np.uint64(0xB5026F5AA96619E9) if y & one else np.uint64(0)
            state[i] = state[(i + 156) % _WORDS_64] ^ (y >> one) ^ odd
        state[_WORDS_64] = np.uint64(0)
    y = state[np.int64(state[_WORDS_64])]
    state[_WORDS_64] += one
    y ^= (y >> np.uint64(29)) & np.uint64(0x5555555555555555)
    y ^= (y << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    y ^= (y << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return y ^ (y >> np.uint64(43))


@_compiled
def shuffle_rows(rows: NDArray[np.unsignedinteger], seed: int) -> None:
    """Fisher-Yates from the end, in place, with the remainder of ``std::mt19937_64(seed)``'s draws."""
    state = np.empty(_WORDS_64 + 1, dtype=np.uint64)
    state[0] = np.uint64(seed)
    for i in range(1, _WORDS_64):
        previous = state[i - 1]
        mixed = previous ^ (previous >> np.uint64(62))
        state[i] = np.uint64(6364136223846793005) * mixed + np.uint64(i)
    state[_WORDS_64] = np.uint64(_WORDS_64)
    for i in range(len(rows) - 1, 0, -1):
        j = np.int64(_next_word_64(state) % np.uint64(i + 1))
        for column in range(rows.shape[1]):
            rows[i, column], rows[j, column] = rows[j, column], rows[i, column]


@_compiled
def _draw_target(state: NDArray[np.uint32], short_ratio: int, max_length: int) -> np.int64 | int:
    """Length at which a sample aims: once in ``short_ratio`` draws a shorter one."""
    if short_ratio == 0:
        return max_length
    word = next_word(state)
    if word % short_ratio == 0:
        return 2 + word % (max_length - 1)
    return max_length


@_compiled
def _is_usable(sizes: NDArray[np.int32], first: int, last: int, min_sentences: int) -> bool:
    if last - first < min_sentences:
        return False
    if last - first > 1:
        for sentence in range(first, last):
            if sizes[sentence] > _LONG_SENTENCE:
                return False
    return True


@_compiled
def map_sentences(
    documents: NDArray[np.int64],
    sizes: NDArray[np.int32],
    num_samples: int,
    max_length: int,
    short_ratio: int,
    seed: int,
    min_sentences: int,
    samples: NDArray[np.unsignedinteger],
) -> int:
    """Group consecutive sentences into samples, in whole epochs, until there are at least ``num_samples``.

    Args:
        documents: int64[documents + 1], where each document's sentences begin.
        sizes: int32[sentences], tokens in each sentence of the whole file.
        max_length: tokens at which a sample aims, without the special ones.
        short_ratio: one sample in this many aims at a shorter length; 0 for none.
        min_sentences: fewest sentences in a sample (2 where the sentence task needs a pair).
        samples: (N, 3) to fill with (first sentence, last sentence + 1, target length); with N = 0 samples are only
            counted. With the same arguments both passes count alike.

    Returns:
        Number of samples; 0 if no document can give one.
    """
    state = np.zeros(_WORDS + 1, dtype=np.uint32)
    seed_generator(state, seed)
    fill = len(samples) > 0
    count = 0
    while count < num_samples:
        count_before = count
        for document in range(len(documents) - 1):
            begin, end = documents[document], documents[document + 1]
            if not _is_usable(sizes, begin, end, min_sentences):
                continue
            target = _draw_target(state, short_ratio, max_length)
            first, length = begin, 0
            for sentence in range(begin, end):
                length += sizes[sentence]
                remaining = end - sentence - 1
                enough = length >= target and remaining > 1 and sentence + 1 - first >= min_sentences
                if not enough and remaining > 0:
                    continue
                if fill:
                    samples[count, 0] = first
                    samples[count, 1] = sentence + 1
                    samples[count, 2] = target
                count += 1
                first, length = sentence + 1, 0
                target = _draw_target(state, short_ratio, max_length)
        if count == count_before:
            return 0
    return count


@_compiled
def _truncate(state: NDArray[np.uint32], size_a: int, size_b: int, limit: int) -> tuple[int, int, int, int]:
    """Drop single tokens from the front or back of the longer segment; returns the two kept ranges."""
    front_a, back_a, front_b, back_b = 0, size_a, 0, size_b
    while (back_a - front_a) + (back_b - front_b) > limit:
        longer_is_a = back_a - front_a > back_b - front_b
        from_front = random_unit(state) < 0.5
        if longer_is_a and from_front:
            front_a += 1
        elif longer_is_a:
            back_a -= 1
        elif from_front:
            front_b += 1
        else:
            back_b -= 1
    return front_a, back_a, front_b, back_b


@_compiled
def _join_segments(
    state: NDArray[np.uint32],
    segment_a: NDArray[np.integer],
    segment_b: NDArray[np.integer],
    limit: int,
    cls: int,
    sep: int,
    text: NDArray[np.int64],
    types: NDArray[np.int64],
) -> int:
    """Write [CLS] A [SEP] B [SEP], or [CLS] A [SEP] where B is empty; returns the number of tokens."""
    front_a, back_a, front_b, back_b = _truncate(state, len(segment_a), len(segment_b), limit)
    text[0] = cls
    length = 1
    for i in range(front_a, back_a):
        text[length] = segment_a[i]
        length += 1
    text[length] = sep
    length += 1
    if back_b > front_b:
        first_of_b = length
        for i in range(front_b, back_b):
            text[length] = segment_b[i]
            length += 1
        text[length] = sep
        length += 1
        types[first_of_b:length] = 1
    return length


@_compiled
def fill_sample(
    state: NDArray[np.uint32],
    segment_a: NDArray[np.integer],
    segment_b: NDArray[np.integer],
    target_length: int,
    mask_prob: float,
    max_predictions: int,
    whole_word_ngram: bool,
    is_continuation: NDArray[np.bool_],
    cls: int,
    sep: int,
    mask: int,
    pad: int,
    sample: NDArray[np.int64],
) -> bool:
    """Truncate and join two segments, then mask words for prediction.

    Args:
        state: generator, already past the draws that chose the segments.
        target_length: most tokens of both segments together.
        mask_prob: share of the tokens to predict.
        max_predictions: upper bound of tokens to predict.
        whole_word_ngram: mask 1 to 3 whole words at a time, else single tokens.
        is_continuation: bool[vocabulary], true for pieces that continue a word.
        sample: int64[5, sequence length], filled with text, types, labels, loss mask and padding mask.

    Returns:
        True if the segments were truncated.
    """
    text, types, labels, loss_mask, padding_mask = sample[0], sample[1], sample[2], sample[3], sample[4]
    text[:], types[:], labels[:], loss_mask[:], padding_mask[:] = pad, 0, -1, 0, 0
    truncated = len(segment_a) + len(segment_b) > target_length
    length = _join_segments(state, segment_a, segment_b, target_length, cls, sep, text, types)
    padding_mask[:length] = 1

    positions = np.empty(length, dtype=np.int64)  # of all tokens but [CLS] and [SEP]
    word_begin = np.empty(length + 1, dtype=np.int64)  # word w is positions[word_begin[w]:word_begin[w + 1]]
    num_positions = 0
    num_words = 0
    for i in range(length):
        if text[i] == cls or text[i] == sep:
            continue
        if not (whole_word_ngram and num_words > 0 and is_continuation[text[i]]):
            word_begin[num_words] = num_positions
            num_words += 1
        positions[num_positions] = i
        num_positions += 1
    word_begin[num_words] = num_positions

    # Megatron's bound is a float; its integer part selects the same tokens.
    to_predict = min(int(mask_prob * target_length), max(1, int(np.rint(length * mask_prob))), max_predictions)
    order = np.arange(num_words)
    for i in range(num_words - 1, 0, -1):
        j = random_below(state, i + 1)
        order[i], order[j] = order[j], order[i]
    predicted = 0
    for index in range(num_words):
        if predicted >= to_predict:
            break
        words = 1
        if whole_word_ngram:
            draw = random_unit(state)
            while words < MAX_NGRAM and _NGRAM_CDF[words - 1] <= draw:
                words += 1
        word = int(order[index])
        begin = word_begin[word]
        end = word_begin[min(word + words, num_words)]
        while predicted + end - begin > to_predict and words > 1:
            words -= 1
            end = word_begin[min(word + words, num_words)]
        if predicted + end - begin > to_predict:
            continue
        covered = False
        for i in range(begin, end):
            covered |= loss_mask[positions[i]] == 1
        if covered:
            continue
        for i in range(begin, end):
            position = positions[i]
            labels[position] = text[position]
            loss_mask[position] = 1
            if random_unit(state) < 0.8:
                text[position] = mask
            elif random_unit(state) >= 0.5:
                text[position] = random_below(state, len(is_continuation))
        predicted += end - begin
    return truncated
