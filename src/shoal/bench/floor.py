"""The limit for sharded engines: what a step takes at the least, when it is sharded as here.

A floor is the unsharded model's time of the same run, and what sharding must add to it:

    forward   max(first gather + compute + casts,             all gathers)
    backward  max(compute + gradients + last reduction,       gathers but one + all reductions)

Left is the GPU, right the link. Whichever is longer counts, as if the other hid under it whole.
Units are those of the engines: one per block, and the root, which stays gathered after forward; the
block that ran last need not be gathered again. What must pass through the GPU's memory:

    casts      of fp32 shards to the compute dtype, once a step:   4 + 2 bytes of P / N elements
    gradients  to the dtype of the reduction, into its matrix:     2 + 4 bytes of P elements,
               and what was reduced, written:                      4 bytes of P / N elements

It goes at the bandwidth of the data sheet, which no kernel reaches, and nothing hides it. What the
network writes (gathered parameters) costs nothing. Collectives, of which each unit has its own, and
kernels that must be launched are counted, without a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.bench.figures import ComputeRound, Figures
from shoal.bench.model import ModelShape
from shoal.comm.collectives import Kind
from shoal.comm.network import Network

BANDWIDTH_TB_PER_S = {
    "NVIDIA H200": 4.8,
    "NVIDIA H100 80GB HBM3": 3.35,
    "NVIDIA A100-SXM4-80GB": 2.039,
}
"""Of the memory, by the data sheets: 10¹² bytes per second, reading and writing together."""

FORWARD_SHARE = 1 / 3
"""Of forward in the unsharded model's time, where it was not measured: by multiplications."""

HOST_BOUND = 0.8
"""From which share of a step on its host is the limit."""

FULL, HALF = 4, 2
"""Bytes of an element in fp32, and in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The limit of a case in a mode, on a device. Times in ms."""

    bandwidth_tb_per_s: float
    """Of the device's memory."""
    forward_ms: float
    """The unsharded model's."""
    backward_ms: float
    forward_is_measured: bool
    """Whether forward was timed apart; if not, it is `FORWARD_SHARE` of the step."""
    host_ms: float | None
    """Of the unsharded model."""
    casts_ms: float
    gradients_ms: float
    first_gather_ms: float
    last_reduction_ms: float
    forward_link_ms: float
    """All gathers of forward, one after the other."""
    backward_link_ms: float
    """The gathers of backward but one, and all reductions."""
    num_collectives: int
    num_bytes: int
    """Of their whole buffers, as in `Collectives`."""
    num_launches: int
    """Kernels that the unsharded model does not have: a cast and a pack for each unit, and the
    collectives."""

    @property
    def plain_ms(self) -> float:
        """The unsharded model's step."""
        return self.forward_ms + self.backward_ms

    @property
    def is_of_host(self) -> bool:
        """Whether the host is the limit, so that what it has to launch counts."""
        return self.host_ms is not None and self.host_ms > HOST_BOUND * self.plain_ms

    @property
    def ms(self) -> float:
        """The limit of a step."""
        forward_ms = self.first_gather_ms + self.forward_ms + self.casts_ms
        backward_ms = self.backward_ms + self.gradients_ms + self.last_reduction_ms
        return max(forward_ms, self.forward_link_ms) + max(backward_ms, self.backward_link_ms)

    @property
    def ratio(self) -> float:
        """The same over the unsharded model's step."""
        return self.ms / self.plain_ms


def floor_of(
    case: Mapping[str, Any], device: str, plain: Figures, rounds: Sequence[ComputeRound]
) -> Floor | str:
    """The floor of a case, as results describe it, over the unsharded model; or why there is none.

    `rounds` are the unsharded model's.
    """
    if plain.device_type == "cpu":
        return "on a CPU: neither its memory nor its ranks' network is modelled"
    bandwidth = BANDWIDTH_TB_PER_S.get(device)
    if bandwidth is None:
        return f"the memory bandwidth of {device} is not in bench/floor.py"
    if not {"shape", "network", "world_size", "mixed_precision"} <= case.keys():
        return "the results do not describe the case"
    if case["network"] is None:
        return "real ranks: their network is not modelled"
    shape, network = ModelShape(**case["shape"]), Network(**case["network"])
    size, is_mixed = case["world_size"], case["mixed_precision"]
    blocks, block, root = shape.num_layers, shape.block_numel, shape.root_numel
    total = blocks * block + root
    if total != plain.num_parameters:
        return f"plain has {plain.num_parameters:,} parameters, and the case {total:,}"
    compute = HALF if is_mixed else FULL

    def gather_ms(numel: int) -> float:
        return network.duration_us(Kind.ALL_GATHER, numel * compute, size) / 1e3

    def reduction_ms(numel: int) -> float:
        return network.duration_us(Kind.REDUCE_SCATTER, numel * FULL, size) / 1e3

    def memory_ms(num_bytes: float) -> float:
        return num_bytes / bandwidth / 1e9

    casts = total / size * (FULL + compute) if is_mixed else 0.0
    packing = total * (compute + FULL) if is_mixed else 0.0
    reductions_ms = blocks * reduction_ms(block) + reduction_ms(root)
    num_units = blocks + 1
    num_collectives = num_units + (blocks - 1) + num_units
    share = _forward_share(rounds)
    forward_ms = plain.forward_backward_ms * (FORWARD_SHARE if share is None else share)
    return Floor(
        bandwidth_tb_per_s=bandwidth,
        forward_ms=forward_ms,
        backward_ms=plain.forward_backward_ms - forward_ms,
        forward_is_measured=share is not None,
        host_ms=plain.host_ms,
        casts_ms=memory_ms(casts),
        gradients_ms=memory_ms(packing + total / size * FULL),
        first_gather_ms=gather_ms(root),
        last_reduction_ms=reduction_ms(root),
        forward_link_ms=gather_ms(root) + blocks * gather_ms(block),
        backward_link_ms=(blocks - 1) * gather_ms(block) + reductions_ms,
        num_collectives=num_collectives,
        num_bytes=(total + (blocks - 1) * block) * compute + total * FULL,
        num_launches=num_collectives + (2 * num_units if is_mixed else 0),
    )


def _forward_share(rounds: Sequence[ComputeRound]) -> float | None:
    """Of forward in a step; None where it was not timed apart."""
    shares = [
        forward / whole
        for one in rounds
        for forward, whole in zip(one.forward_ms, one.forward_backward_ms, strict=False)
    ]
    return statistics.median(shares) if shares else None
