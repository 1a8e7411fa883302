from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from megatron01.data import build_tokenizer
from megatron01.data.tokenizers import TokenizerFiles
from megatron01.errors import UserError
from megatron01.evaluate.generation import encode_with_masks, fill_masks
from tests.integration.tiny import bert_config, gpt_config
from tests.unit.data.test_tokenizer_types import train_sentencepiece


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return build_tokenizer(bert_config(corpus).data)


TEXTS = ["the [MASK] fox", "seven boats [MASK] home while a [MASK] dog jumps .", "[MASK]"]


def test_a_batch_equals_each_text_alone(bert, tokenizer):
    encoded = [encode_with_masks(text, tokenizer, max_length=20) for text in TEXTS]
    together = fill_masks(bert, tokenizer, encoded, top_k=99)  # more than there are ids
    assert [len(masks) for masks in together] == [1, 2, 1]
    for ids, masks in zip(encoded, together, strict=True):
        row = torch.tensor([ids])
        with torch.no_grad():
            logits = bert(row, row * 0, row * 0 + 1).lm_logits[0]
        places = [place for place, token in enumerate(ids) if token == tokenizer.masking.mask]
        for place, proposals in zip(places, masks, strict=True):
            expected = logits[place].softmax(-1)
            found = torch.zeros(21)
            for proposal in proposals:
                found[proposal.token_id] = proposal.probability
                assert proposal.token == tokenizer.token(proposal.token_id)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            values = [proposal.probability for proposal in proposals]
            assert len(values) == 21 and values == sorted(values, reverse=True)


def test_tokens_around_the_masks(tokenizer):
    special = tokenizer.masking
    ids = encode_with_masks("the[MASK] [MASK]dogs", tokenizer, max_length=20)
    dogs = tokenizer.encode("dogs")
    assert ids == [special.cls, *tokenizer.encode("the"), special.mask, special.mask, *dogs, special.sep]


def test_a_mask_that_takes_the_space_before_it(tmp_path):
    """As RoBERTa's: in training, too, a mask stands for a word with its space."""
    names = ["<s>", "<pad>", "</s>", "<mask>"]
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *names[:3]]
    backend = Backend(models.BPE({entry: number for number, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([*names[:3], AddedToken("<mask>", lstrip=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(
        TokenizerFiles(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.json"))
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend)
    for text in ("a <mask> b", "<mask> <mask>b", "a<mask>, b"):
        first, *ids, last = encode_with_masks(text, tokenizer, max_length=20)
        assert [first, last] == theirs.convert_tokens_to_ids(["<s>", "</s>"])
        assert ids == theirs(text).input_ids


def test_masks_of_sentencepiece(tmp_path):
    """Its encoder finds no control symbols in a text."""
    names = ["[CLS]", "[SEP]", "[MASK]"]
    tokenizer = train_sentencepiece(tmp_path / "x.model", control_symbols=names, pad_id=3)
    mask, encode = tokenizer.masking.mask, tokenizer.encode
    _, *ids, _ = encode_with_masks("the [MASK] and[MASK] houses", tokenizer, max_length=99)
    assert ids == [*encode("the"), mask, *encode("and"), mask, *encode("houses")]


def test_texts_that_cannot_be_used(tokenizer, corpus):
    with pytest.raises(UserError, match=r"there is no \[MASK\] in 'the fox'"):
        encode_with_masks("the fox", tokenizer, max_length=20)
    with pytest.raises(UserError, match="has 12 tokens; the model takes 11"):
        encode_with_masks("[MASK] a a a a a a a a a", tokenizer, max_length=11)
    assert len(encode_with_masks("[MASK] a a a a a a a a a", tokenizer, max_length=12)) == 12
    with pytest.raises(UserError, match="expected the vocabulary of a BERT"):
        encode_with_masks("[MASK]", build_tokenizer(gpt_config(corpus).data), max_length=11)
