"""Tokenizers that run in Hugging Face's ``tokenizers`` library, whose own name for them is "fast tokenizers"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer as Backend

from megatron01.data.tokenization.tokenizer import MaskingTokens, Tokenizer
from megatron01.errors import UserError


class FastTokenizer(Tokenizer):
    """A pipeline of the ``tokenizers`` library; its own template of special tokens is never applied.

    Encoding raises a UserError for what the vocabulary cannot spell if it has no token for that.

    Args:
        backend: the pipeline.
        name: the vocabulary's file, for messages.
        fingerprint: hash of the vocabulary and the rules.
        unknown: id that stands for what the vocabulary cannot spell.
        eod: id of the token that ends a document.
        masking: special tokens and word boundaries for BERT.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        fingerprint: str,
        unknown: int | None,
        eod: int | None,
        masking: MaskingTokens | None,
    ) -> None:
        super().__init__(
            name=name,
            vocab_size=count_ids(backend),
            fingerprint=fingerprint,
            unknown=unknown,
            eod=eod,
            masking=masking,
        )
        self._backend = backend

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                text.encode("utf-8")  # the library reports half a surrogate pair as a wrong type
            raise
        except Exception as error:  # the library raises nothing more precise
            raise UserError(
                f"{self.name} cannot encode every text: {error}; it needs a token for what is not in its vocabulary"
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        entry = self._backend.id_to_token(token_id)
        assert entry is not None, f"id {token_id} of a vocabulary of {self.vocab_size}"
        return entry

    @property
    def definition(self) -> str:
        """The pipeline as a ``tokenizer.json``."""
        definition: str = self._backend.to_str()
        return definition

    def __reduce__(self) -> str | tuple[object, ...]:
        # Rebuilt from its serialized form, so that a tokenizer can be sent to another process.
        settings = {name: getattr(self, name) for name in ("name", "fingerprint", "unknown", "eod", "masking")}
        return _restore, (self.definition, settings)


def count_ids(backend: Backend) -> int:
    """One more than the largest id: a vocabulary may leave ids out."""
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def masking_tokens(
    backend: Backend, names: tuple[str, str, str, str], continues: Callable[[str], bool]
) -> MaskingTokens | None:
    """The special tokens called ``names`` (cls, sep, mask, pad), or None if the vocabulary lacks one of them.

    Args:
        continues: whether an ordinary entry continues a word.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if any(name not in vocabulary for name in names):
        return None
    is_continuation = np.zeros(count_ids(backend), dtype=np.bool_)
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    for entry, token_id in vocabulary.items():
        is_continuation[token_id] = entry not in special and continues(entry)
    cls, sep, mask, pad = (vocabulary[name] for name in names)
    return MaskingTokens(cls, sep, mask, pad, is_continuation)


def _restore(backend: str, settings: dict[str, object]) -> FastTokenizer:
    return FastTokenizer(Backend.from_str(backend), **settings)  # type: ignore[arg-type]
