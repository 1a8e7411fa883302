"""Tensor parallelism: one replica of a model in parts, on several processes of a node (Shoeybi et al. 2019).

The models know nothing of it. ``plan`` says which parameters are cut and where a forward pass communicates;
``regions`` are the collectives, with their backward passes.
"""

from megatron01.tensor_parallel.build import PartOfModel, build_part, part_shapes
from megatron01.tensor_parallel.cuts import Cut

__all__ = ["Cut", "PartOfModel", "build_part", "part_shapes"]
