"""Checkpoints in Megatron-LM's format torch_dist, written by these tests as megatron-core writes them."""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron01.checkpoint.manifest import read_metadata
from megatron01.convert.formats import read_model
from megatron01.convert.torch_files import DistributedFiles
from megatron01.errors import UserError
from tests.unit.convert.test_megatron import CORE_FUSED_NORMS, arguments, assert_same, core_tree, shard_of


class Writer:
    """Files of one process each, with several ``torch.save`` files one after the other, and their ``.metadata``."""

    def __init__(self, folder: Path, processes: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.contents = folder, [io.BytesIO() for _ in range(processes)]
        self.entries: dict = {}
        self.storage: dict = {}

    def add(self, process: int, name: str, value: object, offset: tuple[int, ...] | None = None) -> None:
        """One part of a tensor (with its ``offset``), or an object."""
        file = self.contents[process]
        start = file.tell()
        torch.save(value, file)
        place = _StorageInfo(f"__{process}_0.distcp", start, file.tell() - start)
        self.storage[MetadataIndex(name, offset)] = place
        if offset is None:
            self.entries[name] = BytesStorageMetadata()
            return
        chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=value.shape)
        entry = self.entries.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=value.dtype), torch.Size([0] * value.dim()), [])
        )
        entry.chunks.append(chunk)
        ends = (at + size for at, size in zip(offset, value.shape, strict=True))
        entry.size = torch.Size(max(pair) for pair in zip(entry.size, ends, strict=True))

    def close(self) -> None:
        for process, file in enumerate(self.contents):
            (self.folder / f"__{process}_0.distcp").write_bytes(file.getvalue())
        with open(self.folder / ".metadata", "wb") as file:
            pickle.dump(Metadata(self.entries, storage_data=self.storage), file)


def write(folder: Path, model, *, ranks=2, one_tensor_for_all_layers=True, newer=False, **changes) -> Path:
    """A checkpoint of two pipeline stages with ``ranks`` tensor-parallel ranks each; the folder of its iteration."""
    iteration = folder / "iter_0000007"
    writer = Writer(iteration, 2 * ranks)
    shared = {
        "args": arguments(model, tensor_model_parallel_size=ranks, pipeline_model_parallel_size=2, **changes),
        "checkpoint_version": 3.0,
        "iteration": 7,
    }
    shards = []
    for rank in range(ranks):
        tensors = {
            name: shard_of(name, tensor, rank, ranks, heads=model.config.num_attention_heads, version=3.0)
            for name, tensor in model.weights.items()
        }
        shards.append(core_tree(tensors, CORE_FUSED_NORMS, "decoder"))
    parts = [(rank, name, tensor) for rank, shard in enumerate(shards) for name, tensor in shard.items()]
    for rank, name, tensor in parts:
        match = re.fullmatch(r"(.*layers\.)(\d+)\.(.*)", name)
        stage = 0 if match is None or int(match[2]) == 0 else 1
        if tensor is None:
            writer.add(stage * ranks, "decoder.layers.self_attention._extra_state/shard_0_1", io.BytesIO())
            continue
        wholes = [shard[name] for shard in shards]
        if all(torch.equal(whole, wholes[0]) for whole in wholes) and rank > 0:
            continue  # saved by the first rank
        dim = next((dim for dim in range(tensor.dim()) if name_is_divided(name, dim)), 0)
        offset = [0] * tensor.dim()
        offset[dim] = rank * tensor.shape[dim]
        if match is not None and one_tensor_for_all_layers:
            name, tensor, offset = f"{match[1]}{match[3]}", tensor[None], [int(match[2]), *offset]
        writer.add(stage * ranks + rank, name, tensor, tuple(offset))
        optimizer = "chained_1.optimizer" if name.endswith("bias") else "optimizer"  # of several optimizers, or one
        writer.add(stage * ranks + rank, f"{optimizer}.state.exp_avg.{name}", tensor * 0, tuple(offset))
    writer.add(0, "rng_state/shard_0_1", [{"np_rng_state": (1, 2)}])
    if newer:
        writer.add(0, "common_state/shard_0_1", [shared])
    else:
        torch.save(shared, iteration / "common.pt")
    writer.close()
    (iteration / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return iteration


def name_is_divided(name: str, dim: int) -> bool:
    """True if the ranks hold parts of this tensor of megatron-core along ``dim``."""
    rows = ("word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
    columns = ("linear_proj.weight", "linear_fc2.weight")
    return name.endswith(columns if dim == 1 else (*rows, "output_layer.bias"))


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("one_tensor_for_all_layers", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("source", ["gpt", "bert"])
def test_stages_and_ranks_are_joined(source, ranks, one_tensor_for_all_layers, newer, tmp_path, request):
    model = request.getfixturevalue(source)
    iteration = write(tmp_path, model, ranks=ranks, one_tensor_for_all_layers=one_tensor_for_all_layers, newer=newer)
    for path in (tmp_path, iteration):
        found = read_model(str(path))
        assert_same(found, model)
        assert found.config == model.config and found.vocab_size == model.vocab_size


def test_what_torch_itself_writes_is_read(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(2.0), "name": "words"}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path))
    files = DistributedFiles(tmp_path)
    assert files.shapes == {"a": (3, 5), "b": (7,), "c": ()} and files.objects == ["name"]
    assert all(torch.equal(files.tensor(name), tensors[name]) for name in files.shapes)
    assert files.object("name", stand_ins=()) == "words"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({(0, 0): torch.ones(2, 3), (2, 0): torch.ones(2, 3, dtype=torch.bfloat16)}, r"\[2, 0\] does not fit"),
        ({(0, 0): torch.ones(2, 3), (3, 0): torch.ones(2, 3)}, r"\[3, 0\] does not fit"),
        ({(0, 0): torch.ones(2, 3), (2, 0): torch.ones(2, 3, dtype=torch.int64)}, "has another shape, or no floats"),
        ({(0, 0): torch.ones(4, 3, dtype=torch.int64)}, "has another shape, or no floats"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts, message, tmp_path):
    writer = Writer(tmp_path / "saved", 1)
    for offset, part in parts.items():
        writer.add(0, "a", part, offset)
    writer.entries["a"].size = torch.Size([4, 3])
    writer.close()
    with pytest.raises(UserError, match=rf"\.metadata is damaged .*\(a at .*{message}"):
        DistributedFiles(tmp_path / "saved").tensor("a")


def test_what_no_file_holds_is_named(tmp_path):
    writer = Writer(tmp_path / "saved", 1)
    writer.add(0, "empty", torch.ones(0, 3), (0, 0))
    writer.add(0, "object", "words")
    writer.storage.clear()
    writer.close()
    files = DistributedFiles(tmp_path / "saved")
    with pytest.raises(UserError, match=r"the parts of empty do not make up its shape \[0, 3\]"):
        files.tensor("empty")
    with pytest.raises(UserError, match="no file holds object"):
        files.object("object", stand_ins=())


def test_no_code_in_the_metadata_is_executed(tmp_path):
    class Hostile:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    metadata = Metadata({}, storage_data={}, planner_data=Hostile())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert DistributedFiles(tmp_path).shapes == {}
    assert not (tmp_path / "executed").exists()


def _change(folder: Path, change) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


EMBEDDINGS = MetadataIndex("embedding.word_embeddings.weight", (0, 0))


def _drop_a_part(metadata):
    del metadata.storage_data[EMBEDDINGS]


def _claim_a_huge_size(metadata):
    entry = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    entry.size = torch.Size([1 << 40, entry.size[1]])
    entry.chunks[1] = ChunkStorageMetadata(
        entry.chunks[1].offsets, torch.Size([(1 << 40) - entry.chunks[0].sizes[0], entry.size[1]])
    )


def _begin_before_the_file(metadata):
    metadata.storage_data[EMBEDDINGS].offset = -1


def _leave_the_folder(metadata):
    metadata.storage_data[EMBEDDINGS].relative_path = "../../secret"


def _overlap(metadata):
    entry = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    second = entry.chunks[1]
    place = metadata.storage_data.pop(MetadataIndex("embedding.word_embeddings.weight", second.offsets))
    entry.chunks[1] = ChunkStorageMetadata(torch.Size([1, 0]), second.sizes)
    metadata.storage_data[MetadataIndex("embedding.word_embeddings.weight", (1, 0))] = place


def _compress(metadata):
    metadata.storage_data[EMBEDDINGS].transform_descriptors = ["zstd"]


def _add_experts(metadata):
    entry = metadata.state_dict_metadata["decoder.final_layernorm.bias"]
    metadata.state_dict_metadata["decoder.layers.mlp.experts.linear_fc1.weight"] = entry
    place = metadata.storage_data[MetadataIndex("decoder.final_layernorm.bias", (0,))]
    metadata.storage_data[MetadataIndex("decoder.layers.mlp.experts.linear_fc1.weight", (0,))] = place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_a_part, "the parts of embedding.word_embeddings.weight do not make up its shape"),
        (_claim_a_huge_size, "ends before embedding.word_embeddings.weight"),
        (_begin_before_the_file, r"\.metadata is damaged .*sizes \(-1, "),
        (_leave_the_folder, "a file '../../secret', which is not in its folder"),
        (_overlap, r"NaN or infinite elements in embedding\.word_embeddings\.weight"),
        (_compress, "is compressed"),
        (_add_experts, "holds decoder.layers.0.mlp.experts.linear_fc1.weight"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(change, message, gpt, tmp_path):
    _change(write(tmp_path, gpt), change)
    with pytest.raises(UserError, match=message) as refused:
        read_model(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_cut_off_is_refused(gpt, tmp_path):
    path = write(tmp_path, gpt) / "__0_0.distcp"
    metadata = pickle.loads((path.parent / ".metadata").read_bytes())
    place = metadata.storage_data[MetadataIndex("decoder.final_layernorm.bias", (0,))]
    path.write_bytes(path.read_bytes()[: place.offset + place.length - 1])
    with pytest.raises(UserError, match=r"__0_0\.distcp ends before decoder\.final_layernorm\.bias, .*; it is cut off"):
        read_model(str(tmp_path))
    path.unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp cannot be read: No such file"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metadata.json", None, r"has no metadata\.json, so its save was not finished; expected a finished"),
        ("metadata.json", b'{"sharded_backend": "fsdp_dtensor"}', "is in the format 'fsdp_dtensor'"),
        (".metadata", b"\x80", r"\.metadata is damaged or was not written by torch\.distributed\.checkpoint"),
        (".metadata", pickle.dumps([1]), r"\.metadata is damaged"),
        ("common.pt", None, r"common\.pt cannot be read"),
    ],
)
def test_other_files_are_checked(name, content, message, gpt, tmp_path):
    path = write(tmp_path, gpt) / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        read_model(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_checkpoint_without_settings_is_refused(tmp_path):
    writer = Writer(tmp_path / "saved", 1)
    writer.add(0, "common_state/shard_0_1", [])
    writer.close()
    (tmp_path / "saved" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(UserError, match="holds no state beside its tensors; expected a finished checkpoint"):
        read_model(str(tmp_path / "saved"))


def test_another_model_is_refused_by_its_settings(gpt, tmp_path):
    write(tmp_path, gpt, swiglu=True)
    with pytest.raises(UserError, match="was trained with swiglu True"):
        read_model(str(tmp_path))


def test_it_is_no_checkpoint_to_resume_from(gpt, tmp_path):
    iteration = write(tmp_path, gpt)
    with pytest.raises(UserError, match=r"is a checkpoint of Megatron-LM, .* by --pretrained-checkpoint, or by"):
        read_metadata(iteration)
