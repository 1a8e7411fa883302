"""Pretraining with several optimizers: bytes sent, held-out losses and results on downstream tasks.

    python benchmarks/pretrain_and_finetune.py --folder runs/evidence
    python benchmarks/pretrain_and_finetune.py --folder runs/evidence --spec my.yaml --minutes 60
    python benchmarks/pretrain_and_finetune.py --folder runs/evidence --table        # of what is there

One YAML file specifies everything, from the sources of the text on. A BERT is pretrained with each optimizer and
fine-tuned on GLUE, a GPT-2 predicts text and last words, and a ResNet-18 learns digits. Each run is an ordinary
command, kept in its record; a script that was stopped continues with the missing runs when it is started again.
Learning rates are tuned alike: all with the first seed, then each optimizer's best and the baseline's best with the
others.

    FOLDER/bert/zero_one_adam-0.001-0/    checkpoints, metrics, glue/ (a sweep of ``megatron01 glue``), record.json
    FOLDER/records.jsonl, table.md        records of all runs, and the comparison made from them alone

``study.py`` makes pages and pictures of records.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from convergence_run import attend_to_neighbours
from finetuning import score_of_counts, with_dev_sets
from reporting import ROOT, machine, revision, run_program, torchrun
from study import table
from study_records import KINDS, Evidence, Record, Run, Spec

from megatron01.compare.runs import read_metrics, read_run
from megatron01.config import BertPretrainConfig
from megatron01.config.commands import GlueConfig, TaskName
from megatron01.config.yaml_files import config_from_yaml
from megatron01.convert.formats import load_model
from megatron01.convert.native import write_checkpoint
from megatron01.convert.portable import PortableModel
from megatron01.data.tokenizers import Tokenizer, TokenizerFiles, build_tokenizer
from megatron01.errors import UserError
from megatron01.evaluate.perplexity import read_documents
from megatron01.finetune.glue import TASKS, GlueBench
from megatron01.finetune.results import Result, best_settings, settings_of
from megatron01.finetune.results import Run as FineTuning
from megatron01.models import Bert
from megatron01.models.gpt2 import GPT2
from megatron01.utils.files import write_atomically

SPEC = Path(__file__).with_suffix(".yaml")
KEPT = (
    *("iteration", "consumed_samples", "loss", "eval_loss", "lr", "sync_kind", "sync_interval", "compression_error"),
    *("comm_bytes_total", "comm_rounds_total", "bits_per_parameter"),
    *("tokens_per_second", "step_seconds", "training_seconds"),
)
"""Of a line of metrics."""
PACKAGES = ("torch", "numpy", "numba", "tokenizers", "transformers")
_DIGITS = 6


class Workshop:
    """Does the runs of a specification and keeps their records in a folder; starts none after ``minutes``."""

    def __init__(self, spec: Spec, folder: Path, minutes: float = math.inf) -> None:
        self.spec, self.folder = spec, folder
        self._end = time.monotonic() + 60 * minutes
        self.evidence = Evidence(spec)
        counts = folder / "counts.json"
        if counts.exists():
            self.evidence.counts = json.loads(counts.read_text())
        for kind in KINDS:
            for run in (Run(kind, *of) for of in product(spec.optimizers, self.evidence.rates(kind), spec.seeds)):
                if (path := run.folder(folder) / "record.json").exists():
                    self.evidence.records[run] = json.loads(path.read_text()) | of_run(run.folder(folder) / "run")

    def make(self) -> bool:
        """Do the missing runs; False if the time limit was reached before the end."""
        self._prepare()
        for kind in KINDS:
            for run, is_chosen in self.evidence.runs(kind):
                if time.monotonic() > self._end:
                    return False
                self._train(run)
                if is_chosen:
                    self._evaluate(run)
        return True

    def _prepare(self) -> None:
        """Prepare the texts, if they are missing.

        Raises UserError if a command fails, or if runs in the folder used texts prepared by other commands.
        """
        if self.spec.prepare is None:
            return
        done = self.folder / "prepared.sh"
        if done.exists():
            if done.read_text(encoding="utf-8") != self.spec.prepare:
                raise UserError(f"the texts of {self.folder} were made by other commands ({done}); use another folder")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        say("texts and vocabularies")
        call(["bash", "-euxo", "pipefail", "-c", self.spec.prepare], self.folder / "prepare.txt")
        write_atomically(done, self.spec.prepare)

    def _train(self, run: Run) -> None:
        folder, section = run.folder(self.folder), getattr(self.spec, run.kind)
        if run in self.evidence.records:
            return
        folder.mkdir(parents=True, exist_ok=True)
        launcher = torchrun(self.spec.replicas)
        common = [*shlex.split(section["flags"]), "--lr", f"{run.rate:g}", "--seed", str(run.seed)]
        if run.kind == "digits":
            script = [str(ROOT / "examples" / "digits_resnet18.py")]
            command = [*launcher, *script, *common, "--optimizer", section["optimizers"][run.optimizer]]
        else:
            command = [*launcher, "-m", "megatron01", "pretrain", run.kind, *common]
            command += [*shlex.split(self.spec.optimizers[run.optimizer]), "--save", str(folder / "checkpoints")]
            command += ["--load", "auto", "--run-dir", str(folder / "run")]
            if section.get("begin_at_neighbours"):
                command += ["--pretrained-checkpoint", str(self._start(run.seed))]
        say(f"{run}: training")
        output = call(command, folder / "output.txt", may_diverge=True)
        found = of_digits(output) if run.kind == "digits" else of_pretraining(folder / "run" / "metrics.jsonl")
        shown = shlex.join(["python", *command[1:]]).replace(f"{ROOT}/", "")  # as called from a clone
        self._write(run, found | {"command": shown})
        say(f"{run}: " + ("diverged" if found["score"] is None else f"ended at {found['score']:.4f}"))

    def _start(self, seed: int) -> Path:
        """Checkpoint of an untrained BERT initialized by ``attend_to_neighbours``: the same for every optimizer."""
        assert self.spec.bert is not None
        folder = self.folder / "bert-start" / str(seed)
        if not folder.exists():
            show = [sys.executable, "-m", "megatron01", "pretrain", "bert", *shlex.split(self.spec.bert["flags"])]
            new = folder.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            shown = call([*show, "--print-config"], folder.with_suffix(".txt"))
            config = config_from_yaml(shown, BertPretrainConfig, source="bert.flags")
            size, has_pairs = build_tokenizer(config.data).vocab_size, config.data.objective != "none"
            model = Bert(config.model, size, binary_head=has_pairs, seed=seed)
            attend_to_neighbours(model)
            weights = {name: weight.detach() for name, weight in model.named_parameters()}
            files = TokenizerFiles.of(config.data)
            begun = PortableModel(
                source="a new BERT", config=config.model, vocab_size=size, weights=weights, tokenizer=files
            )
            write_checkpoint(begun, new, final=folder)
            new.rename(folder)
        return folder

    def _write(self, run: Run, found: Record) -> None:
        made = {"revision": revision(), "machine": machine(), "date": time.strftime("%Y-%m-%d")}
        path = run.folder(self.folder) / "record.json"
        known = json.loads(path.read_text()) if path.exists() else made
        write_atomically(path, json.dumps(known | found, indent=1) + "\n")
        self.evidence.records[run] = known | found | of_run(run.folder(self.folder) / "run")

    def _evaluate(self, run: Run) -> None:
        """Evaluate the model on downstream tasks, unless that is done or the run diverged."""
        record = self.evidence.records[run]
        if record["score"] is None:
            return
        if run.kind == "bert" and self.spec.glue is not None:
            if "glue" not in record:
                say(f"{run}: fine-tuning")
                self._write(run, {"glue": self._fine_tune(run)})
            self._count(list(self.evidence.records[run]["glue"]), run)
        if run.kind == "gpt" and "texts" not in record:
            say(f"{run}: predicting texts")
            self._write(run, self._predict(run))

    def _fine_tune(self, run: Run) -> dict[str, dict[str, list[float]]]:
        assert self.spec.glue is not None
        section, most = self.spec.glue, self.spec.glue.get("train_rows")
        given, tasks = with_dev_sets(Path(section["input"]), section["tasks"], self.folder / "glue", most)
        folder = run.folder(self.folder)
        command = [sys.executable, "-m", "megatron01", "glue", "--load", str(folder / "checkpoints")]
        command += ["--input", str(given), "--output", str(folder / "glue"), "--tasks", *tasks]
        call([*command, *shlex.split(section["flags"])], folder / "glue.txt")
        return of_glue(folder / "glue" / "runs")

    def _count(self, tasks: list[TaskName], run: Run) -> None:
        """Score the word-count baseline, if that is missing; ``run`` provides the tokenizer."""
        if set(tasks) <= set(self.evidence.counts):
            return
        load, texts = str(run.folder(self.folder) / "checkpoints"), str(self.folder / "glue")
        # the text is read whole
        config = GlueConfig(load=load, input=texts, output=Path("unused"), tasks=tuple(tasks), max_length=8)
        bench = GlueBench(config, torch.device("cpu"))
        self.evidence.counts |= {task: score_of_counts(bench.data(task), TASKS[task]) for task in tasks}
        write_atomically(self.folder / "counts.json", json.dumps(self.evidence.counts))

    def _predict(self, run: Run) -> Record:
        assert self.spec.gpt is not None
        folder = run.folder(self.folder)
        bits = {}
        for name, text in (self.spec.gpt.get("texts") or {}).items():
            command = [sys.executable, "-m", "megatron01", "perplexity", "--load", str(folder / "checkpoints")]
            bits[name] = json.loads(call([*command, "--input", text, "--json"], folder / "texts.txt"))["bits_per_byte"]
        found: Record = {"texts": bits}
        if self.spec.gpt.get("lambada") is not None:
            loaded = load_model(str(folder / "checkpoints"), device="cpu")
            texts = read_documents(self.spec.gpt["lambada"])
            found["lambada"] = last_word_accuracy(loaded.gpt2(), loaded.tokenizer, texts)
        return found


def say(what: str) -> None:
    """Print a line with the time of day: a specification may take hours."""
    print(time.strftime("%H:%M:%S"), what, file=sys.stderr, flush=True)


def call(command: list[str], output: Path, *, may_diverge: bool = False) -> str:
    """Run a command and return its output, which is also written to a file.

    Raises UserError if it failed, with its last line; unless it may diverge, and says that it did.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # for megatron01
    environment = os.environ | {"PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    output.write_text(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode != 0 and not (may_diverge and "diverged" in done.stderr):
        said = [line for line in done.stderr.splitlines() if "error: " in line] or done.stderr.splitlines()[-1:]
        raise UserError(f"a command failed with status {done.returncode} ({' '.join(said[:1])}); see {output}")
    return done.stdout


def of_run(folder: Path) -> Record:
    """Record of a run folder: settings, environment, and one line of metrics per evaluation."""
    if not (folder / "metrics.jsonl").exists():
        return {}
    lines: list[Record] = []
    waiting: list[Record] = []
    for line in read_metrics(folder / "metrics.jsonl")[0]:
        waiting.append(line)
        if line.get("eval_loss") is not None:
            means = {key: [one[key] for one in waiting if one.get(key)] for key in ("loss", "step_seconds")}
            line |= {key: mean(values) for key, values in means.items() if values}
            lines.append({key: short(value) for key, value in line.items() if key in KEPT})
            waiting = []
    run = read_run(folder)
    known = {key: run.environment[key] for key in ("world_size", "hardware", "python") if key in run.environment}
    packages = run.environment.get("packages", {})
    known["packages"] = {name: packages[name] for name in PACKAGES if name in packages}
    return {"metrics": lines, "settings": dict(run.settings), "environment": known}


def short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value


def of_pretraining(metrics: Path) -> Record:
    """Record from metrics.jsonl: ``score`` is the held-out loss at the end, None if the run diverged."""
    lines, _ = read_metrics(metrics)
    losses = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None]
    last = lines[-1]
    has_ended = bool(losses) and last.get("eval_loss") is not None and math.isfinite(losses[-1])
    return {
        "score": losses[-1] if has_ended else None,
        "steps": last["iteration"],
        "bytes": last["comm_bytes_total"],
        "rounds": last["comm_rounds_total"],
        "bits": last["bits_per_parameter"],
        "seconds": last["training_seconds"],
    }


def of_digits(output: str) -> Record:
    """Record from the example's output: ``score`` is the classification error rate."""
    result = json.loads(output.splitlines()[-1])
    return {
        "score": 1 - result["accuracy"],
        "bytes": 1e6 * result["megabytes_sent"],
        "bits": result["bits_per_parameter_and_step"],
    }


def of_glue(runs: Path) -> dict[str, dict[str, list[float]]]:
    """Task -> first metric, in per cent, of each fine-tuning seed at the setting with the best median."""
    entries = [json.loads(path.read_text()) for path in sorted(runs.glob("*/*.json"))]
    results = [Result(**entry | {"run": FineTuning(**entry["run"])}) for entry in entries]
    columns = {task: TASKS[task].columns for task in {result.run.task for result in results}}
    return {
        task: {
            f"batch {best.batch_size}, lr {best.learning_rate:g}": [
                100 * value for value in best.values(columns[task][0].metric)
            ]
        }
        for task, best in sorted(best_settings(settings_of(results), columns).items())
    }


@torch.inference_mode()
def last_word_accuracy(model: GPT2, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Share of texts, in per cent, whose last word is the most probable continuation, token by token (LAMBADA)."""
    positions, right = model.config.max_position_embeddings, 0
    for text in texts:
        context, _, word = text.rstrip().rpartition(" ")
        tokens, wanted = tokenizer.encode(context), tokenizer.encode(" " + word)
        seen = torch.tensor([[*tokens, *wanted][-positions - 1 :]])  # (1, s)
        logits = model(seen[:, :-1])  # (1, s - 1, v)
        found = logits[0, -len(wanted) :, : model.vocab_size].argmax(-1)
        right += found.tolist() == wanted
    return 100 * right / max(1, len(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the runs; the same one goes on")
    parser.add_argument("--spec", type=Path, default=SPEC)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further run after so many")
    parser.add_argument("--table", action="store_true", help="run nothing; write the table of what is there")
    arguments = parser.parse_args()
    if arguments.folder.exists() and not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder} is not a folder")
    workshop = Workshop(Spec.read(arguments.spec), arguments.folder, arguments.minutes)
    is_complete = arguments.table or workshop.make()
    text = table(workshop.evidence)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    workshop.evidence.write(arguments.folder / "records.jsonl")
    (arguments.folder / "table.md").write_text(text, encoding="utf-8")
    print(text if is_complete else f"{text}\nThe time is over; call this again to go on.")


if __name__ == "__main__":
    run_program(main)
