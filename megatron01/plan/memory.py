"""What a process takes in memory: weights, the optimizer's state, buffers of the exchange, and the passes of a step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron01.config import OptimizerConfig, Precision
from megatron01.plan.cluster import Cluster
from megatron01.plan.pass_memory import PassBytes
from megatron01.plan.volume import SCALE_BYTES, gradient_bytes

WEIGHT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

_INSIDE_BYTES = 2  # of an element that nodes sum inside
_LIVE_BITS = 2  # elements that take part in exchanges, and those that may: a bit each


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process at the worst moment of a step.

    Attributes:
        weights: in the model's type.
        state: of the optimizer, master weights included.
        exchange: buffers of collectives, without those that the collective library keeps for itself.
        passes: gradients, and what forward and backward passes hold.
        saved: of these, what one forward pass leaves for its backward pass.
    """

    weights: int
    state: int
    exchange: int
    passes: int
    saved: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.exchange + self.passes


def memory(
    config: OptimizerConfig,
    *,
    cluster: Cluster,
    parameter_sizes: tuple[int, ...],
    precision: Precision,
    passes: PassBytes,
    replica_is_node: bool = False,
    sums_in_fp32: bool = False,
) -> Memory:
    """The memory of one process of a run.

    Args:
        parameter_sizes: elements of each parameter that the process holds.
        passes: of one step.
        sums_in_fp32: gradients of several micro-batches are added up in fp32 beside gradients of 16 bit.
    """
    weights = WEIGHT_BYTES[precision] * sum(parameter_sizes)
    extra = 4 * sum(parameter_sizes) if sums_in_fp32 else 0
    if config.optimizer == "adam":
        # AdamW's two moments, and fp32 copies of 16-bit weights
        state, exchange = (8 if precision == "fp32" else 12) * sum(parameter_sizes), 0
    else:
        blocks = sum(-(-size // config.block_size) for size in parameter_sizes)
        elements = blocks * config.block_size
        state = flat_state_bytes(config, cluster, elements, replica_is_node=replica_is_node)
        exchange = _exchange_bytes(config, cluster, elements, precision, replica_is_node=replica_is_node)
    return Memory(weights=weights, state=state, exchange=exchange, passes=passes.peak + extra, saved=passes.saved)


def flat_state_bytes(config: OptimizerConfig, cluster: Cluster, elements: int, *, replica_is_node: bool) -> int:
    """Flat buffers: x, m and u, v where there is a second moment, and the two errors of bits.

    Hierarchical, a process has the errors of what it carries between nodes only: 1/m of the elements. It then also has
    the node's mean of these.
    """
    has_v = config.optimizer in ("zero_one_adam", "one_bit_adam", "bin_sgdm", "soft_sign_sgd")
    buffers = 3 + has_v
    errors = 0.0
    if _sends_bits(config, cluster):
        carried = _carried(cluster)
        servers = cluster.nodes if carried < 1 else cluster.processes
        errors = carried * (1 + 1 / servers) + (carried if carried < 1 else 0.0)
    return round(4 * elements * (buffers + errors) + elements * _LIVE_BITS / 8)


def _exchange_bytes(
    config: OptimizerConfig, cluster: Cluster, elements: int, precision: Precision, *, replica_is_node: bool
) -> int:
    if cluster.processes == 1:
        return 0
    carried = _carried(cluster)
    bucket = min(config.bucket_elements, elements)
    num_buckets = -(-elements // config.bucket_elements)
    packed = 0.0
    if _sends_bits(config, cluster):
        each = 1 / 8 + (SCALE_BYTES / config.block_size if config.optimizer != "bin_sgdm" else 0.0)
        # what is sent and what is received; hierarchical also the node's whole result
        packed = each * elements * (2 if carried == 1 else 2 * carried + 1)
        if carried < 1 and not replica_is_node:
            packed += min(2, num_buckets) * 2 * _INSIDE_BYTES * bucket
    dense = 0.0
    if config.optimizer != "bin_sgdm":
        wire = 4 if config.optimizer == "soft_sign_sgd" else gradient_bytes(config, precision)
        slots = min(2 if carried == 1 else 4, num_buckets)
        dense = slots * 2 * wire * bucket * (1 if carried == 1 else 1 + carried)
    return round(packed + dense)


def _sends_bits(config: OptimizerConfig, cluster: Cluster) -> bool:
    exchanges = config.optimizer in ("zero_one_adam", "one_bit_adam", "bin_sgdm")
    return exchanges and config.compressor == "one_bit" and cluster.processes > 1


def _carried(cluster: Cluster) -> float:
    """The share of a buffer that a process carries between nodes."""
    is_hierarchical = cluster.nodes > 1 and cluster.processes_per_node > 1
    return 1 / cluster.processes_per_node if is_hierarchical else 1.0
