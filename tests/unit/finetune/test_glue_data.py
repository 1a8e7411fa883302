from __future__ import annotations

import sys
import types

import huggingface_hub
import pytest

from megatron01.errors import UserError
from megatron01.finetune.glue import TASKS, Example, read_split, read_task
from tests.unit.finetune.rows import FIRST, HUB_NAMES, SECOND, hub_sets, labels, write_hub_layout, write_tsv


def expected(task):
    second = SECOND if TASKS[task].second else [None] * 4
    return [Example(str(n), FIRST[n], second[n], labels(task)[n]) for n in range(4)]


def without_index(examples):
    return [(example.first, example.second, example.label) for example in examples]


def check(data, task):
    """Check that a folder of any layout gives the same examples."""
    found = read_task(str(data), TASKS[task])
    assert without_index(found.train) == without_index(expected(task))
    assert [without_index(examples) for examples in found.dev] == [without_index(expected(task))] * len(TASKS[task].dev)
    for split in TASKS[task].test:
        tests = read_split(str(data), TASKS[task], split)
        if not split.is_optional:
            assert tests == [Example(e.index, e.first, e.second, None) for e in expected(task)]
    return found


@pytest.mark.parametrize("task", TASKS)
def test_all_layouts_hold_the_same(task, tmp_path):
    write_tsv(tmp_path / "tsv" / task, task)
    write_hub_layout(tmp_path / "jsonl" / task.lower(), task, "jsonl")
    write_hub_layout(tmp_path / "parquet" / HUB_NAMES[task], task, "parquet")
    found = [check(tmp_path / layout, task) for layout in ("tsv", "jsonl", "parquet")]
    assert len({data.fingerprint for data in found}) == 1


@pytest.mark.parametrize("task", ["MNLI", "STS-B"])
def test_from_a_hub(task, monkeypatch):
    def load_dataset(name, config):
        if config != HUB_NAMES[task]:
            raise ValueError(f"BuilderConfig {config!r} not found")
        assert name == "some/glue"
        return hub_sets(task)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = read_task("some/glue", TASKS[task])
    assert without_index(found.train) == without_index(expected(task))
    with pytest.raises(
        UserError, match="input is 'some/glue', which is not a folder, and its rte cannot be loaded from a hub"
    ):
        read_task("some/glue", TASKS["RTE"])


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    """The hub's libraries try again and again; what they have in their cache they find without it."""
    asked = []

    def dataset_info(self, name, timeout):
        asked.append(name)
        raise ConnectionError("Name or service not known")

    def load_dataset(name, config):
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            raise TimeoutError("tried again for 23 seconds")
        if name != "cached/glue":
            raise ValueError("not in the cache")
        return hub_sets("RTE")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert without_index(read_task("cached/glue", TASKS["RTE"]).train) == without_index(expected("RTE"))
    assert asked == ["cached/glue"]
    with pytest.raises(UserError, match=r"'data/gleu', which is not a folder, .*\(not in the cache\); give a folder"):
        read_task("data/gleu", TASKS["RTE"])


def test_the_diagnostic_set_lies_beside_mnli(tmp_path):
    write_tsv(tmp_path / "MNLI", "MNLI")
    split = TASKS["MNLI"].test[-1]
    assert read_split(str(tmp_path), TASKS["MNLI"], split) == []
    (tmp_path / "diagnostic").mkdir()
    (tmp_path / "diagnostic" / "diagnostic.tsv").write_text("index\tsentence1\tsentence2\n7\ta fox .\tthe fox .\n")
    assert read_split(str(tmp_path), TASKS["MNLI"], split) == [Example("7", "a fox .", "the fox .", None)]


def test_rows_of_qqp_that_break_off_are_left_out_of_training_alone(tmp_path):
    write_tsv(tmp_path / "QQP", "QQP")
    train, dev = tmp_path / "QQP" / "train.tsv", tmp_path / "QQP" / "dev.tsv"
    train.write_text(train.read_text() + "9\t1\t2\tonly a question\n")
    data = read_task(str(tmp_path), TASKS["QQP"])
    assert len(data.train) == 4
    assert data.notes == (f"1 rows of {train} are incomplete and left out, the first at {train} line 6",)
    dev.write_text(dev.read_text() + "9\t1\t2\tonly a question\n")
    with pytest.raises(UserError, match=rf"{dev} line 6 is incomplete"):
        read_task(str(tmp_path), TASKS["QQP"])


def test_only_newlines_end_a_row(tmp_path):
    write_tsv(tmp_path / "SST-2", "SST-2")
    train = tmp_path / "SST-2" / "train.tsv"
    train.write_bytes("sentence\tlabel\r\nit\x85is\u2028fine\x0b \t1\r\n".encode())
    assert read_task(str(tmp_path), TASKS["SST-2"]).train == [Example("0", "it\x85is\u2028fine\x0b ", None, 1)]


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path):
    write_hub_layout(tmp_path / "rte", "RTE", "jsonl")
    path = tmp_path / "rte" / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert without_index(read_task(str(tmp_path), TASKS["RTE"]).train) == without_index(expected("RTE"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    write_hub_layout(tmp_path / "rte", "RTE", "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"train-00000-of-00001.parquet needs pyarrow.parquet; run: pip install 'mega"):
        read_task(str(tmp_path), TASKS["RTE"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="input 'some/glue', which is not a folder, needs datasets; run: pip install"):
        read_task("some/glue", TASKS["RTE"])


def test_cola_with_a_header_too(tmp_path):
    write_tsv(tmp_path / "CoLA", "CoLA")
    (tmp_path / "CoLA" / "train.tsv").write_text("sentence\tlabel\nthe fox jumps .\t0\n")
    assert read_task(str(tmp_path), TASKS["CoLA"]).train == [Example("0", "the fox jumps .", None, 0)]


@pytest.mark.parametrize(
    ("task", "file", "content", "message"),
    [
        ("RTE", "dev.tsv", None, r"RTE has no dev or validation set; expected dev.tsv, .jsonl or .parquet"),
        ("MNLI", "dev_mismatched.tsv", None, r"has no dev_mismatched or validation_mismatched set"),
        (
            "RTE",
            "train.tsv",
            b"index\tsentence1\tlabel\n",
            r"train.tsv line 1: there is no column 'sentence2' or 'hypo",
        ),
        ("SST-2", "train.tsv", b"label\tsentence\tlabel\n0\ta\t1\n", r"train.tsv line 1 has the column 'label' twice"),
        ("SST-2", "train.tsv", b"", r"train.tsv line 1: there is no column 'sentence', only ''"),
        ("SST-2", "train.tsv", b"sentence\tlabel\n", r"train.tsv holds no examples"),
        (
            "SST-2",
            "dev.tsv",
            b"sentence\tlabel\nfine\t1\nbad\t2\n",
            r"dev.tsv line 3: the label of SST-2 is '2'; expec",
        ),
        ("SST-2", "dev.tsv", b"sentence\tlabel\nfine\n", r"dev.tsv line 2 is incomplete"),
        ("SST-2", "dev.tsv", b"sentence\tlabel\n\xff\xfe\t1\n", r"dev.tsv line 2 is not UTF-8 text"),
        (
            "MNLI",
            "train.jsonl",
            b'{"premise": "a", "hypothesis": "b", "label": 3}\n',
            r"train.jsonl line 1: the label of",
        ),
        (
            "MNLI",
            "train.jsonl",
            b'{"premise": "a", "hypothesis": "b", "label": true}',
            r"line 1: the label of MNLI is T",
        ),
        (
            "MNLI",
            "train.jsonl",
            b'{"premise": "a", "label": 0}',
            r"line 1: there is no column 'sentence2' or 'hypothes",
        ),
        ("MNLI", "train.jsonl", b'{"premise": 1, "hypothesis": "b", "label": 0}', r"line 1: a sentence is 1; expected"),
        ("MNLI", "train.jsonl", b'{"premise": "\\ud800", "hypothesis": "b", "label": 0}', r"line 1: .* surrogate pair"),
        ("MNLI", "train.jsonl", b'{"premise": null, "hypothesis": "b", "label": 0}', r"line 1 is incomplete"),
        ("MNLI", "train.jsonl", b"[1]\n", r"train.jsonl line 1 is not a JSON object"),
        ("MNLI", "train.jsonl", b'{"premise": \n', r"train.jsonl line 1 is not JSON"),
        ("MNLI", "train.jsonl", b"[" * 100000, r"train.jsonl line 1 is not JSON"),
        ("MNLI", "train.parquet", b"PAR1", r"train.parquet is damaged or not a Parquet file"),
        ("CoLA", "train.tsv", b"gj04\t7\t\tthe fox\n", r"train.tsv line 1: the label of CoLA is '7'"),
        (
            "STS-B",
            "dev.jsonl",
            b'{"sentence1": "a", "sentence2": "b", "label": 5.1}',
            r"dev.jsonl line 1: the score .* 5.1",
        ),
        ("STS-B", "dev.jsonl", b'{"sentence1": "a", "sentence2": "b", "label": NaN}', r"expected a number from 0 to 5"),
        (
            "STS-B",
            "dev.jsonl",
            b'{"sentence1": "a", "sentence2": "b", "label": "high"}',
            r"the score of STS-B is 'high'",
        ),
    ],
)
def test_what_cannot_be_used_is_named(task, file, content, message, tmp_path):
    write_tsv(tmp_path / task, task)
    path = tmp_path / task / file
    path.with_suffix(".tsv").unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_task(str(tmp_path), TASKS[task])


def test_a_task_without_a_folder(tmp_path):
    (tmp_path / "file.tsv").write_text("")
    for name in ("none", "file.tsv"):
        with pytest.raises(UserError, match=f"input is '{tmp_path}/{name}', which is not a folder; expected one with"):
            read_task(f"{tmp_path}/{name}", TASKS["SST-2"])
    with pytest.raises(UserError, match=f"{tmp_path} has no folder for SST-2; expected {tmp_path}/SST-2"):
        read_task(str(tmp_path), TASKS["SST-2"])
