"""From a program that builds a whole model to the part of it that this process holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from megatron01.distributed import ModelParts
from megatron01.models import GPT2, Bert
from megatron01.optim.partial import PartialModel
from megatron01.tensor_parallel.cuts import Cut
from megatron01.tensor_parallel.plan import cuts_for, plan_for
from megatron01.tensor_parallel.regions import PartGroup


@dataclass(frozen=True)
class PartOfModel:
    """What this process holds of a model.

    Attributes:
        model: with parameters of the size of a part; the whole model, where a replica is one process.
        shapes: of the whole parameters by name, in the model's order: those of a model that is not cut.
        cuts: how parameters are cut where there are several parts, by name; those not named are held whole by each.
        parts: the processes that hold the parts.
        group: what the forward pass communicates over; None where a replica is one process.
    """

    model: nn.Module
    shapes: Mapping[str, torch.Size]
    cuts: Mapping[str, Cut]
    parts: ModelParts
    group: PartGroup | None

    @property
    def partial(self) -> PartialModel | None:
        """What an optimizer has to know."""
        if self.group is None:
            return None
        return PartialModel(self.parts, frozenset(self.shapes) - frozenset(self.cuts))

    def keep(self, name: str, parameter: Tensor, whole: Tensor) -> None:
        """Set a parameter of this part from the whole one; what it has beyond that is padding, and zero."""
        cut = self.cuts.get(name)
        parameter.zero_()
        if cut is None:
            parameter[: len(whole)].copy_(whole)
        else:
            cut.copy(whole, 0, parameter, self.parts.rank * parameter.shape[cut.dim])

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process's forward and backward passes have handed over for the other parts."""
        return 0 if self.group is None else self.group.bytes_sent


def build_part(build: Callable[[], nn.Module], parts: ModelParts, *, sequence_parallel: bool = False) -> PartOfModel:
    """Build a model, or the part of it that this process holds, on the default device.

    Initial weights are the same however many parts there are. The whole model never exists: it is laid out without
    memory, cut, and then drawn one parameter at a time, of which a part is kept.

    Raises:
        UserError: for a model that there is no plan for.
    """
    if parts.size == 1:
        model = build()
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return PartOfModel(model, shapes, _cuts_for(model), parts, None)
    assert parts.process_group is not None
    group = PartGroup(parts.process_group)
    with torch.device("meta"):
        model = build()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    cuts = _cuts_for(model)
    for name, cut in cuts.items():
        module, _, parameter = name.rpartition(".")
        part = torch.empty(cut.shape(shapes[name], parts.size), device="meta")
        model.get_submodule(module).register_parameter(parameter, nn.Parameter(part))
    # the mesh's other axes, node and local, are the optimizer's Topology: nodes may hold different numbers of processes
    mesh = DeviceMesh.from_group(parts.process_group, parts.device.type, mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {**plan_for(model, group, sequence_parallel=sequence_parallel)})
    model.to_empty(device=torch.get_default_device())
    part_of_model = PartOfModel(model, shapes, cuts, parts, group)
    with torch.no_grad():
        model.initialize(part_of_model.keep)  # type: ignore[operator]  # every model with a plan has it
    return part_of_model


def part_shapes(model: nn.Module, num_parts: int) -> dict[str, torch.Size]:
    """Shapes of the parameters of each of ``num_parts`` of a model that is not cut, by name."""
    cuts = _cuts_for(model) if num_parts > 1 else {}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return shapes | {name: cut.shape(shapes[name], num_parts) for name, cut in cuts.items()}


def _cuts_for(model: nn.Module) -> dict[str, Cut]:
    """Nothing, for a model that there is no plan for."""
    if not isinstance(model, GPT2 | Bert):
        return {}
    return cuts_for(model.config, (name for name, _ in model.named_parameters()))
