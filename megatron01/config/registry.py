"""The registry of optimizers: what the framework knows of each without importing torch.

An optimizer declares itself by an ``OptimizerSpec``: one of ours in ``megatron01/optim/specs.py``, any other as the
attribute ``spec`` of its class. Trainer, planner, memory check and tables ask the spec, never for a name.
Specs are looked up by name when they are asked for, so that nothing here imports an optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from megatron01.config.fields import Settings
from megatron01.errors import UserError, nearest, require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron01.config.optimizer import OptimizerConfig

OPTIMIZERS = ("adam", "quantized_adam", "one_bit_adam", "zero_one_adam", "bin_sgdm", "soft_sign_sgd", "sgdm")
"""Names of our own, from the most exact."""

STEPS_AT_ONCE = 1 << 20
"""Steps of a run that are counted together where an array over all of them would take gigabytes."""


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """What each step of a run does, as arrays over the steps."""

    full: NDArray[np.bool_]  # bool[steps], an average in full precision
    one_bit: NDArray[np.bool_]  # bool[steps], an exchange of bits; a step may make both exchanges, or none
    refreshes: NDArray[np.bool_]  # bool[steps], T_v: the second moment is refreshed with the averaged gradient
    synchronizes: NDArray[np.bool_]  # bool[steps], T_u: the master weights move
    interval: NDArray[np.integer[Any]]  # int[steps], steps between two synchronizations that the policy asks for
    frozen_from: int  # step from which the second moment is frozen; 0 without one, the number of steps if it never is

    @classmethod
    def every_step(cls, full: NDArray[np.bool_], *, refreshes: bool) -> StepTable:
        """One exchange at every step, of bits where it is not ``full``; a full one may refresh a second moment."""
        import numpy as np

        refreshed = full if refreshes else np.zeros_like(full)
        return cls(
            full=full,
            one_bit=~full,
            refreshes=refreshed,
            synchronizes=np.ones_like(full),
            interval=np.ones(full.size, np.uint8),
            frozen_from=int(refreshed.sum()),
        )


def full_steps(config: OptimizerConfig, schedule: Any, steps: int) -> StepTable:
    """The steps of an optimizer that averages in full precision at each."""
    import numpy as np

    return StepTable.every_step(np.ones(steps, bool), refreshes=find_optimizer(config.optimizer).second_moment)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer as the framework sees it.

    Attributes:
        label: its name in tables and charts.
        build: from (groups, schedule, config, common) to the optimizer: parameter groups of (name, parameter) pairs,
            the learning-rate schedule, the run's ``PretrainConfig``, and ``optim.settings.CommonArguments`` by name.
            None calls the class with ``settings_class``'s values and ``common``.
        settings_class: a dataclass of settings of its own, which ``--optimizer-arguments name=value ...`` fills in.
        own_settings: settings of ``OptimizerConfig`` that no other optimizer has; their defaults stand for "not given".
        planned_settings: settings that ``megatron01 plan`` names with a recommendation.
        ddp: gradients are averaged by DistributedDataParallel, in a type that is always the model's; else by exchanges
            of flat buffers.
        second_moment: the update divides by a root second moment, which full steps refresh.
        state_vectors: elements of state for each parameter element, beside the fp32 master weight.
        full_precision: type of what is averaged in full precision: gradients in ``gradient_wire_dtype``, or fp32; None
            if nothing is.
        auto_wire: what ``gradient_wire_dtype: auto`` stands for; None is the type of the model's weights.
        bits: exchanges of bits, with a scale for each block or without; None if there are none.
        steps: from (settings, schedule, number of steps) to what each step does.
        variants: from (settings, steps of the run) to ways to train with it that ``megatron01 plan`` compares, by name;
            None: as it is set, if it is the optimizer of the settings.
        automatic: ``--auto`` may choose it, and ``megatron01 plan`` recommend it.
        reference: tables say what it would send beside what a run has sent.
    """

    label: str
    build: Callable[[Sequence[dict[str, Any]], Any, Any, Mapping[str, Any]], Any] | None = None
    settings_class: type[Any] | None = None
    own_settings: tuple[str, ...] = ()
    planned_settings: tuple[str, ...] = ("bucket_elements",)
    ddp: bool = False
    second_moment: bool = False
    state_vectors: int = 2
    full_precision: Literal["gradients", "fp32"] | None = "gradients"
    auto_wire: Literal["8bit", "4bit"] | None = None
    bits: Literal["scaled", "unscaled"] | None = None
    steps: Callable[[OptimizerConfig, Any, int], StepTable] = full_steps
    variants: Callable[[OptimizerConfig, int], dict[str, OptimizerConfig]] | None = None
    automatic: bool = False
    reference: bool = False


@cache
def find_optimizer(name: str) -> OptimizerSpec:
    """The spec of an optimizer: one of ``OPTIMIZERS``, or ``package.module.Class``.

    Raises UserError if there is none of this name.
    """
    if name in OPTIMIZERS:
        return import_module("megatron01.optim.specs").SPECS[name]  # type: ignore[no-any-return]
    if "." not in name:
        raise UserError(f"optimizer is {name!r}; expected {EXPECTED}{nearest(name, OPTIMIZERS)}")
    spec = getattr(load_class(name), "spec", None)
    if not isinstance(spec, OptimizerSpec):
        raise UserError(f"optimizer is {name}, which has no attribute spec; expected a megatron01.optim.OptimizerSpec")
    return spec


EXPECTED = f"one of {', '.join(OPTIMIZERS)}, or package.module.Class"


def load_class(name: str) -> Any:
    """The class that ``package.module.Class`` names.

    Raises UserError if the module is not found or has no such class.
    """
    require(
        all(part.isidentifier() for part in name.split(".")), f"optimizer is {name!r}; expected package.module.Class"
    )
    module_name, _, class_name = name.rpartition(".")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"optimizer is {name}, but there is no module {error.name}; is it on PYTHONPATH?") from None
    if not isinstance(getattr(module, class_name, None), type):
        raise UserError(
            f"optimizer is {name}, but {module.__file__} has no class {class_name}{nearest(class_name, vars(module))}"
        )
    return getattr(module, class_name)


def optimizers() -> dict[str, OptimizerSpec]:
    """Our own optimizers, by name."""
    return {name: find_optimizer(name) for name in OPTIMIZERS}


def baseline() -> str:
    """The name of the optimizer that exchanges gradients as anyone would, with which others are compared."""
    return next(name for name, spec in optimizers().items() if spec.ddp)


def found_optimizer(name: str) -> OptimizerSpec | None:
    """The spec of the optimizer of a run from anywhere; None if it cannot be imported here."""
    try:
        return find_optimizer(name)
    except Exception:  # a user's module may need what is not installed here, or raise anything
        return None


def label_of(name: str) -> str:
    """The label of an optimizer for tables; the name itself if it is not found here."""
    spec = found_optimizer(name)
    return name if spec is None else spec.label


def own_arguments(config: OptimizerConfig) -> Any:
    """The settings class of the optimizer with the values of ``optimizer_arguments``; None if it has no such class.

    Raises UserError for an argument that is not ``name=value``, unknown, or of the wrong type.
    """
    settings_class = find_optimizer(config.optimizer).settings_class
    if settings_class is None:
        if config.optimizer_arguments:
            raise UserError(
                f"optimizer_arguments is {' '.join(config.optimizer_arguments)}, but optimizer {config.optimizer} has"
                " no settings of its own; leave it out"
            )
        return None
    settings = Settings(settings_class)
    values = {}
    for argument in config.optimizer_arguments:
        name, equals, text = argument.partition("=")
        if not equals or name not in settings.by_key:
            hint = nearest(name, settings.by_key)
            expected = " ".join(f"{known}=..." for known in settings.by_key)
            raise UserError(f"optimizer_arguments holds {argument!r}; expected {expected}{hint}")
        values[name] = settings.by_key[name].convert(text, f"optimizer_arguments: {name}")
    return settings.build(values)


def without_others_settings(config: OptimizerConfig, name: str) -> OptimizerConfig:
    """These settings for another optimizer, without those that only others have."""
    own = find_optimizer(name).own_settings
    of_others = {setting for spec in optimizers().values() for setting in spec.own_settings if setting not in own}
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(config)}
    changes = {setting: defaults[setting] for setting in of_others}
    arguments = config.optimizer_arguments if name == config.optimizer else ()
    return dataclasses.replace(config, optimizer=name, optimizer_arguments=arguments, **changes)
