"""``megatron01 schedule`` and ``megatron01 plan``: what a run will send and how long it will take, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.command_line import parse
from megatron01.config.fields import Settings
from megatron01.config.yaml_files import load_plain_yaml
from megatron01.contrib.deepspeed import DeepSpeedSource
from megatron01.errors import UserError
from megatron01.plan.config import (
    BertForecastConfig,
    BertScheduleConfig,
    GPTForecastConfig,
    GPTScheduleConfig,
    PlanConfig,
)
from megatron01.plan.plot import check_plot


def schedule(argv: Sequence[str], prog: str) -> None:
    """Print, write and draw the plan of the run that a command line describes.

    Raises:
        UserError: for a mistake in the settings, or a file that cannot be written.
    """
    config_class: Any = BertScheduleConfig if describes_bert(argv) else GPTScheduleConfig
    description = "Show when a run synchronizes and what each step sends, without training."
    sources = [DeepSpeedSource(replicas=lambda flags: flags.get("plan.replicas", PlanConfig.replicas))]
    config = parse(config_class, argv, prog=prog, description=description, sources=sources)
    if config.plan.published:
        _check_published(argv, {"--published", "--replicas", "--json"})
    elif config.plan.plot is not None:
        check_plot(config.plan.plot)
    from megatron01.plan.show import show, show_published

    if config.plan.published:
        show_published(config.plan)
    else:
        show(config)


def plan(argv: Sequence[str], prog: str) -> None:
    """Print how long the run that a command line describes takes on a cluster, and which way to train is quickest.

    Raises:
        UserError: for a mistake in the settings.
    """
    config_class: Any = BertForecastConfig if describes_bert(argv) else GPTForecastConfig
    description = "How long a run takes on a cluster, with each optimizer; figures are those of a model, not measured."
    config = parse(config_class, argv, prog=prog, description=description)
    if config.forecast.published:
        _check_published(argv, {"--published", "--json"})
    if config.forecast.published:
        from megatron01.plan.forecast import forecast_published

        forecast_published(config.forecast)
    elif config.forecast.memory:
        from megatron01.plan.forecast import show_memory

        show_memory(config)
    else:
        from megatron01.plan.forecast import forecast

        forecast(config)


def _check_published(argv: Sequence[str], allowed: set[str]) -> None:
    flags = {argument.split("=")[0] for argument in argv if argument.startswith("--")}
    extra = sorted(flags - allowed)
    if extra:
        raise UserError(f"--published shows its own recipes; {extra[0]} does not go with it")


def describes_bert(argv: Sequence[str]) -> bool:
    """Whether files and flags are those of a BERT run: they choose its tokenizer, or set what only BERT has.

    Files that cannot be read count for nothing here; ``parse`` reports them.
    """
    only_bert = Settings(BertPretrainConfig).by_key.keys() - Settings(GPTPretrainConfig).by_key.keys()
    names = {key.split(".")[1].replace("_", "-") for key in only_bert}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--tokenizer-type", default="")
    try:
        given, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return False
    if given.tokenizer_type:
        return str(given.tokenizer_type).startswith("Bert")
    if any(argument.split("=")[0].removeprefix("--no-").removeprefix("--") in names for argument in rest):
        return True
    tokenizer = ""
    for path in given.config:
        keys = _keys(path)
        if only_bert & keys.keys():
            return True
        tokenizer = keys.get("data.tokenizer_type", tokenizer)
    return tokenizer.startswith("Bert")


def _keys(path: str) -> dict[str, str]:
    """``section.name`` -> value as text, of a YAML file."""
    try:
        content = load_plain_yaml(Path(path))
    except UserError:
        return {}
    sections = content.items() if isinstance(content, dict) else ()
    return {
        f"{section}.{name}": str(value)
        for section, values in sections
        if isinstance(values, dict)
        for name, value in values.items()
    }
