"""Training that starts from the weights of a trained model."""

from __future__ import annotations

import os

import pytest
import torch

from megatron01.config import BertPretrainConfig, DistributedConfig
from megatron01.convert.huggingface import write_hf_folder
from megatron01.convert.native import read_checkpoint, write_checkpoint
from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.pretraining import BERT, GPT
from megatron01.training import Trainer, pretrain
from megatron01.utils.precision import DTYPES
from tests.distributed.harness import run_ranks
from tests.integration.runs import run
from tests.integration.tiny import bert_config, gpt_config, with_settings
from tests.unit.convert.trained import save_trained


@pytest.fixture(scope="module")
def models(corpus, tmp_path_factory):
    """A GPT-2's checkpoint, and the same as Hugging Face folder and as weights alone; and a BERT's checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    save_trained(gpt_config(corpus), folder / "gpt")
    save_trained(bert_config(corpus), folder / "bert")
    model = read_checkpoint(str(folder / "gpt"))
    for kind in ("hf", "weights"):
        (folder / kind).mkdir()
    write_hf_folder(model, folder / "hf", dtype="fp32")
    write_checkpoint(model, folder / "weights", final=folder / "weights")
    return folder


def start(config):
    """The master weights with which a run on one replica starts, the model's own weights, and what it notes."""
    script = BERT if isinstance(config, BertPretrainConfig) else GPT
    environment = LaunchEnvironment.read({})
    with initialize(environment, DistributedConfig(threads_per_replica=1)) as group:
        functions = (script.build_datasets, script.build_model, script.forward_step)
        trainer = Trainer(config, environment, group, *functions)
        masters = {str(name): tensor.clone() for name, tensor in trainer.optimizer.master_parameters().items()}
        own = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        trainer.recorder.close()
        return masters, own, trainer


@pytest.mark.parametrize("optimizer", ["zero_one_adam", "adam", "bin_sgdm"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_master_weights_are_the_models_to_the_bit(corpus, models, tmp_path, optimizer, precision):
    config = gpt_config(corpus, optimizer=optimizer, precision=precision, run_dir=str(tmp_path))
    expected = read_checkpoint(str(models / "gpt")).padded_weights()
    for kind in ("gpt", "hf", "weights"):
        masters, own, trainer = start(with_settings(config, pretrained_checkpoint=str(models / kind)))
        assert trainer.iteration == 0 and trainer.optimizer.step_count == 0
        for name, tensor in expected.items():
            assert torch.equal(masters[name], tensor), (kind, name)
            assert torch.equal(own[name], tensor.to(own[name].dtype)), (kind, name)
        assert f"starting from the weights of {models / kind}" in trainer._describe_start()


def test_bert(corpus, models, tmp_path):
    config = bert_config(corpus, run_dir=str(tmp_path), pretrained_checkpoint=str(models / "bert"))
    masters, _, _ = start(config)
    for name, tensor in read_checkpoint(str(models / "bert")).padded_weights().items():
        assert torch.equal(masters[name], tensor), name


def test_a_run_with_other_padding(corpus, models, tmp_path):
    config = gpt_config(
        corpus,
        run_dir=str(tmp_path),
        pretrained_checkpoint=str(models / "hf"),
        make_vocab_size_divisible_by=128,
    )
    masters, _, _ = start(config)
    rows = masters["embedding.word_embeddings.weight"]
    expected = read_checkpoint(str(models / "gpt")).weights["embedding.word_embeddings.weight"]
    assert rows.shape[0] == 384
    assert torch.equal(rows[:257], expected[:257]) and not rows[257:].any()


def test_a_checkpoint_of_the_run_itself_wins(corpus, models, tmp_path):
    """A restart goes on with the run; it does not start from the pretrained model again."""
    config = gpt_config(
        corpus,
        run_dir=str(tmp_path),
        save=str(tmp_path / "own"),
        load="auto",
        pretrained_checkpoint=str(models / "gpt"),
    )
    _, _, trainer = start(config)
    assert trainer.iteration == 0
    trainer.iteration = 3
    with initialize(LaunchEnvironment.read({}), DistributedConfig(threads_per_replica=1)):
        trainer.save()
    _, _, again = start(config)
    assert again.iteration == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2}, "lacks transformer.layers.1"),
        ({"hidden_size": 16}, r"shape \[264, 32\] there and \[264, 16\] here"),
        ({"num_attention_heads": 4}, "num_attention_heads 2, and this run 4; give --num-attention-heads 2"),
        ({"layernorm_epsilon": 1e-3}, "layernorm_epsilon"),
        ({"pretrained_checkpoint": "bert"}, "is not the vocabulary with which"),
        ({"pretrained_checkpoint": "none"}, "does not exist"),
    ],
)
def test_other_models_are_refused(corpus, models, tmp_path, changes, message):
    name = changes.pop("pretrained_checkpoint", "gpt")
    config = gpt_config(corpus, run_dir=str(tmp_path), pretrained_checkpoint=str(models / name), **changes)
    with pytest.raises(UserError, match=message):
        start(config)


def test_other_heads_are_refused(corpus, models, tmp_path):
    config = bert_config(corpus, run_dir=str(tmp_path), pretrained_checkpoint=str(models / "bert"), objective="none")
    with pytest.raises(UserError, match="a head for sentence pairs, not one; give --objective sop or nsp"):
        start(config)


def test_no_run_goes_on_from_weights_alone(corpus, models, tmp_path):
    config = gpt_config(corpus, run_dir=str(tmp_path), load=str(models / "weights"))
    with pytest.raises(UserError, match="start a new one with --pretrained-checkpoint"):
        start(config)


def start_and_compare(rank, world_size, config):
    """The fingerprint of the replicated state."""
    functions = (GPT.build_datasets, GPT.build_model, GPT.forward_step)
    environment = LaunchEnvironment.read(os.environ)
    with initialize(environment, DistributedConfig(threads_per_replica=1)) as group:
        trainer = Trainer(config, environment, group, *functions)
        fingerprint = trainer.optimizer.fingerprint()
        trainer.recorder.close()
        return fingerprint


def test_all_replicas_start_from_the_same(corpus, models, tmp_path):
    config = gpt_config(corpus, run_dir=str(tmp_path), pretrained_checkpoint=str(models / "hf"))
    first, second = run_ranks(start_and_compare, 2, config, default_group=True)
    assert first == second


def run_frozen(rank, world_size, *configs):
    """Runs of a GPT-2 whose embeddings are not trained."""

    def build_model(config, tokenizer):
        model = GPT.build_model(config, tokenizer)
        model.embedding.requires_grad_(False)
        return model

    for config in configs:
        pretrain(config, GPT.build_datasets, build_model, GPT.forward_step)


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({"optimizer": "adam", "precision": "bf16"}, (1, {}), (1, {})),
        ({"precision": "fp16"}, (2, {"replica": "node", "shard_optimizer": True}), (1, {})),
        ({}, (1, {}), (2, {"tensor_model_parallel_size": 2})),
    ],
)
def test_frozen_parameters_are_those_of_the_model_and_of_the_checkpoint(
    corpus, models, tmp_path, settings, before, after
):
    """Also after a resume, which no longer reads the model, and on other replicas."""
    config = gpt_config(
        corpus, run_dir=str(tmp_path), save=str(tmp_path / "saved"), load="auto", lr_warmup_iters=0, **settings
    )
    given = read_checkpoint(str(models / "gpt")).padded_weights()
    first = with_settings(config, pretrained_checkpoint=str(models / "gpt"), train_iters=2, **before[1])
    again, resumed = (with_settings(config, train_iters=iters, **how) for iters, how in ((3, before[1]), (4, after[1])))
    run_ranks(run_frozen, before[0], first, again, default_group=before[0] > 1)
    run_ranks(run_frozen, after[0], resumed, default_group=after[0] > 1)
    weights = read_checkpoint(str(tmp_path / "saved")).weights
    for name, tensor in weights.items():
        expected = given[name].to(DTYPES[config.training.precision]).float()
        assert torch.equal(tensor, expected) == name.startswith("embedding."), name


def test_parameters_that_are_frozen_on_resume_keep_the_weights_of_the_checkpoint(corpus, tmp_path):
    places = {"run_dir": str(tmp_path), "save": str(tmp_path / "saved"), "load": "auto"}
    config = gpt_config(corpus, **places, lr_warmup_iters=0, train_iters=2)
    run(config)
    before = read_checkpoint(str(tmp_path / "saved")).weights
    run_frozen(0, 1, with_settings(config, train_iters=4))
    after = read_checkpoint(str(tmp_path / "saved")).weights
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("embedding."), name
