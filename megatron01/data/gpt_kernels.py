"""The loops over GPT-2's documents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron01.data.compilation import compiled


@compiled
def locate_samples(
    documents: NDArray[np.integer], sizes: NDArray[np.int32], seq_length: int, starts: NDArray[np.integer]
) -> None:
    """Where in the stream of documents each sample begins.

    Args:
        documents: sequence numbers, in the order of the stream.
        sizes: int32[S], tokens in each sequence of the file.
        starts: (N + 1, 2) to fill: for token k x seq_length of the stream its position in ``documents`` and its offset
            in that document. The stream must be longer than N x seq_length.
    """
    position, begin = 0, 0  # of the document that holds the token
    for k in range(len(starts)):
        token = k * seq_length
        while begin + sizes[documents[position]] <= token:
            begin += sizes[documents[position]]
            position += 1
        starts[k, 0] = position
        starts[k, 1] = token - begin
    # As Megatron-LM does, the first sample begins with the first document even if that one is empty.
    starts[0, 0] = 0
    starts[0, 1] = 0


@compiled
def read_samples(
    numbers: NDArray[np.integer],
    documents: NDArray[np.integer],
    starts: NDArray[np.integer],
    file_starts: NDArray[np.int64],
    sizes: NDArray[np.int32],
    tokens: NDArray[np.integer],
    padding: int,
    text: NDArray[np.int32],
    lengths: NDArray[np.int32],
) -> bool:
    """Copy samples out of the file.

    Args:
        numbers: (b,) rows of ``starts``.
        documents, starts: the index, as ``locate_samples`` takes and makes it.
        file_starts: int64[S], byte at which each sequence starts.
        sizes: int32[S], tokens in each sequence.
        tokens: all of the file, flat.
        padding: token for what is missing where the documents end before the sample; negative if none may.
        text: (b, n) to fill.
        lengths: (b,) to fill: tokens that are not padding.

    Returns:
        False if the index points outside of the file.
    """
    for row in range(len(numbers)):
        position = np.int64(starts[numbers[row], 0])
        offset = np.int64(starts[numbers[row], 1])
        filled = 0
        while filled < text.shape[1]:
            if position == len(documents) and padding >= 0 and filled > 0:
                break
            if not 0 <= position < len(documents) or not 0 <= documents[position] < len(sizes) or offset < 0:
                return False
            document = documents[position]
            count = min(sizes[document] - offset, text.shape[1] - filled)
            begin = file_starts[document] // tokens.itemsize + offset
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


@compiled
def mark_documents(
    tokens: NDArray[np.int32],
    eod: int,
    position_ids: NDArray[np.int32],
    document_ids: NDArray[np.int32],
) -> None:
    """Positions and document numbers that count from each end-of-document token on.

    Args:
        tokens: (b, s).
        eod: the end-of-document token; it belongs to the document that it ends.
        position_ids: (b, s) to fill: the distance from the document's first token in the sequence.
        document_ids: (b, s) to fill: 0 for the first document of the sequence, 1 for the next.
    """
    for row in range(tokens.shape[0]):
        position, document = 0, 0
        for i in range(tokens.shape[1]):
            position_ids[row, i] = position
            document_ids[row, i] = document
            position += 1
            if tokens[row, i] == eod:
                position = 0
                document += 1
