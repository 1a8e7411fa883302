"""The text that new tokens add to a text; alone, some tokenizers would leave out the space before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron01.data.tokenization.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what stands for bytes that are not a whole character


def continuation(prompt: Sequence[int], new: Sequence[int], tokenizer: Tokenizer) -> str:
    """What ``new`` tokens add to the text of ``prompt``."""
    return "".join(pieces(prompt, iter([list(new)]), tokenizer))


def pieces(prompt: Sequence[int], new: Iterator[Sequence[int]], tokenizer: Tokenizer) -> Iterator[str]:
    """What each of several lots of tokens adds; a character that is spread over lots comes with its last one."""
    so_far = list(prompt)
    shown = tokenizer.decode(so_far)
    for lot in new:
        so_far += lot
        text = tokenizer.decode(so_far)
        if not text.endswith(_INCOMPLETE):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(so_far)[len(shown) :]
