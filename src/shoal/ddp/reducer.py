"""Averages gradients while backward runs.

    gradient is accumulated   → its bucket counts down
    bucket is complete        → copied, all-reduced; in the order of buckets, the same on all ranks
    end of backward           → the rest is launched, all is waited for and put on the parameters

Averaging twice does no harm: the mean of what all ranks share is itself. So every backward averages
all that was accumulated, however many there are, and whatever was accumulated without.

Buckets are first one for each dtype and device. The first backward records in which order
gradients come, and the buckets of the next step follow the order of rank 0.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shoal._torch import autograd
from shoal.comm import observer
from shoal.comm.buckets import BUCKET_MIB, FIRST_BUCKET_MIB, Item, Limits, assign
from shoal.comm.pending import Pending
from shoal.comm.transport import Transport
from shoal.ddp.bucket import Bucket, Named
from shoal.ddp.comm_hook import Hook, run_hook
from shoal.ddp.grad_hooks import WaitingHooks
from shoal.ddp.usage import Usage, reached
from shoal.errors import InvariantError, UsageError
from shoal.runtime.module_state import Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """How one call of `replicate` wants gradients to be averaged."""

    bucket_cap_mb: float = BUCKET_MIB
    first_bucket_mb: float = FIRST_BUCKET_MIB
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "first_bucket_mb"):
            if getattr(self, name) <= 0:
                raise UsageError(
                    f"{name} must be a size in MiB above 0, got {getattr(self, name)}; a small "
                    "one gives every parameter a bucket of its own"
                )


class Reducer:
    """The gradients of one replicated module."""

    def __init__(
        self, named: Sequence[Named], transport: Transport, options: ReducerOptions
    ) -> None:
        self._named = tuple(named)
        self._transport = transport
        self._options = options
        self._hook: Callable[[Bucket], Pending] | None = None
        self.averages = True
        """Whether gradients are averaged; without, they stay this rank's own."""
        self.is_in_graph = False
        """Whether gradients come averaged, from a graph."""
        self.has_own = False
        """Whether forwards may have left gradients that are this rank's own still."""
        self.average_traced: Callable[[Tensor], Tensor] | None = None
        """Averages a gradient in a backward that a compiler traces."""
        self._device = self._named[0][1].device
        self._numbers: dict[Tensor, int] = {p: i for i, (_, p) in enumerate(self._named)}
        self._items = [Item(num_bytes=p.nbytes, key=(p.dtype, p.device)) for _, p in self._named]
        can_miss = options.find_unused_parameters or options.static_graph
        self._usage = Usage(len(named), self._device, transport) if can_miss else None
        self._times = [1] * len(named)
        """How often a backward comes to each parameter."""
        self._left = list(self._times)
        """How often it still has to, in this backward."""
        self._counts = options.static_graph
        """Whether this backward counts that, before it launches anything."""
        records = options.static_graph or not options.find_unused_parameters
        self._order: list[int] | None = [] if records else None
        """The order in which gradients come, while a backward records it; it must reach all."""
        self._recorded: list[int] | None = None
        self._reached: set[int] | None = None
        """The parameters that forwards have reached since the last backward; None if unknown."""
        self._misses_all = False
        """Whether the last forward has shown that its backward comes to no parameter."""
        self._end: weakref.ref[Callable[[], None]] | None = None
        """Called when the backward that runs is over."""
        self._has_begun = False
        """Whether that backward accumulates gradients, which `autograd.grad` does not."""
        self._build(assign(self._items, range(len(named)), Limits(num_bytes=sys.maxsize)))
        self._waiting: set[WaitingHooks] = set()
        self._user_hooks = [
            WaitingHooks(parameter, _marker(self, number), self._waiting)
            for number, (_, parameter) in enumerate(self._named)
        ]

    def _build(self, assigned: Sequence[tuple[int, ...]]) -> None:
        self._buckets = [
            Bucket(
                (index, len(assigned)), members, [self._named[i] for i in members], self._transport
            )
            for index, members in enumerate(assigned)
        ]
        self._bucket_of = {number: one for one in self._buckets for number in one.members}
        self._forget()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients these are."""
        return [parameter for _, parameter in self._named]

    def average_by(self, state: object, hook: Hook) -> None:
        """Let a communication hook average the buckets."""
        if not callable(hook):
            raise UsageError(f"a communication hook must be callable, got {hook!r}")
        if self._hook is not None:
            raise InvariantError(
                "register_comm_hook was called before on this module; a hook stays, so compose "
                "both into one function"
            )
        self._hook = partial(run_hook, hook, state)

    def begin_forward(self, *, averages: bool, in_graph: bool) -> None:
        """Say how gradients of the backwards to come are averaged. Also traced."""
        self.averages = averages
        self.is_in_graph = in_graph
        if not averages:
            self.has_own = True

    def before_forward(self) -> None:
        """Clear away a backward that was broken off; take the recorded order over. Collective."""
        observer.begin_step()
        if self._end is not None:
            self._forget()
        if self._recorded is not None:
            order = _agreed(self._recorded, len(self._named), self._device, self._transport)
            self._recorded = None
            sizes = self._options.bucket_cap_mb, self._options.first_bucket_mb
            self._build(assign(self._items, order, Limits.of_ddp(*sizes)))

    def after_forward(self, output: object) -> None:
        """Be told when backward begins, and what it will come to."""
        reach = Reach.of(output)
        for tensor in reach.differentiable:
            autograd.hook_gradient(tensor, self._on_backward)
        if reach.is_opaque or not reach.differentiable:  # what cannot be looked into leads anywhere
            self._misses_all = False
            return
        numbers = reached(reach.differentiable, self._numbers)
        if self._options.find_unused_parameters and not self._options.static_graph:
            found = set(numbers)
            self._reached = found | (self._reached or set())
            self._misses_all = not found
        else:
            self._misses_all = next(numbers, None) is None

    def _on_backward(self, _: Tensor) -> None:
        # Through an output, since a reentrant checkpoint's backward inside this one ends early.
        if self.averages and not self._is_running() and not torch.compiler.is_compiling():
            self._expect_end()

    def _is_running(self) -> bool:
        return self._end is not None and self._end() is not None

    def _expect_end(self) -> None:
        """A backward runs, of which it is not known whether it accumulates gradients."""
        if self._end is not None:  # another one broke off before it ended
            self._forget()

        def end() -> None:
            # The other ranks wait for one whose outputs come from no parameter at all.
            if not self._has_begun and not self._misses_all:
                self._end = None  # all else is for the backward that is still to come
                return
            try:
                self._finish()
            finally:
                self._forget()

        self._end = weakref.ref(end)
        autograd.call_after_backward(end)

    def _begin(self) -> None:
        """The first gradient of a backward was accumulated."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "shoal: backward(create_graph=True) through a replicated module is not supported: "
                "averages cannot be differentiated; take it in no_sync(), or with autograd.grad"
            )
        if not self._is_running():
            self._expect_end()
        self._has_begun = True
        if self._reached is not None:
            for number in set(range(len(self._named))) - self._reached:
                self._left[number] = 0
                self._bucket_of[number].missing -= 1
            self._reached = None
            self._launch_complete()

    def mark(self, number: int) -> None:
        """A gradient was accumulated."""
        if self.is_in_graph:
            if self._waiting:
                self._call_user_hooks(number)
            return
        if self._usage is not None:
            self._usage.note(number)
        if not self.averages:
            return
        if not self._has_begun or self._end is None or self._end() is None:
            self._begin()
        if self._order is not None:
            self._order.append(number)
        left = self._left[number] = self._left[number] - 1
        if self._counts:
            return
        if left:
            if left < 0:
                self._mark_again(number)
            return
        bucket = self._bucket_of[number]
        bucket.note_stream()
        bucket.missing -= 1
        if not bucket.missing:
            self._launch_complete()

    def mark_traced(self, number: int) -> None:
        """A gradient was accumulated by a backward that a compiler traces: average it there."""
        grad = self._named[number][1].grad
        if self.averages and not self.is_in_graph and grad is not None:
            assert self.average_traced is not None
            grad.copy_(self.average_traced(grad))
        if self._waiting:
            raise NotImplementedError(
                "shoal: register_post_accumulate_grad_hook on parameters of a replicated module "
                "is not supported where backward is traced; run it without compiled autograd"
            )

    def _mark_again(self, number: int) -> None:
        """More often than expected: no harm, as long as the bucket has not been copied."""
        bucket = self._bucket_of[number]
        bucket.note_stream()
        if not bucket.is_launched:
            return
        name = self._named[number][0]
        raise InvariantError(
            f"backward came to parameter {name!r} after its gradient was sent to the other ranks. "
            "Either a checkpoint with use_reentrant=True recomputes a module that is used more "
            "than once: use use_reentrant=False, or static_graph=True if every step is alike. Or, "
            "with find_unused_parameters=True, the loss comes from something that forward did "
            "not return: return it."
        )

    def _launch_complete(self) -> None:
        buckets = self._buckets
        while self._next < len(buckets) and not buckets[self._next].missing:
            self._launch_next()

    def _launch_next(self) -> None:
        if self._hook is not None and self._next and self._device.type == "cpu":
            # gloo calls what follows a future on its few threads. Hooks that communicate there
            # (PowerSGD) would come in another order on each rank, and occupy all threads.
            self._buckets[self._next - 1].wait()
        self._buckets[self._next].launch(self._hook)
        self._next += 1

    def _finish(self) -> None:
        """Backward is over: launch the rest, wait, hand out."""
        while self._next < len(self._buckets):
            self._launch_next()  # also what is not complete: the other ranks wait for it
        if self._usage is not None and not self._usage.is_settled:
            self._usage.launch()
        for bucket in self._buckets:
            bucket.wait()
        unused = frozenset() if self._usage is None else self._usage.unused_everywhere()
        self.has_own = False
        for bucket in self._buckets:
            bucket.deliver(as_views=self._options.gradient_as_bucket_view, skipped=unused)
        for number in range(len(self._named)) if self._waiting else ():
            if number not in unused:
                self._call_user_hooks(number)
        if self._order is not None:
            # On every rank, also on one that complains: the next forward agrees on the order.
            self._order, self._recorded = None, list(self._order)
        if self._counts:
            assert self._usage is not None
            self._usage.is_settled = True
            self._times = [-left for left in self._left]
            self._counts = False
        elif self._usage is None or self._usage.is_settled:
            missed = [number for number, left in enumerate(self._left) if left > 0]
            if missed:
                raise InvariantError(self._complaint(missed))

    def _call_user_hooks(self, number: int) -> None:
        """Call the hooks of a parameter that have waited for its average."""
        hooks = self._user_hooks[number]
        if hooks in self._waiting:
            hooks.call(self._named[number][1])

    def _complaint(self, missed: Sequence[int]) -> str:
        names = ", ".join(repr(self._named[number][0]) for number in missed)
        return (
            f"backward on rank {self._transport.rank} did not come to {len(missed)} of "
            f"{len(self._named)} parameters: {names}. Their gradients were averaged as zero. "
            "If the loss does not depend on them in every step, on every rank, call "
            "replicate(module, find_unused_parameters=True); if it never does, freeze them "
            "(requires_grad_(False)) before replicate, or pass them as ignored_params."
        )

    def _forget(self) -> None:
        """Be ready for another backward."""
        self._end = None
        self._has_begun = False
        self._next = 0
        self._reached = None
        self._misses_all = False
        times = [0] * len(self._times) if self._counts else self._times
        self._left = list(times)
        for bucket in self._buckets:
            bucket.missing = sum(1 for number in bucket.members if self._times[number])
            bucket.forget()
        if self._order is not None:
            self._order.clear()


def _marker(reducer: Reducer, number: int) -> Callable[[Tensor], None]:
    # Weak: a hook that keeps its parameter alive is nothing that garbage collection can see.
    reference = weakref.ref(reducer)

    def mark(_: Tensor) -> None:
        alive = reference()
        if alive is None:
            return
        if torch.compiler.is_compiling():
            alive.mark_traced(number)
        else:
            alive.mark(number)

    return mark


def _agreed(
    order: Sequence[int], num_parameters: int, device: torch.device, transport: Transport
) -> list[int]:
    """The order of the first rank, by when each number came last; those that never came at the end.

    Collective.
    """
    last = list(dict.fromkeys(reversed(order)))
    last.reverse()
    last.extend(set(range(num_parameters)).difference(last))
    numbers = torch.tensor(last, dtype=torch.int64, device=device)
    return transport.broadcast(numbers, 0, reason="order of gradients").wait().tolist()
