"""The Markdown page of a run of ``python -m benchmarks.gpu``."""

from __future__ import annotations

from typing import Any

from megatron01.utils.formatting import markdown

from .parts import MODELS

Findings = dict[str, Any]


def page(result: dict[str, Any]) -> str:
    """Markdown of the findings of all parts so far."""
    parts: dict[str, dict[str, Any]] = result["parts"]
    environment = parts.get("environment", {}).get("findings", {})
    hardware, versions = environment.get("hardware", {}), environment.get("versions", {})
    lines = ["# One GPU\n"]
    if result["tiny"]:
        lines.append("**Tiny sizes: what works, and no figures to go by.**\n")
    lines += [
        f"{hardware.get('gpu', 'GPU not known')}, {hardware.get('cores', '?')} cores; driver"
        f" {hardware.get('driver_version', 'none')}, CUDA {versions.get('cuda')}, torch {versions.get('torch')}, Triton"
        f" {versions.get('triton')}, transformers {versions.get('transformers')}, Python {versions.get('python')};"
        f" commit {result['commit']}, {result['date']}.\n",
        f"`{' '.join(result['command'])}`\n",
        "## Parts\n",
        markdown(
            [
                ["part", "status", "s", "commit"],
                *(
                    [name, record["status"], f"{record['seconds']:.0f}", record.get("commit", "")]
                    for name, record in parts.items()
                ),
            ]
        ),
    ]
    for name, section in (
        ("environment", _environment),
        ("specification", _specification),
        ("rates", _rates),
        ("step", _step),
        ("exchange", _exchange),
        ("collectives", _agreements),
        ("runs", _agreements),
    ):
        if findings := parts.get(name, {}).get("findings"):
            lines += [f"## {_TITLES[name]}\n", section(findings), _failures(findings)]
    lines.append(_models(parts))
    for name, record in parts.items():
        if record.get("output"):
            lines.append(f"## Output of {name}\n\n```\n{record['output'].strip()[-1500:]}\n```\n")
    return "\n".join(line for line in lines if line)


_TITLES = {
    "environment": "Machine",
    "specification": "Kernels beside the specification",
    "rates": "Rates of the kernels",
    "step": "A training step: one rank of 8 virtual ones, GPT-2",
    "exchange": "Optimizer and exchange of one rank of many, without passes and network",
    "collectives": "Several ranks on one GPU",
    "runs": "Runs",
}


def _environment(findings: Findings) -> str:
    rows = [
        [f"{group}: {name}", str(value)]
        for group, values in findings.items()
        if isinstance(values, dict) and group != "versions"
        for name, value in values.items()
    ]
    return markdown([["", "value"], *rows])


def _specification(findings: Findings) -> str:
    rows = []
    for name, found in findings.items():
        if "failed" in found:
            continue
        details = {key: value for key, value in found.items() if key != "agrees"}
        rows.append([name, "yes" if found["agrees"] else "**NO**", "" if found["agrees"] else str(details)])
    return markdown([["case", "agrees", "differences"], *rows])


def _rates(findings: Findings) -> str:
    rows = [
        [name, _gb(found["bytes_per_second"]), _share(found.get("share_of_copy")), _ms(found.get("host_seconds"))]
        for name, found in findings.items()
        if "failed" not in found
    ]
    return markdown([["kernel", "GB/s", "of a copy", "host, ms"], *rows])


_ONLY_IN_JSON = ("runtime", "longest kernels, us")


def _step(findings: Findings) -> str:
    rows, counts = [], []
    for name, found in findings.items():
        kind = name.partition(", ")[2]
        if name.startswith("step, "):
            seconds = found["seconds"]
            times = (*seconds.values(), found["step_seconds"], found["host_seconds"])
            rows.append([kind, *map(_ms, times), f"{found['arithmetic_planned_over_measured']:.2f}"])
            phases = [phase.replace("_", " + ") for phase in seconds]
        elif "failed" not in found:
            shown = {key: value for key, value in found.items() if key not in ("kind", *_ONLY_IN_JSON)}
            counts.append([name, ", ".join(f"{key} {value}" for key, value in shown.items())])
    if not rows:
        return ""
    header = ["step, ms", *phases, "step", "host", "arithmetic, planned / measured"]
    return markdown([header, *rows]) + "\n" + markdown([["calls of the host", ""], *counts])


def _exchange(findings: Findings) -> str:
    rows = []
    for name, found in findings.items():
        for kind in ("full", "one_bit", "local"):
            if kind in found:
                of = found[kind]
                counts = of["counts"]
                cells = [_ms(of["seconds"]), _ms(of["host_seconds"]), _ms(of.get("waiting_seconds"))]
                cells += [str(counts[key]) for key in ("operations", "kernels", "collectives", "host_reads")]
                rows.append([name, kind, *cells, str(found["buckets"][kind])])
    times = ["GPU, ms", "host, ms", "of it waiting, ms"]
    return markdown([["ranks", "step", *times, "operations", "kernels", "collectives", "host reads", "buckets"], *rows])


def _agreements(findings: Findings) -> str:
    rows = []
    for name, found in findings.items():
        if not isinstance(found, dict):
            rows.append([name, str(found), ""])
        elif "failed" not in found:
            details = ", ".join(f"{key} {value}" for key, value in found.items() if key not in ("agrees", "losses"))
            good = found.get("agrees", all(one.get("agrees", True) for one in found.values() if isinstance(one, dict)))
            rows.append([name, "yes" if good else "**NO**", details])
    return markdown([["case", "as it should be", ""], *rows])


def _models(parts: dict[str, dict[str, Any]]) -> str:
    rows, missing = [], []
    for compiled in ("", ", compiled"):
        for model, size in MODELS:
            name = f"{model} {size}{compiled}"
            if name not in parts:
                continue
            findings = parts[name]["findings"]
            for who in ("ours", "hugging face", "ours, twice the batch"):
                found = findings.get(who)
                if found is None and who not in ("ours", "hugging face"):
                    continue
                if found is None or "failed" in found:
                    missing.append(f"{name}, {who}: {parts[name]['status'] if found is None else found['failed']}")
                    continue
                planned = found.get("planned_memory")
                peak = found["peak_memory"]
                is_known = planned is not None and not isinstance(peak, str)
                cells = [
                    f"{found['shape'][0]} x {found['shape'][1]}",
                    f"{found['tokens_per_second']:,.0f}",
                    _share(found["mfu"]),
                    _gb(peak),
                    "" if planned is None else _gb(planned),
                    f"{planned / peak:.2f}" if is_known else "",
                    f"{found['warm_up_seconds']:.0f}",
                ]
                rows.append([name, who, *cells])
    if not rows and not missing:
        return ""
    header = [
        "model",
        "loop",
        "batch",
        "tokens/s",
        "MFU",
        "peak, GB",
        "planned, GB",
        "planned / measured",
        "warm-up, s",
    ]
    text = "## Whole models\n\n" + markdown([header, *rows]) + "\n"
    text += (
        "Ours: bf16 weights with fp32 masters, one replica, local and synchronizing steps in turn. Hugging Face: fp32"
        " weights with autocast to bf16, SDPA, fused AdamW, clipping. `plan` takes an MFU of 40 % where it is told"
        " nothing.\n"
    )
    return text + "".join(f"\n* {line}" for line in missing) + ("\n" if missing else "")


def _failures(findings: Findings) -> str:
    failed = [
        f"* {name}: {found['failed']}"
        for name, found in findings.items()
        if isinstance(found, dict) and "failed" in found
    ]
    return "\n".join(failed) + "\n" if failed else ""


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def _gb(size: float | str) -> str:
    return size if isinstance(size, str) else f"{size / 1e9:.4g}"


def _share(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.1%}"
