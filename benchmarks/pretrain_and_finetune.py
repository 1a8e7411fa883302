"""The same model for fewer bytes? Pretraining with several optimizers, and what the models can do afterwards.

    python benchmarks/pretrain_and_finetune.py --folder runs/evidence
    python benchmarks/pretrain_and_finetune.py --folder runs/evidence --spec my.yaml --minutes 60
    python benchmarks/pretrain_and_finetune.py --folder runs/evidence --table        # of what is there

One YAML file says everything. A BERT is pretrained with each optimizer and fine-tuned on GLUE, a GPT-2 predicts text
and last words, and a ResNet-18 learns digits. Each run is a command of a user's, which stands in its record; stopped at
any time and called again, the script goes on where it was. Learning rates are tuned alike: all with the first seed,
then each optimizer's best and the baseline's best with the others.

    FOLDER/bert/zero_one_adam-0.001-0/    checkpoints, metrics, glue/ (a sweep of ``megatron01 glue``), record.json
    FOLDER/table.md                       the comparison, made of the records alone
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
import yaml
from convergence import machine, revision
from convergence_run import ROOT, attend_to_neighbours
from convergence_table import markdown
from finetuning import score_of_counts
from scipy import stats

from megatron01.config import BertPretrainConfig
from megatron01.config.yaml_files import config_from_yaml
from megatron01.convert.formats import load_model
from megatron01.convert.native import write_checkpoint
from megatron01.convert.portable import PortableModel, TokenizerFiles
from megatron01.data.tokenizers import Tokenizer, build_tokenizer
from megatron01.errors import UserError
from megatron01.evaluate.perplexity import read_documents
from megatron01.finetune.config import GlueConfig
from megatron01.finetune.glue import TASKS, GlueBench
from megatron01.finetune.report import best_settings, settings_of
from megatron01.finetune.sweep import Result
from megatron01.finetune.sweep import Run as FineTuning
from megatron01.models import Bert
from megatron01.models.gpt2 import GPT2

SPEC = Path(__file__).with_suffix(".yaml")
SECTIONS = {
    "replicas": int, "seeds": list, "optimizers": dict, "bert": dict, "glue": dict, "gpt": dict, "digits": dict,
}  # fmt: skip
NEEDED = {
    "bert": {"flags", "rates"}, "glue": {"input", "tasks", "flags"}, "gpt": {"flags", "rates"},
    "digits": {"flags", "rates", "optimizers"},
}  # fmt: skip
LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
DEV_SHARE = 0.25
"""Of the training set, what a task is evaluated on whose development set is not there."""


@dataclass(frozen=True)
class Spec:
    """What is trained and compared; the fields are the sections of the file."""

    replicas: int
    seeds: list[int]
    optimizers: dict[str, str]
    bert: dict[str, Any] | None = None
    glue: dict[str, Any] | None = None
    gpt: dict[str, Any] | None = None
    digits: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Raises UserError, naming the section, if the file is none of these."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path} holds no sections; expected {', '.join(SECTIONS)}")
        for name, value in values.items():
            if not isinstance(value, SECTIONS.get(name, ())) or value in ([], {}):
                raise UserError(f"{path}: {name} is {str(value)[:80]!r}; expected sections {', '.join(SECTIONS)}")
        if missing := {"replicas", "seeds", "optimizers"} - set(values):
            raise UserError(f"{path} lacks {', '.join(sorted(missing))}")
        for name in NEEDED.keys() & values.keys():
            if missing := NEEDED[name] - set(values[name]):
                raise UserError(f"{path}: section {name} lacks {', '.join(sorted(missing))}")
        if missing := set(values.get("glue", {}).get("tasks", ())) - TASKS.keys():
            raise UserError(f"{path}: glue has no task {', '.join(sorted(missing))}; expected {', '.join(TASKS)}")
        if "digits" in values and (missing := values["optimizers"].keys() - values["digits"]["optimizers"].keys()):
            raise UserError(f"{path}: digits.optimizers lacks {', '.join(sorted(missing))}")
        return cls(**values)


@dataclass(frozen=True)
class Run:
    """One training."""

    kind: str
    optimizer: str
    rate: float
    seed: int

    def folder(self, root: Path) -> Path:
        name = re.sub(r"\W+", "_", self.optimizer).strip("_").lower()
        return root / self.kind / f"{name}-{self.rate:g}-{self.seed}"


class Evidence:
    """The runs of a specification, in a folder that remembers them.

    Args:
        minutes: after which no further run is begun.
    """

    def __init__(self, spec: Spec, folder: Path, minutes: float = math.inf) -> None:
        self.spec, self.folder = spec, folder
        self._end = time.monotonic() + 60 * minutes

    @property
    def baseline(self) -> str:
        return next(iter(self.spec.optimizers))

    def make(self) -> bool:
        """Do what is not there yet; False if the time was over first."""
        for kind in ("bert", "gpt", "digits"):
            if getattr(self.spec, kind) is not None:
                for run, is_chosen in self._runs(kind):
                    if time.monotonic() > self._end:
                        return False
                    self._train(run)
                    if is_chosen:
                        self._evaluate(run)
        return True

    def record(self, run: Run) -> dict[str, Any] | None:
        """What is known of a run; None if it was not made."""
        path = run.folder(self.folder) / "record.json"
        return json.loads(path.read_text()) if path.exists() else None

    def best_rate(self, kind: str, optimizer: str) -> float | None:
        """The rate with the lowest loss (of ResNet, the highest accuracy) with the first seed; None without runs."""
        rates = getattr(self.spec, kind)["rates"]
        records = {rate: self.record(Run(kind, optimizer, rate, self.spec.seeds[0])) for rate in rates}
        scores = {rate: record["score"] for rate, record in records.items() if record and record["score"] is not None}
        return min(scores, key=lambda rate: scores[rate]) if scores else None

    def chosen(self, kind: str, optimizer: str) -> list[float]:
        """The rates that all seeds are run with: the optimizer's own best and the baseline's."""
        rates = (self.best_rate(kind, optimizer), self.best_rate(kind, self.baseline))
        return sorted({rate for rate in rates if rate is not None})

    def _runs(self, kind: str) -> Iterator[tuple[Run, bool]]:
        """Each run, and whether it is of a rate that was chosen."""
        for optimizer in self.spec.optimizers:
            for rate in getattr(self.spec, kind)["rates"]:
                yield Run(kind, optimizer, rate, self.spec.seeds[0]), False
        for seed in self.spec.seeds:
            for optimizer in self.spec.optimizers:
                for rate in self.chosen(kind, optimizer):
                    yield Run(kind, optimizer, rate, seed), True

    def _train(self, run: Run) -> None:
        folder, section = run.folder(self.folder), getattr(self.spec, run.kind)
        if self.record(run) is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(self.spec.replicas)]
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
        output = call(command, folder / "output.txt")
        found = of_digits(output) if run.kind == "digits" else of_pretraining(folder / "run" / "metrics.jsonl")
        self._write(run, found | {"command": shlex.join(command)})

    def _start(self, seed: int) -> Path:
        """A BERT that has not learned, whose heads begin at a token's neighbours: the same for every optimizer."""
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

    def _write(self, run: Run, record: Mapping[str, Any]) -> None:
        made = {"revision": revision(), "machine": machine(), "date": time.strftime("%Y-%m-%d")}
        path = run.folder(self.folder) / "record.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(made | dict(record), indent=1) + "\n")
        new.replace(path)

    def _evaluate(self, run: Run) -> None:
        """What the model can do, unless that is known, or it diverged."""
        record = self.record(run)
        if record is None or record["score"] is None:
            return
        if run.kind == "bert" and self.spec.glue is not None and "glue" not in record:
            self._write(run, record | {"glue": self._fine_tune(run)})
        if run.kind == "gpt" and "texts" not in record:
            self._write(run, record | self._predict(run))

    def _fine_tune(self, run: Run) -> dict[str, dict[str, list[float]]]:
        assert self.spec.glue is not None
        section, most = self.spec.glue, self.spec.glue.get("train_rows")
        given, tasks = with_dev_sets(Path(section["input"]), section["tasks"], self.folder / "glue", most)
        folder = run.folder(self.folder)
        command = [sys.executable, "-m", "megatron01", "glue", "--load", str(folder / "checkpoints")]
        command += ["--input", str(given), "--output", str(folder / "glue"), "--tasks", *tasks]
        call([*command, *shlex.split(section["flags"])], folder / "glue.txt")
        return of_glue(folder / "glue" / "runs")

    def _predict(self, run: Run) -> dict[str, Any]:
        assert self.spec.gpt is not None
        folder = run.folder(self.folder)
        bits = {}
        for name, text in (self.spec.gpt.get("texts") or {}).items():
            command = [sys.executable, "-m", "megatron01", "perplexity", "--load", str(folder / "checkpoints")]
            bits[name] = json.loads(call([*command, "--input", text, "--json"], folder / "texts.txt"))["bits_per_byte"]
        found: dict[str, Any] = {"texts": bits}
        if self.spec.gpt.get("lambada") is not None:
            loaded = load_model(str(folder / "checkpoints"), device="cpu")
            found["lambada"] = last_word_accuracy(
                loaded.gpt2(), loaded.tokenizer, read_documents(self.spec.gpt["lambada"])
            )
        return found


def call(command: list[str], output: Path) -> str:
    """What a command printed, which is also kept in a file.

    Raises:
        UserError: if it failed, with its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output.write_text(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode != 0 and "diverged" not in done.stderr:
        said = [line for line in done.stderr.splitlines() if "error: " in line] or done.stderr.splitlines()[-1:]
        raise UserError(f"a command failed with status {done.returncode} ({' '.join(said[:1])}); see {output}")
    return done.stdout


def of_pretraining(metrics: Path) -> dict[str, Any]:
    """From metrics.jsonl: ``score`` is the held-out loss at the end, None of a run that diverged."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
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


def of_digits(output: str) -> dict[str, Any]:
    """From what the example prints: ``score`` is the share of images that are put into a wrong class."""
    result = json.loads(output.splitlines()[-1])
    return {
        "score": 1 - result["accuracy"],
        "bytes": 1e6 * result["megabytes_sent"],
        "bits": result["bits_per_parameter_and_step"],
    }


def of_glue(runs: Path) -> dict[str, dict[str, list[float]]]:
    """Task -> the first metric of each of its fine-tuning seeds, in per cent, at the best setting by median."""
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


def with_dev_sets(given: Path, names: list[str], folder: Path, most: int | None = None) -> tuple[Path, list[str]]:
    """A folder of those tasks that are there, and their names.

    Of one without a development set, the last quarter of its training set is kept for evaluation.

    Args:
        most: rows of a training set that are taken, the first ones; None: all.
    """
    there = {path.name.lower(): path for path in given.iterdir() if path.is_dir()} if given.is_dir() else {}
    tasks = []
    for name in names:
        source = there.get(name.lower())
        if source is None:
            continue
        tasks.append(name)
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        train = next(iter(sorted(source.glob("train*.tsv"))), None)
        if train is None:
            raise UserError(f"{source} holds no train.tsv")
        head, *rows = train.read_text(encoding="utf-8").rstrip("\n").split("\n")
        splits = TASKS[name].dev
        if (source / f"{splits[0].names[0]}.tsv").exists():
            for path in source.glob("*.tsv"):
                (target / path.name).write_bytes(path.read_bytes())
            (target / train.name).write_text("\n".join([head, *rows[:most], ""]), encoding="utf-8")
            continue
        rows = rows[:most]
        first = round(len(rows) * (1 - DEV_SHARE))
        (target / "train.tsv").write_text("\n".join([head, *rows[:first], ""]), encoding="utf-8")
        for number, split in enumerate(splits):
            part = rows[first + number :: len(splits)]
            (target / f"{split.names[0]}.tsv").write_text("\n".join([head, *part, ""]), encoding="utf-8")
    if not tasks:
        raise UserError(f"{given} holds none of the tasks {', '.join(names)}; expected a folder for each")
    return folder, tasks


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


def table(evidence: Evidence) -> str:
    """The comparison as Markdown, made of what is there, and what is missing."""
    parts, missing = [], []
    for kind, title in (("bert", "BERT"), ("gpt", "GPT-2"), ("digits", "ResNet-18 on digits")):
        if getattr(evidence.spec, kind) is None:
            continue
        records = _records(evidence, kind)
        missing += [f"{kind} {name}: nothing" for name in evidence.spec.optimizers if name not in records]
        if records:
            parts += [f"## {title}\n", _of_training(evidence, kind, records), *_of_use(evidence, kind, records)]
    every = [record for kind in ("bert", "gpt", "digits") for record in _all(evidence, kind)]
    diverged = sum(record["score"] is None for record in every)
    made = [", ".join(sorted({record[key] for record in every})) for key in ("revision", "machine", "date")]
    notes = [f"Runs: {len(every)}, of which {diverged} diverged. " + "; ".join(made) + "."]
    if len({record["revision"] for record in every}) > 1:
        notes.append("**These runs are of different commits.**")
    return "\n".join([*parts, *notes, *(f"Missing: {name}." for name in missing)]) + "\n"


ByRate = dict[float, dict[int, dict[str, Any]]]


def _all(evidence: Evidence, kind: str) -> list[dict[str, Any]]:
    paths = sorted((evidence.folder / kind).glob("*/record.json"))
    return [json.loads(path.read_text()) for path in paths]


def _records(evidence: Evidence, kind: str) -> dict[str, ByRate]:
    """Optimizer -> rate -> seed -> record, of the rates that all seeds are run with."""
    found: dict[str, ByRate] = {}
    for optimizer in evidence.spec.optimizers:
        for rate in evidence.chosen(kind, optimizer):
            for seed in evidence.spec.seeds:
                record = evidence.record(Run(kind, optimizer, rate, seed))
                if record is not None and record["score"] is not None:
                    found.setdefault(optimizer, {}).setdefault(rate, {})[seed] = record
    return found


def _of_training(evidence: Evidence, kind: str, records: dict[str, ByRate]) -> str:
    best = evidence.best_rate(kind, evidence.baseline)
    baseline = records.get(evidence.baseline, {}).get(best or 0.0, {})
    score = "wrong, %" if kind == "digits" else "held-out loss"
    factor, digits = (100, 2) if kind == "digits" else (1, 4)
    head = ["optimizer", "rate", "seeds", score, f"gap to {evidence.baseline}'s best rate", "MB sent", "bits", "rounds"]
    rows = []
    for optimizer, by_rate in records.items():
        for rate, by_seed in sorted(by_rate.items()):
            values = [factor * record["score"] for record in by_seed.values()]
            one = next(iter(by_seed.values()))
            gap = [factor * (by_seed[seed]["score"] - baseline[seed]["score"]) for seed in by_seed if seed in baseline]
            own = " (its best)" if rate == evidence.best_rate(kind, optimizer) else ""
            cells = [optimizer, f"{rate:g}{own}", str(len(values)), spread(values, digits)]
            cells += ["" if by_seed is baseline else difference(gap, digits), f"{one['bytes'] / 1e6:.3g}"]
            rows.append([*cells, f"{one['bits']:.3g}" if "bits" in one else "", str(one.get("rounds", ""))])
            if "seconds" in one:
                sent = {name: one["seconds"] + 8 * one["bytes"] / link for name, link in LINKS.items()}
                rows[-1] += [f"{one['seconds']:.0f}", *(f"{seconds:.0f}" for seconds in sent.values())]
    if kind != "digits":
        head += ["s here", *(f"s with {name}" for name in LINKS)]
    return markdown(head, rows)


def _of_use(evidence: Evidence, kind: str, records: dict[str, ByRate]) -> list[str]:
    """What the models can do, at each optimizer's own best rate."""
    of_best = {name: by_rate.get(evidence.best_rate(kind, name) or 0.0, {}) for name, by_rate in records.items()}
    columns = {name: _uses(by_seed) for name, by_seed in of_best.items()}
    uses = list(dict.fromkeys(use for values in columns.values() for use in values))
    if not uses:
        return []
    counts = _of_counts(evidence, uses) if kind == "bert" else {}
    rows, told_apart = [], []
    for use in uses:
        cells = [use] + ([f"{counts[use]:.1f}" if use in counts else ""] if counts else [])
        for name in columns:
            values, theirs = columns[name].get(use, {}), columns.get(evidence.baseline, {}).get(use, {})
            cells.append(spread(list(values.values()), 2) if values else "")
            pairs = [(values[seed], theirs[seed]) for seed in values if seed in theirs]
            if len(pairs) > 1 and any(one != other for one, other in pairs):
                p = float(stats.ttest_rel(*zip(*pairs, strict=True)).pvalue)
                if p < 0.05:
                    told_apart.append(f"{name} from {evidence.baseline} on {use} (p = {p:.2g})")
        rows.append(cells)
    if kind == "bert":
        rows.append(["**average**"] + ([f"{mean(counts.values()):.1f}" if counts else ""] if counts else []))
        for name in columns:
            complete = [mean(values.values()) for use in uses if (values := columns[name].get(use))]
            rows[-1].append(f"{mean(complete):.2f}" if len(complete) == len(uses) else "")
    head = ["task (per cent)" if kind == "bert" else "text", *(["counts of words"] if counts else []), *columns]
    verdict = "told apart by paired t-tests: " + "; ".join(told_apart) if told_apart else "paired tests tell none apart"
    return [markdown(head, rows), f"Means over pretraining seeds, ± one standard deviation; {verdict}.\n"]


def _uses(by_seed: Mapping[int, dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Task or text -> pretraining seed -> value: of GLUE the median over fine-tuning seeds."""
    found: dict[str, dict[int, float]] = {}
    for seed, record in by_seed.items():
        values = {task: median(next(iter(of.values()))) for task, of in (record.get("glue") or {}).items()}
        values |= {f"{text}, bits per byte": bits for text, bits in (record.get("texts") or {}).items()}
        if "lambada" in record:
            values["LAMBADA, last word right (per cent)"] = record["lambada"]
        for use, value in values.items():
            found.setdefault(use, {})[seed] = value
    return found


def _of_counts(evidence: Evidence, tasks: list[str]) -> dict[str, float]:
    """Task -> what counts of words reach; remembered in the folder."""
    path = evidence.folder / "counts.json"
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    if set(tasks) - set(found):
        models = sorted((evidence.folder / "bert").glob("*/checkpoints"))
        given = {"load": str(models[0]), "input": str(evidence.folder / "glue"), "output": Path("unused")}
        config = GlueConfig(**given, tasks=tuple(tasks), max_length=8)  # the text is read whole
        bench = GlueBench(config, torch.device("cpu"))
        found |= {task: score_of_counts(bench.data(task), TASKS[task]) for task in tasks}
        path.write_text(json.dumps(found))
    return {task: found[task] for task in tasks}


def spread(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def difference(gaps: list[float], digits: int) -> str:
    """Mean of paired differences, with its standard error."""
    if not gaps:
        return ""
    error = f" (se {stdev(gaps) / math.sqrt(len(gaps)):.{digits}f})" if len(gaps) > 1 else ""
    return f"{mean(gaps):+.{digits}f}{error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the runs; the same one goes on")
    parser.add_argument("--spec", type=Path, default=SPEC)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further run after so many")
    parser.add_argument("--table", action="store_true", help="run nothing; write the table of what is there")
    arguments = parser.parse_args()
    try:
        evidence = Evidence(Spec.read(arguments.spec), arguments.folder, arguments.minutes)
        is_complete = arguments.table or evidence.make()
        text = table(evidence)
    except UserError as error:
        sys.exit(f"error: {error}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "table.md").write_text(text, encoding="utf-8")
    print(text if is_complete else f"{text}\nThe time is over; call this again to go on.")


if __name__ == "__main__":
    main()
