from __future__ import annotations

import json
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers import BertForPreTraining, BertForSequenceClassification, BertModel, RobertaConfig, RobertaForMaskedLM

from megatron01.config import BertModelConfig
from megatron01.convert.formats import read_model
from megatron01.convert.huggingface import write_hf_folder
from megatron01.convert.native import write_checkpoint
from megatron01.convert.portable import VOCABULARY_TENSORS, PortableModel, new_model
from megatron01.data.tokenizers import TokenizerFiles
from megatron01.data.train_tokenizer import train_sentencepiece
from megatron01.errors import UserError
from megatron01.finetune.pretrained import load_pretrained
from tests.integration.tiny import bert_config, gpt_config
from tests.unit.convert.trained import save_trained
from tests.unit.finetune.models import write_model

HEAD = "SequenceClassification"


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_checkpoint_computes_what_our_own_model_does(corpus, tmp_path, placement):
    """Hidden states and pooled output, the input of heads, of a model read from a checkpoint of this project."""
    save_trained(bert_config(corpus, norm_placement=placement), tmp_path)
    pretrained = load_pretrained(str(tmp_path), None, HEAD)
    theirs = pretrained.new_model(num_outputs=3, seed=0, dropout=0.0).eval()
    ours = read_model(str(tmp_path)).build().eval()
    batch = pretrained.encoder.collate(pretrained.encoder.encode(["the fox .", "a dog"], ["home", "seven boats"], 32))
    with torch.no_grad():
        found = getattr(theirs, theirs.base_model_prefix)(**batch)
        expected = ours.encode(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
        pooled = ours.pooler(expected)
    tokens = batch["attention_mask"].bool()
    torch.testing.assert_close(found.last_hidden_state[tokens], expected[tokens], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.pooler_output, pooled, rtol=1e-4, atol=1e-5)
    assert batch["token_type_ids"].max() == 1


def test_the_seed_draws_the_head_and_nothing_else(model_folder):
    pretrained = load_pretrained(str(model_folder), None, HEAD)
    models = [pretrained.new_model(num_outputs=2, seed=seed, dropout=None) for seed in (0, 0, 1)]
    first, same, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    differing = {name for name in first if not torch.equal(first[name], other[name])}
    assert differing == {"classifier.weight"}
    own = load_file(model_folder / "model.safetensors")
    assert all(torch.equal(first[name], own[name]) for name in first if name not in differing | {"classifier.bias"})


def test_the_fingerprint_covers_weights_and_tokenizer(folder):
    def found():
        return load_pretrained(str(folder), None, HEAD).fingerprint

    first = load_pretrained(str(folder), None, HEAD)
    first.encoder.encode(["the fox ."], None, 8)  # sets a length
    assert first.fingerprint == found() and first.encoder.hash() in first.fingerprint
    weights, _, tokenizer = first.fingerprint.partition(" with tokenizer ")
    definition = json.loads((folder / "tokenizer.json").read_text())
    ids = definition["model"]["vocab"]
    ids["fox"], ids["dog"] = ids["dog"], ids["fox"]
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(ids, key=ids.get)))
    other_words = found()
    assert other_words.startswith(f"{weights} with ") and not other_words.endswith(tokenizer)
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.position_embeddings.weight"] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert not found().startswith(weights) and found().endswith(other_words.partition(" with ")[2])


def test_dropout_in_place_of_the_model_s_own(folder):
    change(folder / "config.json", classifier_dropout=0.2)  # the head has a rate of its own
    pretrained = load_pretrained(str(folder), None, HEAD)
    model = pretrained.new_model(num_outputs=2, seed=0, dropout=0.37)
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.37}
    assert model.config.attention_probs_dropout_prob == 0.37
    assert model.config.problem_type == "single_label_classification"
    assert pretrained.config.hidden_dropout_prob != 0.37


def test_the_tokenizer_s_length_is_a_limit_too(folder):
    change(folder / "tokenizer_config.json", model_max_length=16)  # of 32 positions
    assert load_pretrained(str(folder), None, HEAD).max_length == 16


def test_a_model_without_pooler_gets_one_by_the_seed(folder):
    weights = load((folder / "model.safetensors").read_bytes())  # not mapped from the file, which is written anew
    save_file(
        {name: weight for name, weight in weights.items() if ".pooler." not in name}, folder / "model.safetensors"
    )
    pretrained = load_pretrained(str(folder), None, HEAD)
    first, other = (pretrained.new_model(num_outputs=2, seed=seed, dropout=None) for seed in (0, 1))
    assert not torch.equal(first.bert.pooler.dense.weight, other.bert.pooler.dense.weight)
    assert torch.equal(first.bert.embeddings.word_embeddings.weight, weights["bert.embeddings.word_embeddings.weight"])


def test_any_encoder_of_transformers(model_folder, tmp_path):
    """RoBERTa numbers its positions from after the padding id, and has no token types."""
    config = RobertaConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=20, type_vocab_size=1, pad_token_id=0,
    )  # fmt: skip
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, tmp_path / name)
    pretrained = load_pretrained(str(tmp_path), None, HEAD)
    assert pretrained.max_length == 19
    batch = pretrained.encoder.collate(pretrained.encoder.encode(["the fox " * 20], None, 19))
    assert set(batch) == {"input_ids", "attention_mask"}
    model = pretrained.new_model(num_outputs=1, seed=0, dropout=0.1)
    assert model(**batch).logits.shape == (1, 1)


def test_a_tokenizer_of_another_model_is_refused(folder, corpus, tmp_path):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"new{number}": len(vocabulary) + number for number in range(3)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"the tokenizer of .* has 24 ids and the model 21; give the tokenizer with"):
        load_pretrained(str(folder), None, HEAD)


def test_a_tokenizer_with_another_padding_is_refused(folder):
    change(folder / "config.json", pad_token_id=3)
    with pytest.raises(UserError, match="pads with id 0 and the model with 3"):
        load_pretrained(str(folder), None, HEAD)


def test_a_tokenizer_without_special_tokens_is_refused(folder):
    change(folder / "tokenizer.json", post_processor=None)
    change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(UserError, match="adds no special tokens to texts"):
        load_pretrained(str(folder), None, HEAD)


def test_a_checkpoint_with_a_sentencepiece_model(tmp_path):
    """Texts get [CLS] and [SEP], as in pretraining, also from a model that was exported, or fine-tuned and saved."""
    path = tmp_path / "sp.model"
    path.write_bytes(train_sentencepiece(["the fox and a dog went home in seven boats"] * 9, 40, "unigram"))
    files = TokenizerFiles(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path))
    ours = files.built
    config = BertModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, max_position_embeddings=64)
    weights = new_model(config, ours.vocab_size, binary_head=True).state_dict()
    weights = {n: w[: ours.vocab_size] if n in VOCABULARY_TENSORS else w for n, w in weights.items()}
    model = PortableModel(source="", config=config, vocab_size=ours.vocab_size, weights=weights, tokenizer=files)
    for name in ("bert", "exported"):
        (tmp_path / name).mkdir()
    write_checkpoint(model, tmp_path / "bert", final=tmp_path / "bert")
    write_hf_folder(model, tmp_path / "exported", dtype="fp32")
    pretrained = load_pretrained(str(tmp_path / "bert"), None, HEAD)
    exported = [load_pretrained(str(tmp_path / "exported"), given, HEAD) for given in (None, files)]
    saved = tmp_path / "saved"
    pretrained.new_model(num_outputs=2, seed=0, dropout=None).save_pretrained(saved)
    pretrained.encoder.tokenizer.save_pretrained(saved)
    first, second, special = ours.encode("the fox"), ours.encode(" a  dog"), ours.masking
    for found in (pretrained, *exported, load_pretrained(str(saved), None, HEAD)):
        (pair,) = found.encoder.encode(["the fox"], [" a  dog"], 64)
        assert pair.ids.tolist() == [special.cls, *first, special.sep, *second, special.sep]
        assert pair.types.tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1)


def test_no_room_for_a_copy_of_the_model(corpus, folder, tmp_path, monkeypatch):
    save_trained(bert_config(corpus), tmp_path / "trained")
    files = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(corpus / "vocab.txt"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for source, tokenizer, most in ((tmp_path / "trained", None, 1 << 14), (folder, files, 8)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
            with pytest.raises(UserError, match=f"{tmp_path} cannot be written: .*File too large.*; set TMPDIR"):
                load_pretrained(str(source), tokenizer, HEAD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_another_tokenizer_given_by_hand(folder, corpus, tmp_path):
    shuffled = tmp_path / "vocab.txt"
    lines = (corpus / "vocab.txt").read_text().splitlines()
    shuffled.write_text("\n".join([*lines[:5], *reversed(lines[5:])]) + "\n")
    files = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(shuffled))
    with pytest.raises(UserError, match="encodes text differently from the model's own"):
        load_pretrained(str(folder), files, HEAD)
    same = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(corpus / "vocab.txt"))
    assert load_pretrained(str(folder), same, HEAD).encoder.backend.get_vocab_size() == 21
    more = tmp_path / "more.txt"
    more.write_text((corpus / "vocab.txt").read_text() + "owl\n")
    files = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(more))
    with pytest.raises(UserError, match="has 22 ids and the model 21"):
        load_pretrained(str(folder), files, HEAD)


def test_another_tokenizer_for_a_model_with_a_head(folder, corpus):
    """Such a model cannot come from this project."""
    BertForSequenceClassification.from_pretrained(folder, num_labels=3).save_pretrained(folder)
    files = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(corpus / "vocab.txt"))
    assert load_pretrained(str(folder), files, HEAD).max_length == 32


@pytest.mark.parametrize("kind", [BertForPreTraining, BertModel])
@pytest.mark.parametrize("head", [HEAD, "QuestionAnswering"])
def test_weights_of_more_layers_than_the_settings_say(corpus, tmp_path, kind, head):
    folder = write_model(tmp_path, corpus, num_layers=2)
    kind.from_pretrained(folder).save_pretrained(folder)
    assert load_pretrained(str(folder), None, head).config.num_hidden_layers == 2
    change(folder / "config.json", num_hidden_layers=1)
    with pytest.raises(UserError, match=r"has more layers than its settings say \(.*layer\.1\..*\); expected config"):
        load_pretrained(str(folder), None, head)


def test_what_is_no_bert_or_damaged(folder, corpus, tmp_path):
    save_trained(gpt_config(corpus), tmp_path / "gpt")
    with pytest.raises(UserError, match="is a GPT-2; expected a BERT"):
        load_pretrained(str(tmp_path / "gpt"), None, HEAD)
    with pytest.raises(UserError, match="which does not exist"):
        load_pretrained(str(tmp_path / "nowhere"), None, HEAD)
    weights = load((folder / "model.safetensors").read_bytes())  # not mapped from the file, which is written anew
    name = "bert.encoder.layer.0.output.dense.weight"
    save_file({key: value for key, value in weights.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"lacks the weights {name}"):
        load_pretrained(str(folder), None, HEAD)
    save_file(weights | {name: weights[name] * torch.nan}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"NaN or infinite elements in {name}"):
        load_pretrained(str(folder), None, HEAD)
    save_file(weights | {name: weights[name][:3].clone()}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"lacks the weights {name}, or their shape is not that of its settings"):
        load_pretrained(str(folder), None, HEAD)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged or not a safetensors file"):
        load_pretrained(str(folder), None, HEAD)
    change(folder / "config.json", model_type="unheard of")
    with pytest.raises(UserError, match="has no model that can be used"):
        load_pretrained(str(folder), None, HEAD)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="has no model that can be used"):
        load_pretrained(str(folder), None, HEAD)
