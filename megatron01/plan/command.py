"""``megatron01 schedule`` and ``megatron01 plan``: traffic and run time of a run, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megatron01.config import BertPretrainConfig, GPTPretrainConfig
from megatron01.config.command_line import parse
from megatron01.config.fields import Settings
from megatron01.config.yaml_files import find_config, flat_settings, load_plain_yaml
from megatron01.contrib.deepspeed import DeepSpeedSource
from megatron01.errors import UserError
from megatron01.plan.settings import (
    BertForecastConfig,
    BertScheduleConfig,
    GPTForecastConfig,
    GPTScheduleConfig,
    PlanConfig,
)


def schedule(argv: Sequence[str], prog: str) -> None:
    """``megatron01 schedule``. Raises UserError for a mistake in the settings, or a file that cannot be written."""
    config_class: Any = BertScheduleConfig if describes_bert(argv) else GPTScheduleConfig
    description = "Show when a run synchronizes and what each step sends, without training."
    deepspeed = DeepSpeedSource(replicas=lambda flags: max(1, flags.get("plan.replicas", PlanConfig.replicas)))
    config = parse(config_class, argv, prog=prog, description=description, other_files=deepspeed)
    from megatron01.plan.schedule import show

    show(config)


def plan(argv: Sequence[str], prog: str) -> None:
    """``megatron01 plan``. Raises UserError for a mistake in the settings."""
    config_class: Any = BertForecastConfig if describes_bert(argv) else GPTForecastConfig
    description = "How long a run takes on a cluster, with each optimizer; figures are those of a model, not measured."
    config = parse(config_class, argv, prog=prog, description=description)
    from megatron01.plan.forecast import show

    show(config)


def describes_bert(argv: Sequence[str]) -> bool:
    """True if --config files and flags choose a BERT's tokenizer, or set a setting that only BERT has."""
    bert, gpt = Settings(BertPretrainConfig).by_key, Settings(GPTPretrainConfig).by_key
    only_bert = {key: setting.flag for key, setting in bert.items() if key not in gpt}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--tokenizer-type", default="")
    try:
        given, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return False
    if given.tokenizer_type.startswith(("Bert", "GPT2")):  # the others serve both
        return bool(given.tokenizer_type.startswith("Bert"))
    flags = {argument.split("=")[0].replace("--no-", "--") for argument in rest}
    settings: dict[str, str] = {}
    for path in given.config:
        with suppress(UserError):  # ``parse`` reports it
            settings |= flat_settings(load_plain_yaml(find_config(path)))
    has_berts = not flags.isdisjoint(only_bert.values()) or not only_bert.keys().isdisjoint(settings)
    return has_berts or settings.get("data.tokenizer_type", "").startswith("Bert")
