"""Settings that exclude tensor parallelism, and what else depends on the number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron01.config import GPTPretrainConfig
from megatron01.config.command_line import parse
from megatron01.contrib.deepspeed import DeepSpeedSource
from megatron01.cost.memory import parameter_sizes
from megatron01.errors import UserError


def read(*argv: str) -> GPTPretrainConfig:
    return parse(GPTPretrainConfig, argv, prog="p", description="d", other_files=DeepSpeedSource())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--tensor-model-parallel-size", "0"), "tensor_model_parallel_size is 0; expected a positive number"),
        (
            ("--tensor-model-parallel-size", "5"),
            "num_attention_heads 12 is not divisible by tensor_model_parallel_size",
        ),
        (
            ("--tensor-model-parallel-size", "2", "--ffn-hidden-size", "33"),
            "ffn_hidden_size 33 is not divisible by tensor_model_parallel_size 2; change one of the two",
        ),
        (("--sequence-parallel",), "sequence_parallel is set, but tensor_model_parallel_size is 1"),
        (
            ("--tensor-model-parallel-size", "4", "--sequence-parallel", "--seq-length", "30"),
            "seq_length 30 is not divisible by tensor_model_parallel_size 4",
        ),
        (("--tensor-model-parallel-size", "2", "--comm-backend", "mpi"), "which comm_backend mpi does not carry"),
    ],
)
def test_what_does_not_go_together_is_one_line(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(*argv)
    assert "\n" not in str(caught.value)


def test_a_plan_is_that_of_a_shard() -> None:
    shape = ("--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "2", "--vocab-file", "nowhere")
    whole, _ = parameter_sizes(read(*shape))
    shard, note = parameter_sizes(read(*shape, "--tensor-model-parallel-size", "2"))
    assert note is not None and "one of 2 tensor-parallel shards" in note and "nowhere" in note
    assert len(shard) == len(whole) and 0.5 < sum(shard) / sum(whole) < 0.55
    assert shard[0] == 25216 * 64  # the vocabulary's 50257 ids, padded to a multiple of 256


def test_deepspeeds_batch_sizes_count_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "6")
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}')
    argv = ("--deepspeed-config", str(path), "--tensor-model-parallel-size", "2")
    assert read(*argv).training.global_batch_size == 2 * 5 * 3
