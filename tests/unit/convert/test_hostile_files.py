"""Files from others may expand without limit: they are refused with a one-line error before they are read."""

from __future__ import annotations

import pickle
import zipfile

import pytest
import torch

from megatron01.config.yaml_files import load_plain_yaml
from megatron01.convert.torch_files import load_tensors
from megatron01.errors import UserError
from megatron01.finetune.results import to_csv
from megatron01.monitor.writers import JsonLinesWriter
from megatron01.utils.formatting import one_line


def test_a_compressed_file_of_torch_is_refused(tmp_path):
    plain, bomb = tmp_path / "plain.pt", tmp_path / "bomb.pt"
    torch.save({"a": torch.zeros(1 << 20)}, plain)
    assert load_tensors(plain)["a"].numel() == 1 << 20
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():  # the others would be larger compressed
            kind = zipfile.ZIP_DEFLATED if entry.filename.endswith("data/0") else zipfile.ZIP_STORED
            target.writestr(entry.filename, source.read(entry), kind)
    assert bomb.stat().st_size < 100_000
    with pytest.raises(UserError, match="in it is compressed") as refused:
        load_tensors(bomb)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_tensor_of_more_elements_than_bytes_is_refused(tmp_path, is_zip):
    path = tmp_path / "expanded.pt"
    whole = torch.arange(12.0).view(3, 4)
    torch.save([{"kept": whole.t(), "part": whole[1]}], path, _use_new_zipfile_serialization=is_zip)
    assert torch.equal(load_tensors(path)[0]["kept"], whole.t())
    torch.save({"a": [torch.zeros(1).expand(1 << 40)]}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UserError, match=r"a tensor of shape \[1099511627776\] in fewer bytes"):
        load_tensors(path)
    torch.save({"a": torch.zeros(1).expand(2)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UserError, match=r"a tensor of shape \[2\] in fewer bytes"):
        load_tensors(path)


def test_a_storage_of_any_size_is_refused(tmp_path):
    class Huge:
        def __reduce__(self):
            return torch.FloatStorage, (1 << 62,)

    path = tmp_path / "huge.pt"
    path.write_bytes(pickle.dumps(Huge()))
    with pytest.raises(UserError):
        load_tensors(path)


def test_a_file_of_another_kind_is_not_said_to_load_unsafely(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"was not written by torch\.save \(Unsupported operand 118\)"):
        load_tensors(path)


def test_settings_nested_too_deeply_are_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"nested too deeply|not valid YAML"):
        load_plain_yaml(path)


@pytest.mark.parametrize("line", [b"\xff\xfe not UTF-8", b"[" * 100_000, b'{"iteration": 1e999}', b"\0" * 50])
def test_damaged_metrics_are_named_or_dropped_at_the_end(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n' + line + b'\n{"iteration": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is no line of metrics"):
        JsonLinesWriter(path, resumed_iteration=5)
    path.write_bytes(b'{"iteration": 1, "name": "\xc3\xa9"}\n' + line)
    JsonLinesWriter(path, resumed_iteration=5).close()
    assert path.read_bytes() == b'{"iteration": 1, "name": "\xc3\xa9"}\n'


def test_formulas_and_escapes_do_nothing():
    cells = ["=1+1", "-5.2", "+3", "-cmd|x", "@SUM(A1)", "88.3-88.9", "a\x1b[2Jb\nc", "\t=1"]
    assert to_csv([cells]) == "'=1+1,-5.2,+3,'-cmd|x,'@SUM(A1),88.3-88.9,a [2Jb c,'=1\n"
    assert one_line("a\x9b31m\u202eb\r\nc") == "a 31m b c"
