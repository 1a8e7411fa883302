"""Interrupted preprocessing: killed anywhere, stopped by errors, resumed, and protected from running twice at once."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron01.config.commands import PreprocessConfig
from megatron01.data.indexed import IndexedDatasetBuilder
from megatron01.data.preprocessing import corpus
from megatron01.data.preprocessing.encoding import Encoder
from megatron01.data.preprocessing.preprocess import preprocess
from megatron01.errors import UserError
from megatron01.utils.files import open_locked
from tests.tiers import slow_after
from tests.unit.data.test_preprocess import as_json, files, gpt_config, write_lines

LINES = [json.dumps({"text": f"Text {number}.", "b": "x" * (number % 7 + 1)}).encode() for number in range(24)]
LINES[5] = LINES[17] = b"{broken"
CHUNK_BYTES = 200  # about 4 lines


@pytest.fixture
def config(tmp_path: Path) -> PreprocessConfig:
    """Two files and two outputs, recorded after every chunk."""
    inputs = [write_lines(tmp_path / "a.jsonl", LINES[:10]), write_lines(tmp_path / "b.jsonl", LINES[10:])]
    return replace(gpt_config(tmp_path, *inputs), json_keys=("text", "b"), checkpoint_seconds=0, workers=1)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(corpus, "BLOCK_BYTES", CHUNK_BYTES)


@pytest.fixture
def expected(config: PreprocessConfig, tmp_path: Path) -> dict[str, bytes]:
    """What an uninterrupted run writes; the folder is empty again."""
    preprocess(config)
    written = files(tmp_path / "out")
    for name in written:
        (tmp_path / "out" / name).unlink()
    assert len(written) == 6
    return written


class Interrupted(Exception):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, num_chunks: int, error: BaseException) -> None:
    """Let the next run end with ``error`` after it has encoded ``num_chunks`` chunks."""
    done = iter(range(num_chunks))
    original = Encoder.encode

    def encode(*arguments: Any) -> Any:
        if next(done, None) is None:
            raise error
        return original(*arguments)

    monkeypatch.setattr(Encoder, "encode", encode)


def interrupt(monkeypatch: pytest.MonkeyPatch, config: PreprocessConfig, num_chunks: int) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, num_chunks, Interrupted())
        with pytest.raises(Interrupted):
            preprocess(config)


def interrupt_in(
    monkeypatch: pytest.MonkeyPatch, config: PreprocessConfig, method: str, function: Callable[..., None]
) -> None:
    """Run with ``function``, which raises Interrupted at some call, in place of a method of the builder."""
    with monkeypatch.context() as patch:
        patch.setattr(IndexedDatasetBuilder, method, function)
        with pytest.raises(Interrupted):
            preprocess(config)


def killed_run(config: PreprocessConfig, deadly_call: int, output: Path) -> None:
    """Run until the n-th operation on a file, and end the process there without any cleanup."""
    corpus.CHUNK_BYTES = corpus.BLOCK_BYTES = 4 * CHUNK_BYTES
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == deadly_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), sys.stderr.fileno())
    preprocess(config)


@pytest.mark.slow
def test_killed_anywhere(config: PreprocessConfig, expected: dict[str, bytes], tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    for deadly_call in range(1, 1000):
        process = processes.Process(target=killed_run, args=(config, deadly_call, tmp_path / "stderr"))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "stderr").read_text()
        preprocess(config)
        assert files(tmp_path / "out") == expected, f"killed at call {deadly_call}"
        if deadly_call % 2:  # with and without older outputs in the way
            for path in (tmp_path / "out").iterdir():
                path.unlink()
    assert deadly_call > 40


@pytest.fixture
def long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PreprocessConfig, dict[str, bytes]]:
    """A run with chunks of half a megabyte, more than a pipe holds, and what it writes without interruption."""
    monkeypatch.undo()
    corpus = write_lines(tmp_path / "a.jsonl", as_json(["some text " * 300] * 1500))
    config = replace(gpt_config(tmp_path, corpus), checkpoint_seconds=0)
    preprocess(config)
    return config, files(tmp_path / "out")


@contextmanager
def two_workers(config: PreprocessConfig) -> Iterator[subprocess.Popen[bytes]]:
    """The running command with two workers, in a process group of its own."""
    command = [sys.executable, "-m", "megatron01", "preprocess", "--input", *config.input, "--workers", "2"]
    for name in ("output_prefix", "tokenizer_type", "vocab_file", "merge_file"):
        command += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    command += ["--append-eod", "--checkpoint-seconds", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        yield process


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], Any]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGKILL]))
def test_signalled_processes(long_run: tuple[PreprocessConfig, dict[str, bytes]], number: signal.Signals) -> None:
    config, expected = long_run
    record = Path(f"{config.output_prefix}_document.progress.json")
    with two_workers(config) as process:
        wait_for(process, record.exists)
        with pytest.raises(UserError, match="another process is writing"):
            preprocess(config)
        if number == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)  # as launchers do: the workers get it too
        _, said = process.communicate()  # returns when the last of its workers has closed the pipe
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), said
    assert number == signal.SIGKILL or b"repeat the same command to resume" in said
    assert b"Traceback" not in said
    assert record.exists()
    assert 0 < json.loads(record.read_bytes())["summary"]["documents"] < 1500
    assert preprocess(config).documents == 1500
    assert files(record.parent) == expected


@pytest.mark.parametrize("workers", slow_after(1, [2, 1]))
def test_signalled_while_workers_start(long_run: tuple[PreprocessConfig, dict[str, bytes]], workers: int) -> None:
    """A worker that a signal ends before it ignores it leaves the other with chunks that nobody fetches."""
    config, expected = long_run
    with two_workers(config) as process:
        wait_for(process, lambda: len(workers_of(process)) >= workers)
        os.killpg(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert b"because memory ran out" not in said and b"Traceback" not in said
    assert preprocess(config).documents == 1500
    assert files(Path(config.output_prefix).parent) == expected


def test_killed_worker(long_run: tuple[PreprocessConfig, dict[str, bytes]]) -> None:
    """The pool ends the other workers, which ignore SIGTERM."""
    config, expected = long_run
    record = Path(f"{config.output_prefix}_document.progress.json")
    with two_workers(config) as process:
        wait_for(process, record.exists)
        os.kill(workers_of(process)[0], signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert b"perhaps because memory ran out; use fewer workers" in said and b"Traceback" not in said
    assert preprocess(config).documents == 1500
    assert files(record.parent) == expected


def test_summary_and_places_survive(
    config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = preprocess(config)
    for num_chunks in range(1, 5):
        interrupt(monkeypatch, config, num_chunks)
        assert "repeat the same command to resume" in capsys.readouterr().err
        summary = preprocess(config)
        assert "resuming after" in capsys.readouterr().err
        summary.seconds = whole.seconds
        assert summary == whole
    assert whole.places == {"invalid JSON": [f"{tmp_path}/a.jsonl:6", f"{tmp_path}/b.jsonl:8"]}


def test_the_time_of_all_runs_counts(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    now, encode = [0.0], Encoder.encode

    def slow(*arguments: Any) -> Any:
        now[0] += 2
        return encode(*arguments)

    monkeypatch.setattr(Encoder, "encode", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    whole = preprocess(config).seconds
    interrupt(monkeypatch, config, 2)
    assert preprocess(config).seconds == whole == now[0] / 2 > 8


def test_ctrl_c_keeps_what_was_done(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = replace(config, checkpoint_seconds=3600, input=config.input[1:])
    with monkeypatch.context() as patch:
        stop_after(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            preprocess(config)
    record = json.loads((tmp_path / "out" / "gpt_document.progress.json").read_bytes())
    assert record["summary"]["documents"] > 0
    preprocess(config)


def test_nothing_is_left_when_nothing_was_done(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, config, 0)
    assert list(Path(config.output_prefix).parent.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"append_eod": False},
            "had append_eod True, this one has False; repeat the original command to resume, or give --no-resume",
        ),
        ({"json_keys": ("b", "text")}, r"had json_keys \['text', 'b'\]"),
        ({"vocab_file": "other"}, "had tokenizer"),
        ({"input": ("b.jsonl",)}, r"input 1 of the interrupted run was .*a\.jsonl, now it is .*b\.jsonl"),
        ({"output_prefix": "moved"}, "had output_prefix"),
        ({"strict": True}, r"strict is set, but the interrupted run has left out 2 \(invalid JSON\)"),
    ],
)
def test_another_run_does_not_go_on(
    config: PreprocessConfig, change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interrupt(monkeypatch, config, 4)
    before = files(tmp_path / "out")
    if "vocab_file" in change:
        vocabulary = json.loads(Path(config.vocab_file).read_bytes())
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary | {"new entry": len(vocabulary)}))
        change = {"vocab_file": str(tmp_path / "vocab.json")}
    if "input" in change:
        change = {"input": (str(tmp_path / "b.jsonl"),)}
    if "output_prefix" in change:
        shutil.copytree(tmp_path / "out", tmp_path / "moved")
        change = {"output_prefix": str(tmp_path / "moved" / "gpt")}
    with pytest.raises(UserError, match=reason):
        preprocess(replace(config, **change))
    assert files(tmp_path / "out") == before
    preprocess(replace(config, resume=False, json_keys=("text",)))
    assert sorted(files(tmp_path / "out")) == [f"gpt_text_document.{end}" for end in ("bin", "idx", "json")]


@pytest.mark.parametrize("change", [{"lang": "lines"}, {"keep_newlines": True}, {"max_document_mb": 9}])
def test_a_run_with_other_rules_does_not_go_on(
    config: PreprocessConfig, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, split_sentences=True)
    interrupt(monkeypatch, config, 4)
    with pytest.raises(UserError, match=f"the interrupted run had {next(iter(change))} "):
        preprocess(replace(config, **change))


def test_changed_input(
    config: PreprocessConfig, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = map(Path, config.input)
    interrupt(monkeypatch, config, 4)  # in the second file
    original = second.read_bytes()
    for content in (original.replace(b"Text 10", b"Taxt 10"), original[:40]):
        second.write_bytes(content)
        with pytest.raises(UserError, match=r"b\.jsonl has changed since the run was interrupted"):
            preprocess(config)
    second.write_bytes(original + LINES[0])  # only what was not read yet has changed
    os.utime(first, ns=(1, 1))
    with pytest.raises(UserError, match=r"a\.jsonl has changed since"):
        preprocess(config)
    preprocess(replace(config, resume=False))
    second.write_bytes(original)
    interrupt(monkeypatch, config, 4)
    os.utime(second, ns=(1, 1))
    preprocess(config)
    assert files(tmp_path / "out") == expected


def test_input_that_is_written_meanwhile(
    config: PreprocessConfig, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Path(config.input[1])
    original, encode = second.read_bytes(), Encoder.encode

    def encode_and_truncate(*arguments: Any) -> Any:
        second.write_bytes(original[:100])
        return encode(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", encode_and_truncate)
        with pytest.raises(UserError, match=r"b\.jsonl was changed while this command ran"):
            preprocess(config)
    second.write_bytes(original)
    preprocess(config)
    assert files(Path(config.output_prefix).parent) == expected


def test_standard_input_goes_on(
    config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    content = b"".join(line + b"\n" for line in LINES)
    config = replace(config, input=("-",))

    class Pipe:
        def __init__(self, content: bytes) -> None:
            self.buffer = io.BytesIO(content)

    monkeypatch.setattr(sys, "stdin", Pipe(content))
    interrupt(monkeypatch, config, 3)
    for other in (content.replace(b"Text 1.", b"Text 2."), content[:20]):
        monkeypatch.setattr(sys, "stdin", Pipe(other))
        with pytest.raises(UserError, match="standard input has changed"):
            preprocess(config)
    monkeypatch.setattr(sys, "stdin", Pipe(content))
    preprocess(config)
    assert files(tmp_path / "out") == expected


def test_full_disk(config: PreprocessConfig, expected: dict[str, bytes], tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    reached = 0
    try:
        for most in (0, 20, 60, 100, 150):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            with pytest.raises(UserError, match=r"cannot be written: File too large; check .* space left there"):
                preprocess(config)
            record = tmp_path / "out" / "gpt_document.progress.json"
            reached += record.exists()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    preprocess(config)
    assert files(tmp_path / "out") == expected


def test_a_chunk_that_was_written_to_one_output_alone_is_written_again(
    config: PreprocessConfig, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls, add_documents = iter(range(5)), IndexedDatasetBuilder.add_documents

    def add(*arguments: Any) -> None:
        if next(calls, None) is None:  # the second output of the third chunk
            raise Interrupted
        add_documents(*arguments)

    interrupt_in(monkeypatch, config, "add_documents", add)
    preprocess(config)
    assert files(tmp_path / "out") == expected


def test_damaged_record(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interrupt(monkeypatch, config, 3)
    record = tmp_path / "out" / "gpt_document.progress.json"
    for content in ("", "[]", "{}"):
        record.write_text(content)
        with pytest.raises(UserError, match=r"progress\.json, the record of an interrupted run, is damaged"):
            preprocess(config)
    preprocess(replace(config, resume=False))


def test_an_older_pair_with_the_same_counts_is_replaced(
    config: PreprocessConfig, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = Path(config.input[0])
    content = first.read_bytes()
    first.write_bytes(content.replace(b"Text 1.", b"Text 2."))
    preprocess(config)
    older = files(tmp_path / "out")
    assert older != expected and all(len(older[name]) == len(content) for name, content in expected.items())
    first.write_bytes(content)

    def stop(builder: IndexedDatasetBuilder) -> None:
        raise Interrupted

    interrupt_in(monkeypatch, config, "finalize", stop)
    preprocess(config)
    assert files(tmp_path / "out") == expected


def test_lost_partial_files(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interrupt(monkeypatch, config, 3)
    (tmp_path / "out" / "gpt_b_document.bin.partial").unlink()
    with pytest.raises(UserError, match=r"gpt_b_document\.bin\.partial"):
        preprocess(config)
    preprocess(replace(config, resume=False))


def test_two_runs_refuse_each_other(config: PreprocessConfig, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (
        open_locked(tmp_path / "out" / "gpt_document.lock"),
        pytest.raises(UserError, match="another process is writing"),
    ):
        preprocess(replace(config, json_keys=("b",)))
    preprocess(config)
