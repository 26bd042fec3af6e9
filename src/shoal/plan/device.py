"""The device that a forecast imagines: everything runs on meta tensors, and notes are taken.

The model's operators come by a dispatch mode, the engine's lanes, gathers and reductions by
`runtime.imagined` and a process group of their own. Nothing is computed, and nothing is held: the
mode keeps no tensor alive, and learns from weak references when memory goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from shoal._torch import autograd, fakes, kernels, optimizers, subclasses, trees
from shoal.comm import imagined_device
from shoal.comm.calls import Call
from shoal.errors import UsageError
from shoal.plan import notes
from shoal.plan.costs import Cost, cost_of
from shoal.plan.device_kernels import kernels_of, temporaries_of
from shoal.plan.known_values import ASKING, KnownValues
from shoal.plan.notes import COMPUTE, Note
from shoal.plan.profile import Profile
from shoal.plan.seen import SEEN
from shoal.runtime.recorder import RecordedAction, Recorder, Running, TimeMark
from shoal.step.action import Action

WORKSPACE_BYTES = 32 << 20
"""What cuBLAS keeps on Hopper, for each thread that calls it."""


_CONVOLUTIONS = frozenset({torch.ops.aten.convolution, torch.ops.aten.convolution_backward})


class NotingDevice:
    """Takes notes of all that is asked of it."""

    def __init__(
        self, *, swaps_memory: bool, is_cpu: bool = False, profile: Profile | None = None
    ) -> None:
        self.notes: list[Note] = []
        self.purposes: dict[int, str] = {}
        """What the memory of each owner is for."""
        self.uncounted: set[str] = set()
        """Operators of whose arithmetic nothing is known."""
        self.timeless: set[str] = set()
        """Operators whose time is left out."""
        self.has_convolutions = False
        """Whether there are kernels that borrow memory as they please."""
        self.phase = "parameters"
        """What memory is for, of which nothing else is said."""
        self._swaps_memory = swaps_memory
        self._is_cpu = is_cpu
        self._profile = profile
        self.autocasts = ("cpu",) if is_cpu else ("cuda", "cpu")
        """Devices for which autocast would change what is imagined."""
        self._has_workspace: set[bool] = set()
        self._is_noting = True
        self._stream = COMPUTE
        self._num_lanes = 0
        self._num_marks = 0
        self._num_owners = 0
        self._owners: dict[int, tuple[int, weakref.ref[Any]]] = {}
        """By storage, who owns its memory."""

    @contextmanager
    def running(self, *, notes: bool = True) -> Iterator[None]:
        """Run on this device inside of the `with` block; without notes, nothing is seen of it."""
        with ExitStack() as stack:
            stack.enter_context(imagined_device.imagine(self))
            if not notes:
                self._is_noting = False
                stack.callback(setattr, self, "_is_noting", True)
                yield
                return
            stack.enter_context(kernels_of("cpu" if self._is_cpu else "cuda", self.timeless))
            stack.enter_context(optimizers.as_accelerated("meta"))
            stack.enter_context(_Operators(self))
            yield

    # What the engine asks of a device.

    def can_swap_memory(self) -> bool:
        """Whether the device's torch can exchange the memory of two storages."""
        return self._swaps_memory

    def lane(self, name: str) -> _NotedLane | None:
        """One more stream; a CPU has none."""
        if self._is_cpu:
            return None
        self._num_lanes += 1
        return _NotedLane(self, self._num_lanes)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give a storage so much memory, or take it away."""
        self._gone(storage._cdata)
        storage.resize_(num_bytes)
        if self._is_noting:
            self._came(storage, "gathered parameters")

    def is_for(self, storage: torch.UntypedStorage, purpose: str) -> None:
        """Say what the memory of a storage is for."""
        known = self._owners.get(storage._cdata)
        if known is not None:
            self.purposes[known[0]] = purpose

    # What is noted.

    def holds(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """There are tensors whose making nobody saw."""
        for one in tensors:
            self._came(one.untyped_storage(), purpose)

    def saw(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        outputs: Sequence[Tensor],
        cost: Cost | None = None,
    ) -> None:
        """An operator ran; `outputs` are the tensors of its result."""
        is_new = [self._came(out.untyped_storage(), self.phase) for out in outputs]
        if cost is None:
            if func.is_view or (outputs and not any(is_new) and not _writes(func)):
                return
            cost = cost_of(func, args, result, outputs)
        if func.overloadpacket in _CONVOLUTIONS:
            self.has_convolutions = True
        if not cost.is_counted:
            self.uncounted.add(str(func.overloadpacket))
        if not self._is_cpu:
            if cost.uses_workspace:
                self._take_workspace()
            for num_bytes in temporaries_of(func, args):
                self._borrow(num_bytes)
        if cost.num_bytes or cost.flops:
            dtype = str(outputs[0].dtype) if outputs else ""
            shape = tuple(outputs[0].shape) if outputs else ()
            took = None if self._profile is None else self._profile.time_us(func, args, kwargs)
            self.notes.append(
                notes.Kernel(
                    str(func), cost.flops, cost.num_bytes, self._stream, dtype, shape, took
                )
            )

    def carried(self, calls: Sequence[Call], num_ranks: int) -> None:
        """Collectives were launched together."""
        num_bytes = sum(call.num_bytes for call in calls)
        self.notes.append(notes.Collective(calls[0].kind, num_bytes, num_ranks, self._stream))

    def moment(self, name: str, unit: str = "") -> None:
        """Something that people have a name for happens now."""
        self.notes.append(notes.Moment(name, unit))

    def steps(self) -> list[int]:
        """Where in the notes steps begin."""
        return [at for at, note in enumerate(self.notes) if note == notes.Moment("step")]

    def empty_cache(self) -> None:
        """What a program asks of its allocator."""
        self.notes.append(notes.EmptyCache())

    def owner_of(self, tensor: Tensor) -> int | None:
        """Whose memory a tensor lies in."""
        known = self._owners.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def _came(self, held: torch.UntypedStorage, purpose: str) -> bool:
        key = held._cdata
        if key in self._owners:
            return False
        num_bytes = held.nbytes()
        self._num_owners += 1
        owner = self._num_owners
        self._owners[key] = owner, weakref.ref(held, lambda _: self._gone(key))
        self.purposes[owner] = purpose
        if num_bytes:
            self.notes.append(notes.Allocate(owner, num_bytes, self._stream))
        return True

    def _gone(self, key: int) -> None:
        known = self._owners.pop(key, None)
        if known is not None:
            self.notes.append(notes.Free(known[0]))

    def _borrow(self, num_bytes: int, purpose: str = "temporaries", *, keeps: bool = False) -> None:
        """Memory that one kernel needs, unless it `keeps` it."""
        self._num_owners += 1
        self.purposes[self._num_owners] = purpose
        self.notes.append(notes.Allocate(self._num_owners, num_bytes, self._stream))
        if not keeps:
            self.notes.append(notes.Free(self._num_owners))

    def _take_workspace(self) -> None:
        """What the library of matrix products keeps for each thread that calls it."""
        in_backward = autograd.inside_backward()
        if in_backward not in self._has_workspace:
            self._has_workspace.add(in_backward)
            self._borrow(WORKSPACE_BYTES, "workspaces", keeps=True)


class NotedActions(Recorder):
    """Records the engine's actions; a time is a place in the notes until they were played."""

    def __init__(self, device: NotingDevice) -> None:
        self._noting = device
        self._begin = 0
        self.clock: Sequence[float] = ()
        """When compute came to each place since then, in µs."""
        super().__init__(torch.device("meta"))

    def mark(self) -> float:
        """How many notes were taken so far."""
        return float(len(self._noting.notes))

    def begin(self, action: Action) -> Running:
        """An action is about to be performed."""
        self._noting.moment(str(action.kind), action.unit.name)
        return super().begin(action)

    def since(self, begin: int, clock: Sequence[float]) -> tuple[RecordedAction, ...]:
        """The actions that began at a place or later, by a clock that runs from there."""
        self._performed = [one for one in self._performed if int(cast(float, one.start)) >= begin]
        self._begin, self.clock = begin, clock
        return tuple(self.actions())

    def _us(self, mark: TimeMark) -> float:
        place = min(int(cast(float, mark)) - self._begin, len(self.clock) - 1)
        return self.clock[place] - self.clock[0]


class _NotedLane:
    """A stream of an imagined device."""

    def __init__(self, device: NotingDevice, stream: int) -> None:
        self._device = device
        self._stream = stream
        self._before: list[int] = []

    def __enter__(self) -> _NotedLane:
        device = self._device
        self._before.append(device._stream)
        mark = self._mark(device._stream)
        device._stream = self._stream
        device.notes.append(notes.Wait(mark, self._stream))
        return self

    def __exit__(self, *_: object) -> None:
        self._device._stream = self._before.pop()

    def mark(self) -> int:
        """See `Lane`."""
        return self._mark(self._stream)

    def wait_for(self, event: torch.Event) -> None:
        """See `Lane`; events of a user's own streams are not imagined."""
        raise NotImplementedError(
            "shoal.plan: a step that waits for CUDA events of its own cannot be forecast"
        )

    def join(self, mark: int) -> None:
        """See `Lane`."""
        self._device.notes.append(notes.Wait(mark, self._device._stream))

    def _mark(self, stream: int) -> int:
        device = self._device
        device._num_marks += 1
        device.notes.append(notes.Mark(device._num_marks, stream))
        return device._num_marks


class _Operators(subclasses.QuickDispatchMode):
    """Shows an imagined device the operators that run."""

    def __init__(self, device: NotingDevice) -> None:
        super().__init__()
        self._device = device
        self._known = KnownValues()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(map(torch.is_autocast_enabled, self._device.autocasts)):
            raise UsageError(
                "torch.autocast does nothing on meta tensors, and is not modelled: plan the dtypes "
                "by precision = {...} in the file (MixedPrecisionPolicy)"
            )
        if fakes.FakeTensor in types:  # somebody asks for shapes
            return func(*args, **(kwargs or {}))
        if any(one not in _PLAIN for one in types):
            return NotImplemented  # a tensor of tensors takes itself apart first
        kwargs = kwargs or {}
        if func.is_view:
            return self._view(func, args, kwargs)
        key = SEEN.key(func, args, kwargs)
        answer = None if key is None else SEEN.find(key)
        if answer is not None:
            result, outputs = answer.give()
            cost = answer.cost
        else:
            if func.overloadpacket in ASKING:
                known = self._known.answer(func, args)
                if known is not None:
                    return known
            args = self._known.without_masks(func, args)
            result = _run(func, args, kwargs)
            outputs = _tensors_of(result)
            if any(one.layout is not torch.strided for one in outputs):
                raise UsageError(
                    f"{func} returns a sparse tensor, whose memory depends on values: not modelled"
                )
            if key is not None:
                SEEN.learn(key, func, args, result, outputs)
            cost = None
        if outputs and not outputs[0].is_floating_point():
            self._known.follow(func, args, kwargs, outputs)
        self._device.saw(func, args, kwargs, result, outputs, cost)
        return result

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Most operators are views, which cost nothing: they look at memory that is known."""
        result = func(*args, **kwargs)
        outputs = _tensors_of(result)
        if outputs and not outputs[0].is_floating_point():
            self._known.follow(func, args, kwargs, outputs)
        self._device.holds(outputs, self._device.phase)
        return result


def _tensors_of(result: Any) -> list[Tensor]:
    """Those on meta that an operator returned."""
    if type(result) is Tensor:
        return [result] if result.is_meta else []
    return [one for one in trees.tree_leaves(result) if isinstance(one, Tensor) and one.is_meta]


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    instead: Callable[..., Any] | None = _INSTEAD.get(func.overloadpacket)
    return func(*args, **kwargs) if instead is None else instead(*args, **kwargs)


def _nothing(*_: object, **__: object) -> None:
    """Steps of optimizers in place: they take and return no memory."""


_INSTEAD: dict[Any, Callable[..., Any]] = dict.fromkeys(kernels.FUSED_STEPS, _nothing)


def _writes(func: Any) -> bool:
    return func._schema.is_mutable
