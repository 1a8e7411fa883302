"""Compiled loops of the data pipeline: blends, GPT-2 and BERT samples, and the random generators they draw from.

Random numbers are drawn in Megatron-LM's order: samples are bit-identical to its for the same seed.

Legend: b samples of a batch, s sequence length, N samples of a dataset, S sequences and D documents of a file, V ids.
A file is given by ``sizes`` int32[S], tokens in each sequence; ``starts`` int64[S], byte at which each begins;
``tokens``, all of the file, flat; and for BERT ``documents`` int64[D + 1], the first sequence of each document.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron01.utils.compilation import compiled


@compiled()
def fill_blend_order(
    weights: NDArray[np.float64], dataset: NDArray[np.int16], sample: NDArray[np.int64], drawn: NDArray[np.int64]
) -> None:
    """Choose for each sample of a blend the dataset furthest below its share of samples; ties go to the first.

    Args:
        weights: float64, sum 1, one per dataset.
        dataset, sample: [N] to fill: the dataset of sample i of the blend, and the sample's index in it.
        drawn: int64, one per dataset; zeros on entry, the number of samples drawn from each on return.
    """
    for i in range(len(dataset)):
        scale = max(float(i), 1.0)
        chosen, largest = 0, weights[0] * scale - float(drawn[0])
        for k in range(1, len(weights)):
            lag = weights[k] * scale - float(drawn[k])
            if lag > largest:
                chosen, largest = k, lag
        dataset[i] = chosen
        sample[i] = drawn[chosen]
        drawn[chosen] += 1


@compiled()
def locate_samples(
    documents: NDArray[np.integer], sizes: NDArray[np.int32], seq_length: int, places: NDArray[np.integer]
) -> None:
    """Find the document and token offset at which each GPT-2 sample begins: Megatron-LM's sample index.

    Args:
        documents: int32 or int64, sequences of the file in the order of the stream.
        places: int32 or int64[N + 1, 2] to fill: for token k x seq_length of the stream its position in ``documents``
            and its offset in that document. The stream must be longer than N x seq_length.
    """
    position, begin = 0, 0  # of the document that holds the token
    for k in range(len(places)):
        token = k * seq_length
        while begin + sizes[documents[position]] <= token:
            begin += sizes[documents[position]]
            position += 1
        places[k, 0] = position
        places[k, 1] = token - begin
    places[0] = 0  # as in Megatron-LM the first sample begins with the first document even if that one is empty


@compiled()
def read_samples(
    numbers: NDArray[np.integer],
    documents: NDArray[np.integer],
    places: NDArray[np.integer],
    sizes: NDArray[np.int32],
    starts: NDArray[np.int64],
    tokens: NDArray[np.integer],
    padding: int,
    text: NDArray[np.int32],
    lengths: NDArray[np.int32],
) -> bool:
    """Copy the tokens of GPT-2 samples out of the file; False if the index points outside of it.

    Args:
        numbers: int64[b], rows of ``places``.
        documents, places: the index, as ``locate_samples`` takes and makes it.
        padding: token that fills up a sample where the documents end before it; negative if samples must be complete.
        text: int32[b, s + 1] to fill.
        lengths: int32[b] to fill: tokens that are not padding.
    """
    for row in range(len(numbers)):
        position = np.int64(places[numbers[row], 0])
        offset = np.int64(places[numbers[row], 1])
        filled = 0
        while filled < text.shape[1]:
            if position == len(documents) and padding >= 0 and filled > 0:
                break
            if not 0 <= position < len(documents) or not 0 <= documents[position] < len(sizes) or offset < 0:
                return False
            document = documents[position]
            count = min(sizes[document] - offset, text.shape[1] - filled)
            begin = starts[document] // tokens.itemsize + offset
            if count < 0 or begin < 0 or begin + count > len(tokens):
                return False
            for i in range(count):
                text[row, filled + i] = tokens[begin + i]
            filled += count
            position += 1
            offset = np.int64(0)
        lengths[row] = filled
        text[row, filled:] = padding
    return True


# numba's generator is the mt19937 of C++ and of numpy's ``RandomState``: ``np.random.seed`` and ``np.random.random``
# give the same draws. Bounded integers are derived from its words as those two do it; numba does it differently.

Integer = int | np.int64  # a Python integer to the caller, int64 in compiled code


@compiled()
def _next_word() -> Integer:
    """The next 32 random bits."""
    return np.random.randint(0, 2**32)


@compiled()
def random_below(count: Integer) -> np.int64:
    """``RandomState.randint(0, count)``: uniform in [0, count), count in [1, 2**32]; no draw when count is 1."""
    last = np.int64(count - 1)
    if last == 0:
        return last
    mask = last
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> shift
    value = _next_word() & mask
    while value > last:
        value = _next_word() & mask
    return value


_WORDS_64 = 312  # 64-bit words in the state of mt19937_64; one more word holds the position in it


@compiled()
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


@compiled()
def shuffle_rows(rows: NDArray[np.unsignedinteger], seed: int) -> None:
    """Fisher-Yates shuffle in place, from the end, with remainders of ``std::mt19937_64(seed)``'s draws."""
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


LONG_SENTENCE = 512  # a document with a longer sentence is left out, as Megatron-LM does

# P(n) is proportional to 1/n for n-grams of 1 to 3 words, normalised twice as numpy's `choice` does.
MAX_NGRAM = 3
_WEIGHTS = 1.0 / np.arange(1, MAX_NGRAM + 1)
_SHARES = (_WEIGHTS / _WEIGHTS.sum()) / (_WEIGHTS / _WEIGHTS.sum()).sum()
_NGRAM_CDF = _SHARES.cumsum() / _SHARES.cumsum()[-1]


@compiled()
def _draw_target(short_ratio: int, max_length: int) -> np.int64 | int:
    """Target length of a sample in tokens: ``max_length``, or once in ``short_ratio`` draws a random shorter one."""
    if short_ratio == 0:
        return max_length
    word = _next_word()
    if word % short_ratio == 0:
        return 2 + word % (max_length - 1)
    return max_length


@compiled()
def map_sentences(
    documents: NDArray[np.int64],
    sizes: NDArray[np.int32],
    num_samples: int,
    max_length: int,
    short_ratio: int,
    seed: int,
    min_sentences: int,
    samples: NDArray[np.unsignedinteger],
) -> tuple[int, int]:
    """Group consecutive sentences into samples, in whole epochs, until there are at least ``num_samples``.

    Returns the numbers of samples and of epochs; both 0 if no document yields a sample.

    Args:
        max_length: target length in tokens, without special tokens.
        short_ratio: one sample in this many has a shorter target; 0: none.
        min_sentences: minimum sentences in a sample (2 where the sentence task needs a pair).
        samples: uint32 or uint64[N, 3] to fill with (first sentence, last sentence + 1, target length); with N = 0
            samples are only counted. Both calls give the same count.
    """
    np.random.seed(seed & 0xFFFFFFFF)
    fill = len(samples) > 0
    count, epochs = 0, 0
    while count < num_samples:
        count_before = count
        epochs += 1
        for document in range(len(documents) - 1):
            begin, end = documents[document], documents[document + 1]
            num_sentences = end - begin
            if num_sentences < min_sentences or (num_sentences > 1 and sizes[begin:end].max() > LONG_SENTENCE):
                continue
            target = _draw_target(short_ratio, max_length)
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
                target = _draw_target(short_ratio, max_length)
        if count == count_before:
            return 0, 0
    return count, epochs


class Masking(NamedTuple):
    """How words are masked for prediction, and the special tokens."""

    mask_prob: float  # share of the tokens to predict
    max_predictions: int  # upper bound of tokens to predict
    whole_word_ngram: bool  # mask 1 to 3 whole words at a time, else single tokens
    is_continuation: NDArray[np.bool_]  # bool[V], true for pieces that continue a word
    cls: int  # id, as the next three
    sep: int
    mask: int
    pad: int


class Rows(NamedTuple):
    """Arrays of BERT samples, to fill: integers[s] for one sample, [b, s] for several."""

    text: NDArray[np.integer]
    types: NDArray[np.integer]
    labels: NDArray[np.integer]
    loss_mask: NDArray[np.integer]
    padding_mask: NDArray[np.integer]


@compiled()
def _truncate(size_a: int, size_b: int, limit: Integer) -> tuple[int, int, int, int]:
    """Drop single tokens from the front or back of the longer segment; returns the two kept ranges."""
    front_a, back_a, front_b, back_b = 0, size_a, 0, size_b
    while (back_a - front_a) + (back_b - front_b) > limit:
        longer_is_a = back_a - front_a > back_b - front_b
        from_front = np.random.random() < 0.5
        if longer_is_a and from_front:
            front_a += 1
        elif longer_is_a:
            back_a -= 1
        elif from_front:
            front_b += 1
        else:
            back_b -= 1
    return front_a, back_a, front_b, back_b


@compiled()
def fill_sample(
    segment_a: NDArray[np.integer],
    segment_b: NDArray[np.integer],
    limit: Integer,
    target_length: Integer,
    masking: Masking,
    rows: Rows,
) -> bool:
    """Truncate and join two segments, then mask words for prediction, with the generator in its current state.

    True if the segments were truncated.

    Args:
        segment_a, segment_b: integers[n], token ids.
        limit: maximum tokens of both segments together.
        target_length: the sample's target length, which bounds the masked tokens with ``whole_word_ngram``.
    """
    text, types, labels, loss_mask, padding_mask = rows
    text[:], types[:], labels[:], loss_mask[:], padding_mask[:] = masking.pad, 0, -1, 0, 0
    front_a, back_a, front_b, back_b = _truncate(len(segment_a), len(segment_b), limit)
    length = back_a - front_a + 2  # [CLS] A [SEP], and B [SEP] unless B is empty
    text[0], text[1 : length - 1], text[length - 1] = masking.cls, segment_a[front_a:back_a], masking.sep
    if back_b > front_b:
        end = length + back_b - front_b
        text[length:end], text[end], types[length : end + 1] = segment_b[front_b:back_b], masking.sep, 1
        length = end + 1
    padding_mask[:length] = 1

    positions = np.empty(length, dtype=np.int64)  # of all tokens but [CLS] and [SEP]
    word_begin = np.empty(length + 1, dtype=np.int64)  # word w is positions[word_begin[w]:word_begin[w + 1]]
    num_positions = 0
    num_words = 0
    for i in range(length):
        if text[i] == masking.cls or text[i] == masking.sep:
            continue
        if not (masking.whole_word_ngram and num_words > 0 and masking.is_continuation[text[i]]):
            word_begin[num_words] = num_positions
            num_words += 1
        positions[num_positions] = i
        num_positions += 1
    word_begin[num_words] = num_positions

    to_predict = min(max(1, int(np.rint(length * masking.mask_prob))), masking.max_predictions)
    if masking.whole_word_ngram:  # Megatron's bound is a float; its integer part selects the same tokens
        to_predict = min(int(masking.mask_prob * target_length), to_predict)
    order = np.arange(num_words)
    for i in range(num_words - 1, 0, -1):
        j = random_below(i + 1)
        order[i], order[j] = order[j], order[i]
    predicted = 0
    for index in range(num_words):
        if predicted >= to_predict:
            break
        words = 1
        if masking.whole_word_ngram:
            draw = np.random.random()
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
            if np.random.random() < 0.8:
                text[position] = masking.mask
            elif np.random.random() >= 0.5:
                text[position] = random_below(len(masking.is_continuation))
        predicted += end - begin
    return bool(len(segment_a) + len(segment_b) > limit)


@compiled()
def _draw_other(
    documents: NDArray[np.int64], sizes: NDArray[np.int32], sentence: Integer, length: Integer
) -> tuple[Integer, Integer]:
    """First and last + 1 of sentences drawn from another document, until they hold ``length`` tokens or it ends.

    At least two documents must hold sentences; that of ``sentence`` is not drawn.
    """
    own = np.searchsorted(documents, sentence, side="right") - 1
    first: Integer = np.int64(0)
    last: Integer = np.int64(0)
    while first == last:  # empty documents are drawn again
        document = random_below(len(documents) - 2)
        if document >= own:
            document += 1
        first, last = documents[document], documents[document + 1]
    first += random_below(last - first)
    end = first
    total = 0
    while end < last and (end == first or total < length):
        total += sizes[end]
        end += 1
    return first, end


@compiled()
def _token_range(
    sizes: NDArray[np.int32], starts: NDArray[np.int64], first: Integer, last: Integer, itemsize: int
) -> tuple[Integer, Integer]:
    """First token and last + 1 of sentences [first, last) in the flat tokens; an empty range if there are none."""
    if first == last:
        return 0, 0
    return starts[first] // itemsize, starts[last - 1] // itemsize + sizes[last - 1]


NO_PAIRS, ORDER, NEXT = 0, 1, 2  # sentence tasks: none, sentence order (SOP), next sentence (NSP)


@compiled()
def fill_samples(
    indices: NDArray[np.int64],
    seed: int,
    task: int,
    mapping: NDArray[np.integer],
    documents: NDArray[np.int64],
    sizes: NDArray[np.int32],
    starts: NDArray[np.int64],
    tokens: NDArray[np.integer],
    masking: Masking,
    rows: Rows,
    is_random: NDArray[np.integer],
    truncated: NDArray[np.integer],
) -> bool:
    """Make BERT samples; sample i uses a generator seeded with seed + i, independent of the rest of the batch.

    False if the mapping points outside of the file.

    Args:
        indices: int64[b], rows of ``mapping``.
        task: ``NO_PAIRS``, ``ORDER`` or ``NEXT``.
        mapping: uint32 or uint64[N, 3], as ``map_sentences`` makes it.
        is_random, truncated: integers[b] to fill with 0 or 1.
    """
    text, types, labels, loss_mask, padding_mask = rows
    for row in range(len(indices)):
        np.random.seed((seed + indices[row]) & 0xFFFFFFFF)
        first, last = np.int64(mapping[indices[row], 0]), np.int64(mapping[indices[row], 1])
        target = np.int64(mapping[indices[row], 2])
        limit = target
        if not (0 <= first < last <= len(sizes) and 2 <= target <= text.shape[1] - 3):
            return False
        a_first, a_last = first, last
        b_first: Integer = first
        b_last: Integer = first
        drawn = False
        if task != NO_PAIRS:
            pivot = first + 1
            if last - first >= 3:
                pivot += random_below(last - first - 1)
            a_last, b_first, b_last = pivot, pivot, last
            drawn = np.random.random() < 0.5
            if drawn and task == ORDER:
                a_first, a_last, b_first, b_last = pivot, last, first, pivot
        begin_a, end_a = _token_range(sizes, starts, a_first, a_last, tokens.itemsize)
        if task == NEXT:
            limit = text.shape[1] - 3  # original BERT draws up to the target and truncates to the sequence
            if drawn:
                b_first, b_last = _draw_other(documents, sizes, first, target - (end_a - begin_a))
        begin_b, end_b = _token_range(sizes, starts, b_first, b_last, tokens.itemsize)
        if max(end_a, end_b) > len(tokens):
            return False
        is_random[row] = drawn
        truncated[row] = fill_sample(
            tokens[begin_a:end_a],
            tokens[begin_b:end_b],
            limit,
            target,
            masking,
            Rows(text[row], types[row], labels[row], loss_mask[row], padding_mask[row]),
        )
    return True
