from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config.yaml_files import read_config
from megatron01.contrib.deepspeed import parse_json
from megatron01.errors import UserError


def fails(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_json(text, source="ds.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_comments_and_trailing_commas_are_read_over_but_strings_kept() -> None:
    text = """{ // the whole batch
      "train_batch_size": 8, # in sequences
      /* of all
         replicas */
      "name": "http://a#b /* c */ \\" ,}",
      "betas": [0.9, 0.95, ],
    }"""
    expected = {"train_batch_size": 8, "name": 'http://a#b /* c */ " ,}', "betas": [0.9, 0.95]}
    assert parse_json(text, source="ds.json") == expected


@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists), max_size=4
    )
)
def test_plain_json_is_read_as_it_is(content: dict[str, object]) -> None:
    assert parse_json(json.dumps(content), source="x") == content
    assert parse_json(json.dumps(content, indent=1, ensure_ascii=False), source="x") == content


def test_a_line_number_counts_comments() -> None:
    assert fails("{\n/* two\n lines */\n// three\n1}").startswith("ds.json line 5: not valid JSON: ")


TOO_MUCH = "a number is too long, or objects are nested too deeply"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ds.json line 1: not valid JSON: Expecting value"),
        ("train_batch_size: 8", "ds.json line 1: not valid JSON: Expecting value"),
        ("[1, 2]", "ds.json holds no JSON object; expected {...} with DeepSpeed's fields"),
        (
            '{"fp16": {"enabled": true, "enabled": false}}',
            "ds.json: 'enabled' is given twice in one object; keep one of them",
        ),
        ('{"a": 1, "b": 2, "a": 1}', "ds.json: 'a' is given twice in one object; keep one of them"),
        ('{"lr": 1' + "0" * 5000 + "}", f"ds.json: not valid JSON: {TOO_MUCH}"),
        ("[" * 100_000, f"ds.json: not valid JSON: {TOO_MUCH}"),
    ],
)
def test_what_is_no_configuration_is_one_line(text: str, message: str) -> None:
    assert fails(text) == message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_bytes(b"\xff\xfe{")
    for name, message in [
        ("ds_confg.json", "does not exist; did you mean 'ds_config.json'?"),
        ("nowhere/ds.json", f"does not exist; the folder {tmp_path / 'nowhere'} does not exist either"),
        ("ds_config.json", "cannot be read: it is not UTF-8 text"),
        (".", "cannot be read: Is a directory"),
    ]:
        with pytest.raises(UserError) as caught:
            read_config(tmp_path / name, "DeepSpeed config")
        assert str(caught.value) == f"DeepSpeed config {tmp_path / name} {message}"


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"steps_per_print": 1}', encoding="utf-8-sig")
    assert parse_json(read_config(path, "DeepSpeed config"), source="ds.json") == {"steps_per_print": 1}
