"""Decide the collectives that become one.

Buckets hold collectives of equal keys, in the order of the graph, up to a size. Between two members
there is no path, not even one through another bucket: then all members can start together, and
all of them can end together, without anything that waits for itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import fx

from shoal.comm.buckets import Limits
from shoal.compile.passes.collectives import sent_nodes
from shoal.compile.passes.comm_block import CommBlock
from shoal.compile.passes.dependencies import Dependencies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketMember:
    """A collective that may go into a bucket; it sends as many tensors as it has waits."""

    block: CommBlock
    key: Hashable
    """Members of one bucket have equal keys."""
    absorbed: tuple[fx.Node, ...] = ()
    """Nodes before the collective that the bucket does for all of its members."""

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The tensors that go into the bucket, one for each wait of the block.

        Read from the graph, where the results of other buckets take the place of what was there.
        """
        if not self.absorbed:
            return sent_nodes(self.block.comm_node)
        return tuple(node.all_input_nodes[0] for node in self.absorbed)

    @property
    def departure(self) -> tuple[fx.Node, ...]:
        """The nodes that a new collective takes the place of."""
        return (*self.absorbed, self.block.comm_node)

    @property
    def arrival(self) -> tuple[fx.Node, ...]:
        """The nodes that new results take the place of."""
        start = self.block.node_list.index(self.block.wait_nodes[-1]) + 1
        return self.block.node_list[1:start]


class CommBucket(tuple[BucketMember, ...]):
    """Members that become one collective, which takes the arguments of the last one."""

    __slots__ = ()

    @property
    def last(self) -> CommBlock:
        """The collective of the last member."""
        return self[-1].block

    @property
    def sources(self) -> list[fx.Node]:
        """The nodes that go into the bucket, one for each wait."""
        return [node for member in self for node in member.sources]

    @property
    def waits(self) -> list[fx.Node]:
        """The nodes that wait for the members' results."""
        return [node for member in self for node in member.block.wait_nodes]

    @property
    def departure(self) -> list[fx.Node]:
        """The nodes that the new collective takes the place of."""
        return [node for member in self for node in member.departure]

    @property
    def arrival(self) -> list[fx.Node]:
        """The nodes that new results take the place of."""
        return [node for member in self for node in member.arrival]


def decide_buckets(
    dependencies: Dependencies, members: Sequence[BucketMember], limits: Limits
) -> list[CommBucket]:
    """Put each member into a bucket of its key."""
    paths = _Paths(dependencies, members)
    buckets: list[list[int]] = []
    latest: dict[Hashable, list[int]] = {}
    count: dict[Hashable, int] = {}
    for i, member in enumerate(members):
        bucket = latest.get(member.key)
        if bucket is not None:
            size = sum(members[j].block.num_bytes for j in bucket)
            full = limits.is_full(count[member.key] - 1, size, member.block.num_bytes)
            if full or paths.between(bucket[0], i):
                bucket = None
        if bucket is None:
            bucket = latest[member.key] = []
            buckets.append(bucket)
            count[member.key] = count.get(member.key, 0) + 1
        else:
            paths.join(bucket[0], i)
        bucket.append(i)
    return [CommBucket(members[i] for i in bucket) for bucket in buckets]


class _Paths:
    """Which members come before which, as buckets become one node.

    A set of members is an integer with a bit for each.
    """

    def __init__(self, dependencies: Dependencies, members: Sequence[BucketMember]) -> None:
        owner: dict[fx.Node, int] = {}
        for i, member in enumerate(members):
            owner.update(dict.fromkeys((*member.departure, *member.arrival), 1 << i))
        reached: dict[fx.Node, int] = {}
        self.before = [0] * len(members)
        for node in dependencies.nodes:
            bits = 0
            for one in dependencies.before[node]:
                bits |= reached[one]
            own = owner.get(node, 0)
            if own:
                self.before[own.bit_length() - 1] |= bits & ~own
            reached[node] = bits | own
        self._close()
        self.together = [1 << i for i in range(len(members))]

    def _close(self) -> None:
        """Count what comes before a member's later nodes as before all that follows it."""
        for i, bits in enumerate(self.before):
            for j, other in enumerate(self.before):
                if other >> i & 1:
                    self.before[j] = other | bits

    def between(self, i: int, j: int) -> bool:
        """Whether there is a path between the buckets of two members."""
        return bool(self.before[i] & self.together[j] or self.before[j] & self.together[i])

    def join(self, i: int, j: int) -> None:
        """Make the buckets of two members one."""
        joined = self.together[i] | self.together[j]
        before = self.before[i] | self.before[j]
        for one, bits in enumerate(self.before):
            if joined >> one & 1:
                self.together[one], self.before[one] = joined, before
            elif bits & joined:
                self.before[one] = bits | before | joined
