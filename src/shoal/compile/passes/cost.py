"""How long nodes take: by their work and bytes, or by a model of the link.

Estimates serve to compare orders of one graph with each other, not to predict a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from shoal._torch import symbols
from shoal.comm.network import NVLINK, Network
from shoal.compile.node_kinds import NodeKind, kind, tensors_of
from shoal.compile.partition.cost import work
from shoal.compile.passes.collectives import collective
from shoal.compile.passes.comm_block import comm_bytes
from shoal.errors import UsageError

FREE = (NodeKind.INPUT, NodeKind.CONSTANT, NodeKind.ITEM, NodeKind.SIZE, NodeKind.VIEW)
"""The kinds of nodes that move no bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The speed of a rank's device, and of the link that it sends over."""

    flops_per_us: float = 4e8
    """400 TFLOP/s."""
    memory_bytes_per_us: float = 3e6
    """3 TB/s."""
    call_us: float = 2.0
    """The time of every operator, however small."""
    link_bytes_per_us: float = NVLINK.bytes_per_us
    link_latency_us: float = NVLINK.latency_us

    def __post_init__(self) -> None:
        for name in ("flops_per_us", "memory_bytes_per_us", "link_bytes_per_us"):
            if getattr(self, name) <= 0:
                raise UsageError(f"expected a rate above 0, got {name}={getattr(self, name)}")
        for name in ("call_us", "link_latency_us"):
            if getattr(self, name) < 0:
                raise UsageError(f"expected a time of 0 or more, got {name}={getattr(self, name)}")

    @property
    def network(self) -> Network:
        """The model of the link that times collectives."""
        return Network("graph", self.link_bytes_per_us / 1e3, self.link_latency_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The time of each node: measured where it was, estimated otherwise."""

    machine: Hardware = Hardware()
    measured_us: Mapping[str, float] = field(default_factory=dict)
    """By the name of a node."""

    def of_compute(self, node: fx.Node) -> float:
        """How long a node keeps this rank busy."""
        if node.name in self.measured_us:
            return self.measured_us[node.name]
        if node.op != "call_function" or kind(node) in FREE:
            return 0.0
        moved = sum(map(symbols.num_bytes, tensors_of((node, *node.all_input_nodes))))
        machine = self.machine
        busy = max(work(node) / machine.flops_per_us, moved / machine.memory_bytes_per_us)
        return machine.call_us + busy

    def of_link(self, node: fx.Node) -> float:
        """How long a collective occupies the link."""
        if node.name in self.measured_us:
            return self.measured_us[node.name]
        op = collective(node)
        if op is None:
            return 0.0
        return self.machine.network.duration_us(op.kind, comm_bytes(node))
