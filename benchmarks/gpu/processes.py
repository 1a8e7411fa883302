"""Multi-process checks on one GPU: NCCL with one rank, gloo with several, bit-exact resume, and a killed rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replica_pool import launch_environment, run_replicas
from reporting import ROOT, torchrun
from timing import device_seconds
from workload import Workload, new_optimizer, train_step

from megatron01.comm import TorchTransport
from megatron01.comm.topology import build_topology
from megatron01.config import DistributedConfig
from megatron01.parallel import initialize
from megatron01.training.step import LossModule
from tests.integration.tiny import make_corpus, stored_state

from .report import DEVICE, NEEDS_GPU, Report
from .training import on_device

_STEPS, _SAVED = 8, 4
_KILL_SECONDS = 60  # within which a rank must have noticed that another is gone


def collectives(report: Report) -> None:
    """Check the collectives of several ranks on one GPU."""
    report.attempt("nccl, one rank", _nccl, report)
    size = "tiny" if report.tiny else "debug"
    for title, ranks, local in (("gloo, two ranks", 2, 2), ("gloo, 2 x 2 ranks", 4, 2)):
        report.attempt(title, _over_gloo, size, ranks, local)


def _nccl(report: Report) -> Any:
    """The collectives of an exchange with a group of one rank: correctness and time of a call."""
    if DEVICE.type != "cuda":
        return NEEDS_GPU
    torch.cuda.set_device(DEVICE)
    with tempfile.TemporaryDirectory(prefix="nccl-") as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=DEVICE)
        sent = torch.randint(256, (1, 1 << 20), dtype=torch.uint8, device=DEVICE)
        found: dict[str, Any] = {}
        for name in ("all_to_all", "all_gather"):
            transport = TorchTransport()
            transport.size = 2  # so that it calls NCCL instead of copying
            received = torch.zeros_like(sent)

            def call(name: str = name, transport: TorchTransport = transport, received: Any = received) -> None:
                getattr(transport, name)(received, sent).wait()

            seconds, host = device_seconds(call, DEVICE, report.sizes.repetitions)
            found[name] = {"agrees": torch.equal(received, sent), "seconds": seconds, "host_seconds": host}
        dist.destroy_process_group()
    return found


def _over_gloo(size: str, ranks: int, local: int) -> dict[str, Any]:
    """Steps of all kinds; master weights must be bit-identical on all ranks."""
    replicas = run_replicas(_take_steps, ranks, size, local)
    return {
        "ranks": ranks,
        "device": replicas[0]["device"],
        "hierarchical": replicas[0]["hierarchical"],
        "kinds": replicas[0]["kinds"],
        "losses": replicas[0]["losses"],
        "seconds": max(replica["seconds"] for replica in replicas),
        "agrees": len({replica["fingerprint"] for replica in replicas}) == 1,
    }


def _take_steps(size: str, local: int) -> dict[str, Any]:
    settings = DistributedConfig(device=DEVICE.type, threads_per_replica=1)  # type: ignore[arg-type]
    workload = Workload(model="gpt2", size=size, precision="bf16", steps=2)
    with initialize(launch_environment(local), settings) as group:
        topology = build_topology(group, settings)
        with torch.device(group.device):
            model = workload.build_model()
        optimizer: Any = new_optimizer(model, workload.config(), topology)
        module = optimizer.attach(LossModule(model))
        kinds, losses = [], []
        start = time.perf_counter()
        for _ in workload.kinds():
            losses.append(float(train_step(optimizer, module, on_device(workload.batch()))))
            kinds.append(optimizer.last_step.kind)
        return {
            "device": group.device.type,
            "hierarchical": topology.local is not None,
            "kinds": kinds,
            "losses": losses,
            "seconds": time.perf_counter() - start,
            "fingerprint": optimizer.fingerprint(),
        }


def runs(report: Report) -> None:
    """Whole runs of ``pretrain_gpt.py``: resume, a failing start, and a lost rank."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name)
        make_corpus(folder)
        # several at a time, as starting a process takes longer than its steps
        with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 3)) as pool:
            found = {
                "two processes over nccl": pool.submit(_over_nccl, folder),
                "a rank killed": pool.submit(_killed, folder),
                "resume, one process": pool.submit(_resumed, folder, "one", 1, []),
                "resume, one process, deterministic": pool.submit(_resumed, folder, "same", 1, ["--deterministic"]),
                "resume, one process, fp16": pool.submit(_resumed, folder, "fp16", 1, ["--precision", "fp16"]),
                "resume, two processes": pool.submit(_resumed, folder, "two", 2, []),
                "resume, two processes, sharded optimizer": pool.submit(
                    _resumed, folder, "sharded", 2, ["--replica", "node", "--shard-optimizer"]
                ),
            }
            for title, future in found.items():
                report.attempt(title, future.result)


def _command(folder: Path, name: str, ranks: int, *flags: str) -> list[str]:
    shape = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2"]
    shape += ["--max-position-embeddings", "64", "--seq-length", "64", "--micro-batch-size", "2", "--num-workers", "0"]
    data = ["--data-path", str(folder / "gpt"), "--vocab-file", str(folder / "vocab.json")]
    data += ["--merge-file", str(folder / "merges.txt"), "--split", "80,10,10"]
    course = ["--train-iters", str(_STEPS), "--lr", "1e-3", "--eval-iters", "0", "--log-interval", "1"]
    course += ["--sync-policy", "doubling:2,2", "--max-sync-interval", "2", "--precision", "bf16"]
    course += ["--run-dir", str(folder / f"{name}-run")]
    where = ["--device", DEVICE.type, *([] if ranks == 1 else ["--distributed-backend", "gloo"])]
    where += ["--no-torch-compile"]  # compiling takes longer than all steps
    start = torchrun(ranks) if ranks > 1 else [sys.executable]
    program = [str(ROOT / "pretrain_gpt.py"), *shape, *data, *course]
    return [*start, *program, *where, *flags]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def _finished(command: Sequence[str]) -> None:
    done = _run(command)
    if done.returncode != 0:
        raise RuntimeError(_said(done.stderr))


def _said(output: str) -> str:
    """The error line of a program's output."""
    lines = [line for line in output.splitlines() if "error:" in line.lower()]
    return (lines or output.splitlines() or ["nothing"])[0][:500]


def _resumed(folder: Path, name: str, ranks: int, flags: list[str]) -> dict[str, Any]:
    """Compare the final state of a run with that of one resumed from its checkpoint."""
    whole, again = folder / f"{name}-whole", folder / f"{name}-again"
    saving = ["--save-interval", str(_SAVED)]
    _finished(_command(folder, f"{name}-whole", ranks, "--save", str(whole), *saving, *flags))
    load = ["--load", str(whole / f"iter_{_SAVED:07d}")]
    _finished(_command(folder, f"{name}-again", ranks, "--save", str(again), *saving, *load, *flags))
    states = [stored_state(path / f"iter_{_STEPS:07d}") for path in (whole, again)]
    one, other = states
    assert one.keys() == other.keys()
    differing = [key for key in one if not torch.equal(one[key].view(-1), other[key].view(-1))]
    return {"tensors": len(one), "differing": len(differing), "agrees": not differing, "first": differing[:3]}


def _over_nccl(folder: Path) -> dict[str, Any]:
    """Two processes on one GPU, or on none, cannot use NCCL: one error line must say so."""
    if DEVICE.type == "cuda" and torch.cuda.device_count() > 1:
        return {"failed": "more than one GPU is visible; set CUDA_VISIBLE_DEVICES=0"}
    command = [*_command(folder, "nccl", 2), "--distributed-backend", "nccl"]
    command[command.index("--device") + 1] = "auto"
    done = _run(command)
    said = [line for line in done.stderr.splitlines() if "has no GPU of its own" in line]
    return {"status": done.returncode, "said": said[:1], "agrees": len(said) == 1 and done.returncode != 0}


def _killed(folder: Path) -> dict[str, Any]:
    """One of two ranks is killed during training: the other must exit by itself, with one error line."""
    run_dir = folder / "killed-run"
    command = _command(folder, "killed", 2)
    command[command.index("--train-iters") + 1] = "1000000"
    # without torchrun, which would kill the other rank
    program = command[command.index(str(ROOT / "pretrain_gpt.py")) :]
    port = str(20000 + os.getpid() % 20000)
    processes = []
    for rank in range(2):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment = {**os.environ, **variables}
        output: Any = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(
            subprocess.Popen(
                [sys.executable, *program],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=output,
                text=True,
            )
        )
    try:
        metrics = run_dir / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
            if any(process.poll() is not None for process in processes):
                raise RuntimeError(f"a rank ended before the third step: {_said(processes[0].communicate()[1])}")
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGKILL)
        start = time.perf_counter()
        errors = processes[0].communicate(timeout=_KILL_SECONDS)[1]
        seconds = time.perf_counter() - start
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [line for line in errors.splitlines() if "lost" in line]
    traceback = "Traceback" in errors
    status = processes[0].returncode
    return {
        "status": status,
        "seconds": seconds,
        "said": said[:2],
        "agrees": status != 0 and len(said) == 1 and not traceback,
    }
