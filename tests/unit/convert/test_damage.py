"""Files with any content are either read or refused with a UserError."""

from __future__ import annotations

import contextlib
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.convert.formats import read_model
from megatron01.convert.huggingface import write_hf_folder
from megatron01.convert.native import read_checkpoint
from megatron01.errors import UserError
from tests.unit.convert.test_megatron import write


@pytest.fixture(scope="module")
def folders(gpt_checkpoint, tmp_path_factory):
    """The same model in three formats."""
    model = read_checkpoint(str(gpt_checkpoint))
    folder = tmp_path_factory.mktemp("whole")
    (folder / "hf").mkdir()
    write_hf_folder(model, folder / "hf", dtype="fp32")
    write(folder / "megatron", model)
    shutil.copytree(gpt_checkpoint, folder / "own")
    return folder


@pytest.mark.parametrize("form", ["hf", "megatron", "own"])
@given(data=st.data())
@settings(max_examples=40)
def test_damage(folders, tmp_path, form, data):
    damaged = tmp_path / "damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(folders / form, damaged)
    files = sorted(path for path in damaged.rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    # headers and indices are at the beginning or end of files
    position = data.draw(st.one_of(st.integers(0, 400), st.integers(-400, -1), st.integers(0, len(content))))
    position = max(0, min(position % (len(content) + 1), len(content)))
    removed, added = data.draw(st.sampled_from([0, 1, 8, len(content)])), data.draw(st.binary(max_size=8))
    content[position : position + removed] = added
    file.write_bytes(content)
    with contextlib.suppress(UserError):
        read_model(str(damaged)).build()
