"""`DistantReplicas`: when each part of a model takes its outer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.buckets import BUCKET_MIB, Item, Limits, assign
from shoal.ddp.replicated import Replica, replicas_of
from shoal.distant.exchange import Exchange, Exchanged, OuterSettings
from shoal.errors import InvariantError, UsageError
from shoal.runtime.module_state import units_of
from shoal.runtime.unit import Unit

_MARK = "_shoal_distant"


class DistantReplicas:
    """Replicas that train by themselves, and take an outer step together once in `every` steps.

        outer = DistantReplicas(model, every=64)
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()

    From the constructor on, gradients are reduced over the ranks that shard alone. An outer step
    takes the mean over the replicas of what each has learned since the last one, as the gradient
    of SGD with Nesterov's momentum, and gives all of them its weights (DiLoCo). Replicas begin
    with the first one's weights. All ranks call `step` after every step of the optimizer, also
    where a gradient scaler has skipped that.

    `streamed`: units take their outer steps one after another, spread over the `every` steps,
    and not all at once. `delay`: an outer step is launched in the background, and applied so many
    steps later; what a replica has learned meanwhile is kept by a `share`, by default one half.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        streamed: bool = False,
        delay: int = 0,
        share: float | None = None,
    ) -> None:
        _check_numbers(every, lr, momentum, delay, share)
        self.every = every
        self.lr = lr
        self.momentum = momentum
        """Like `lr`, may be set between steps."""
        self.streamed = streamed
        self.delay = delay
        self.share = share if share is not None else (0.5 if delay else 0.0)
        self.num_steps = 0
        """How often `step` was called."""
        if distant_replicas_of(model) is not None:
            raise InvariantError(
                f"this {type(model).__name__} has DistantReplicas already: build it once, and set "
                "its lr and momentum"
            )
        parts = _parts_of(model)
        self.replica = parts[0].replicas.rank
        """The number of this replica, and how many there are."""
        self.num_replicas = parts[0].replicas.size
        self.group = parts[0].replicas.group
        """The ranks that hold the same part of each replica."""
        self._exchanges = [Exchange(part) for part in parts]
        _part(model)
        with torch.no_grad():
            for exchange in self._exchanges:
                exchange.broadcast()
        vars(model)[_MARK] = self

    @torch.no_grad()
    def step(self) -> None:
        """Count a step of the optimizer, and do what is due after it. Collective."""
        self.num_steps += 1
        for number, exchange in enumerate(self._exchanges):
            if exchange.is_awaited and self._age(number) == self.delay:
                exchange.apply(self.share)
        due = [one for number, one in enumerate(self._exchanges) if self._age(number) == 0]
        settings = OuterSettings(lr=self.lr, momentum=self.momentum)
        for exchange in due:
            exchange.launch(settings)
        if self.delay == 0:
            for exchange in due:
                exchange.apply(self.share)

    def _age(self, number: int) -> int:
        """How many steps ago an outer step of an exchange was due."""
        offset = number * self.every // len(self._exchanges) if self.streamed else 0
        return (self.num_steps - offset) % self.every

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the first replica's weights of now, with no momentum. Collective.

        After weights were loaded that are not those of a checkpoint of distant replicas.
        """
        self.num_steps = 0
        for exchange in self._exchanges:
            exchange.restart()
            exchange.broadcast()

    # For checkpoints.

    def settle(self) -> None:
        """Wait for outer steps on their way; their weights are applied when it is time."""
        with torch.no_grad():
            for exchange in self._exchanges:
                exchange.arrive()

    def anchors(self) -> dict[nn.Parameter, Tensor]:
        """By parameter the weights that all replicas share, as after the last outer step."""
        return _joined(exchange.anchors() for exchange in self._exchanges)

    def momenta(self) -> dict[nn.Parameter, Tensor]:
        """By parameter the momentum of the outer step."""
        return _joined(exchange.momenta() for exchange in self._exchanges)

    def settings(self) -> dict[str, int | float | bool]:
        """What a checkpoint holds beside the tensors."""
        return {
            "replicas": self.num_replicas,
            "every": self.every,
            "streamed": self.streamed,
            "delay": self.delay,
            "share": self.share,
            "parts": len(self._exchanges),
            "steps": self.num_steps,
            "lr": self.lr,
            "momentum": self.momentum,
        }

    def mismatches(self, saved: Mapping[str, object]) -> list[str]:
        """In words, where a saved run differs from this one so that this cannot go on with it."""
        here = self.settings()
        names = ("replicas", "every", "streamed", "delay", "share", "parts")
        differ = [name for name in names if saved.get(name) != here[name]]
        return [f"{name}={saved.get(name)!r}, here {here[name]!r}" for name in differ]

    def take_up(self, saved: Mapping[str, Any]) -> None:
        """Go on from settings that were saved; weights, anchors and momenta are loaded."""
        self.num_steps = int(saved["steps"])
        self.lr, self.momentum = float(saved["lr"]), float(saved["momentum"])
        for number, exchange in enumerate(self._exchanges):
            age = self._age(number)
            exchange.take_up(is_awaited=age < self.delay and self.num_steps - age > 0)


def distant_replicas_of(model: nn.Module) -> DistantReplicas | None:
    """The replicas that were made distant of a model, if it was this one."""
    return vars(model).get(_MARK)


def _joined(found: Iterable[dict[nn.Parameter, Tensor]]) -> dict[nn.Parameter, Tensor]:
    return {parameter: tensor for one in found for parameter, tensor in one.items()}


def _check_numbers(every: int, lr: float, momentum: float, delay: int, share: float | None) -> None:
    wrong = {
        f"every={every!r}, expected a number of steps of 1 or more": not _is_count(every, 1),
        f"lr={lr!r}, expected a number above 0": not lr > 0,
        f"momentum={momentum!r}, expected a number in [0, 1)": not 0 <= momentum < 1,
        f"delay={delay!r}, expected a number of steps of 0 or more": not _is_count(delay, 0),
        f"share={share!r}, expected a number in [0, 1)": share is not None and not 0 <= share < 1,
    }
    found = [text for text, is_wrong in wrong.items() if is_wrong]
    if not found and delay >= every:
        found = [f"delay={delay}, expected less than every={every}: one exchange at a time"]
    if found:
        raise UsageError(f"DistantReplicas: {'; '.join(found)}")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _parts_of(model: nn.Module) -> list[Exchanged]:
    """What is exchanged together: units, and buckets of modules that `shoal.replicate` keeps."""
    units, replicated = units_of(model), replicas_of(model)
    alone = [unit.name for unit in units if unit.replicas is None]
    if alone or not (units or replicated):
        raise UsageError(
            f"DistantReplicas needs a model whose replicas can drift apart, but "
            f"{f'the units {alone} have' if alone else f'this {type(model).__name__} has'} none: "
            "call fully_shard with a mesh of two axes, which replicates over the first "
            "(init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))), or shoal.replicate"
        )
    parts = [_part_of_unit(unit) for unit in units if _is_trained(unit)]
    for one in replicated:
        parts += _parts_of_replica(one)
    if not parts:
        raise UsageError("DistantReplicas: no parameter of the model requires a gradient")
    sizes = {part.replicas.size for part in parts}
    if len(sizes) > 1:
        raise NotImplementedError(
            f"shoal: DistantReplicas of a model whose units have different numbers of replicas, "
            f"{sorted(sizes)}, is not supported; replicate all of them over the same ranks"
        )
    return parts


def _is_trained(unit: Unit) -> bool:
    return any(parameter.requires_grad for parameter in unit.shards.sharded)


def _part_of_unit(unit: Unit) -> Exchanged:
    assert unit.replicas is not None
    shards = unit.shards
    if shards.extended:
        name = unit.qualified(shards.members[min(shards.extended)].spec.name)
        raise NotImplementedError(
            f"shoal: DistantReplicas does not support tensors with gather hooks, such as {name!r}: "
            "the mean of their bytes is not that of their values"
        )

    def locals_now() -> list[Tensor]:
        shards.follow()
        return [member.local for member in shards.members]

    return Exchanged(
        name=f"unit {unit.name!r}",
        parameters=unit.sharded_parameters(),
        locals=locals_now,
        like=lambda index, local: shards.members[index].wrapping.shard(local),
        replicas=unit.replicas,
        device=unit.device,
        was_written=unit.note_update,
    )


def _parts_of_replica(replica: Replica) -> list[Exchanged]:
    parameters = replica.reducer.parameters
    items = [Item(num_bytes=p.nbytes, key=(p.dtype, p.device)) for p in parameters]
    limits = Limits(num_bytes=int(BUCKET_MIB * 2**20))
    buckets = assign(items, range(len(items)), limits)
    return [
        _part_of_bucket(replica, number, [parameters[index] for index in bucket])
        for number, bucket in enumerate(buckets)
    ]


def _part_of_bucket(replica: Replica, number: int, parameters: Sequence[nn.Parameter]) -> Exchanged:
    return Exchanged(
        name=f"bucket {number}",
        parameters=parameters,
        locals=lambda: [parameter.detach() for parameter in parameters],
        like=lambda _, local: local,
        replicas=replica.transport,
        device=parameters[0].device,
        was_written=lambda: None,
    )


def _part(model: nn.Module) -> None:
    """Let gradients stay in their replicas."""
    for unit in units_of(model):
        unit.part_from_replicas()
    for replica in replicas_of(model):
        replica.averages = False
