"""A joined loop on one rank: in it as long as there are inputs, then in the shadow of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal._torch import autograd, clipping
from shoal.doors.fsdp1.root import note_run
from shoal.errors import RankError
from shoal.runtime.context import Context
from shoal.runtime.rank_guard import COMPARED, check_order_agrees
from shoal.runtime.unit import Unit
from shoal.step.action import Action, ActionKind, Actions
from shoal.step.machine import Machine
from shoal.step.retelling import REQUESTS, GradientFacts, Listening, Retelling, StepMoment
from shoal.step.unit_step import UnitStep
from shoal.uneven.calls import MirroredCalls, methods_of
from shoal.uneven.facts import Untouched, facts_of, follow_facts
from shoal.uneven.foreign import refusing_collectives
from shoal.uneven.journal import Entry, StepJournal
from shoal.uneven.meeting import Meetings, Outcome, RankStatus

_SENT = frozenset({ActionKind.GATHER, ActionKind.REDUCE})
"""The actions that other ranks take part in."""
_PLACES = {"begin_forward": "the forward", "begin_backward": "the backward"}


class JoinedLoop:
    """One `with shoal.join(…)` block, on one rank."""

    def __init__(
        self, objects: Sequence[object], contexts: Sequence[Context], *, divides_by_all: bool
    ) -> None:
        self._objects = objects
        self._contexts = contexts
        self._units = [unit for context in contexts for unit in context.units]
        self._divides_by_all = divides_by_all
        self._calls = MirroredCalls(objects, contexts)
        self._untouched = Untouched(contexts)
        self._depth = 0
        """How many mirrored calls are running, one in the other."""
        self._done: list[str] = []
        """What other ranks took part in since the last meeting."""
        self._leads = False
        """Whether other ranks do what this one writes down."""
        self._is_shadow = False
        self._is_parted = False
        """Whether a meeting has ended the block on all ranks."""
        self._meetings = Meetings(_ranks_of(self._units, divides_by_all))
        self._journal = StepJournal(self._meetings)
        self._meet(RankStatus.HAS_INPUTS, f"a block for {self._described()}")

    def _described(self) -> str:
        """What is joined, in words that are equal on all ranks."""
        kinds = [type(one).__name__ for one in self._objects]
        units = [[unit.name for unit in context.units] for context in self._contexts]
        return f"{', '.join(kinds)} with the units {units}"

    def close(self) -> None:
        """The block is over."""
        for unit in self._units:
            unit.gradient_scale = 1.0

    # Meetings.

    def _meet(self, status: RankStatus, place: str, failure: str = "") -> Outcome:
        described = [*self._done, place]
        if not failure and not self._is_shadow:
            failure = self._untouched.change()
        if self._leads:
            self._write_facts()
            self._journal.end()
        try:
            outcome = self._meetings.meet(
                RankStatus.HAS_FAILED if failure else status, described, failure
            )
        except RankError as error:
            self._is_parted = True
            if failure and status is not RankStatus.HAS_FAILED:
                raise NotImplementedError(f"shoal.join: {failure}") from error
            raise
        self._done.clear()
        self._journal.begin()
        mine, led = self._meetings.number_in_group, self._leads
        self._leads = outcome.has_shadows and outcome.leader == mine
        if not self._divides_by_all and not outcome.is_over:
            for unit in self._units:
                unit.gradient_scale = outcome.size / len(outcome.with_inputs)
        if self._leads and not led:
            self._write_facts()
        return outcome

    def _write_facts(self) -> None:
        """What the loop has changed since the last meeting."""
        facts = [facts_of(context, self._untouched) for context in self._contexts]
        self._write({"kind": "facts", "contexts": facts}, at_once=False)

    def _write(self, entry: Entry, *, at_once: bool) -> None:
        entry["in_backward"] = autograd.inside_backward()
        self._journal.add(entry, at_once=at_once)

    # As long as there are inputs.

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of everything that shadows have to do, and let them know."""
        with ExitStack() as stack:
            for number, context in enumerate(self._contexts):
                listener = ContextListener(self, number)
                stack.callback(setattr, context, "machine", context.machine)
                listening = Listening(context.machine, listener)
                context.machine = cast(Machine, listening)
                for unit in context.units:
                    unit.told = partial(self._told_by_unit, number, unit, listening)
                    stack.callback(setattr, unit, "told", None)
            for number, one in enumerate(self._objects):
                if isinstance(one, (nn.Module, Optimizer)):
                    _replace_method(stack, one, "zero_grad", partial(self._zero_grad, one))
                if isinstance(one, Optimizer):
                    self._hook_optimizer(stack, number, one)
                    continue
                for name in methods_of(one):
                    _replace_method(stack, one, name, partial(self._call, number, name))
            stack.enter_context(clipping.clipping_through(self._norm, self._clip))
            stack.enter_context(refusing_collectives(lambda: self._depth > 0))
            yield

    def begin(self, name: str, number: int) -> None:
        """A forward or backward of a model is about to begin."""
        self._meet(RankStatus.HAS_INPUTS, f"{_PLACES[name]} of model {number}")
        if name == "begin_backward":
            # The last of these calls comes when the backwards of all models are over.
            autograd.call_after_backward(self._untouched.note)

    def told(self, number: int, moment: StepMoment, actions: Actions) -> None:
        """A model's machine has answered."""
        sent = [action for action in actions if action.kind in _SENT]
        self._done.extend(f"{one} of model {number}" for one in said(sent))
        if self._leads:
            entry = {"kind": "moment", "context": number, "moment": moment}
            self._write({**entry, "actions": said(actions)}, at_once=bool(sent))

    def _told_by_unit(
        self, number: int, unit: Unit, listening: Listening, name: str, actions: Actions
    ) -> None:
        if name != COMPARED:
            listening.requested(name, unit.step, actions)
            return
        self._meet(RankStatus.HAS_INPUTS, f"the first forward of unit {unit.name!r}")
        if self._leads:
            at = self._contexts[number].units.index(unit)
            self._write({"kind": COMPARED, "context": number, "unit": at}, at_once=True)

    def _hook_optimizer(self, stack: ExitStack, number: int, optimizer: Optimizer) -> None:
        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(value is not None for value in (*args[1:], *kwargs.values())):
                raise NotImplementedError(
                    "shoal.join: optimizer.step(closure) is not supported, because ranks without "
                    "inputs have nothing to compute the closure of; call step() without one"
                )
            self._begin_call(number, "step", (), {})

        def after(stepped: Optimizer, _: Any, __: Any) -> None:
            if stepped is optimizer:
                self._end_call()

        stack.callback(optimizer.register_step_pre_hook(before).remove)
        # A global one comes after the engine's, which counts the step.
        stack.callback(register_optimizer_step_post_hook(after).remove)

    def _zero_grad(
        self,
        owner: nn.Module | Optimizer,
        original: Callable[..., Any],
        set_to_none: bool = True,
    ) -> None:
        original(set_to_none=set_to_none)
        owned = (
            owner.parameters()
            if isinstance(owner, nn.Module)
            else (p for group in owner.param_groups for p in group["params"])
        )
        self._untouched.note_zero_grad(owned, set_to_none=set_to_none)

    def _call(
        self, number: int, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._begin_call(number, name, args, kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            self._end_call()

    def _begin_call(
        self, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._depth == 0:
            entry = self._calls.written(number, name, args, kwargs)
            self._meet(RankStatus.HAS_INPUTS, f"{type(self._objects[number]).__name__}.{name}")
            if self._leads:
                self._write(entry, at_once=True)
        self._depth += 1

    def _end_call(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._untouched.note()

    def _norm(self, grads: Any, *args: Any) -> Any:
        """The first half of `clip_grad_norm_`."""
        grads = [grads] if isinstance(grads, torch.Tensor) else list(grads)
        return self._half(
            {"kind": "norm", "parameters": self._calls.numbers_of(grads, are_grads=True)},
            args,
            lambda: clipping.total_norm(grads, *args),
        )

    def _clip(self, parameters: Any, max_norm: float, norm: Any, foreach: bool | None) -> Any:
        """The second half of it."""
        return self._half(
            {
                "kind": "clip",
                "parameters": self._calls.numbers_of(parameters, are_grads=False),
                "max_norm": float(max_norm),
                "foreach": foreach,
            },
            (),
            lambda: clipping.clip_with_norm(parameters, max_norm, norm, foreach),
        )

    def _half(self, entry: Entry, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if self._depth > 0 or not entry["parameters"]:  # of other parameters: nobody else's
            return run()
        self._meet(RankStatus.HAS_INPUTS, f"clip_grad_norm_ ({entry['kind']})")
        if self._leads:
            self._write({**entry, "args": list(args)}, at_once=True)
        self._depth += 1
        try:
            return run()
        finally:
            self._end_call()

    def fail(self, error: BaseException) -> None:
        """The loop raised: let all ranks raise, unless they do."""
        if self._is_parted:
            return
        text = f"{type(error).__name__}: {error}"[:500]
        try:
            self._meet(RankStatus.HAS_FAILED, "an error", text)
        except RankError as verdict:
            error.add_note(f"All ranks have left shoal.join: {verdict}")

    # In the shadow of others.

    def shadow(self) -> None:
        """Do what the ranks do that go on, until none does."""
        self._retellings = [
            Retelling(context.machine, lambda unit, present: unit.owner.gradients.stand_in(present))
            for context in self._contexts
        ]
        self._total: Any = None
        """The last norm that was computed for clipping."""
        entries = self._entries()
        entry = next(entries, None)
        while entry is not None:
            if entry["in_backward"]:
                entry = _inside_backward(partial(self._follow, entries, entry))
            else:
                entry = self._follow(entries, entry)

    def _entries(self) -> Iterator[Entry]:
        while not self._meet(RankStatus.HAS_ENDED, "the end").is_over:
            self._is_shadow = True
            yield from self._journal.read()

    def _follow(self, entries: Iterator[Entry], entry: Entry | None) -> Entry | None:
        """Do what happens outside of backwards, or inside; returns what comes then."""
        is_inside = autograd.inside_backward()
        while entry is not None and entry["in_backward"] == is_inside:
            self._do(entry)
            entry = next(entries, None)
        return entry

    @torch.no_grad()
    def _do(self, entry: Entry) -> None:
        match entry["kind"]:
            case "moment":
                self._tell(entry)
            case "facts":
                for context, facts in zip(self._contexts, entry["contexts"], strict=True):
                    follow_facts(context, facts)
            case "compared":
                unit = self._contexts[entry["context"]].units[entry["unit"]]
                check_order_agrees(unit)
                note_run(unit, [one for one in self._objects if isinstance(one, nn.Module)])
            case "norm":
                self._total = self._calls.norm_again(entry)
            case "clip":
                self._calls.clip_again(entry, self._total)
            case _:
                self._calls.make(entry)

    def _tell(self, entry: Entry) -> None:
        """Let this rank's machine answer a moment of another one's."""
        number = entry["context"]
        context, retelling = self._contexts[number], self._retellings[number]
        name, unit, run, flags, gradients, runs = entry["moment"]
        facts = tuple(GradientFacts(one[0], one[1], one[2], tuple(one[3])) for one in gradients)
        moment = StepMoment(name, unit, run, flags, facts, tuple(map(tuple, runs)))
        if name in REQUESTS:
            request = "reshard" if name == "release" else name
            getattr(context.units[unit], request)()
            return

        def answer() -> Actions:
            actions = retelling.tell(moment)
            mine = said(actions)
            if mine != entry["actions"]:
                raise RankError(
                    f"shoal.join: at {name} of model {number} this rank, which has no more inputs, "
                    f"would do {mine}, and the others do {entry['actions']}: their steps have "
                    "taken different ways before"
                )
            return actions

        context.shadow(name, answer)


class ContextListener:
    """Hears of one model's moments."""

    def __init__(self, loop: JoinedLoop, number: int) -> None:
        self._loop, self._number = loop, number

    def beginning(self, name: str) -> None:
        """See `MomentListener.beginning`."""
        self._loop.begin(name, self._number)

    def told(self, moment: StepMoment, actions: Actions) -> None:
        """See `MomentListener.told`."""
        self._loop.told(self._number, moment, actions)

    def present(self, unit: UnitStep) -> tuple[int, ...]:
        """See `MomentListener.present`."""
        return tuple(sorted(unit.owner.gradients.present()))


def said(actions: Sequence[Action]) -> list[str]:
    """Actions in words."""
    return [str(action) for action in actions]


def _ranks_of(units: Sequence[Unit], divides_by_all: bool) -> tuple[int, ...]:
    """The ranks that a loop is joined over: those of the mesh, or all where there are several."""
    meshes = {tuple(sorted(unit.mesh_info.mesh.mesh.flatten().tolist())) for unit in units}
    if len(meshes) == 1:
        return meshes.pop()
    if not divides_by_all:
        raise NotImplementedError(
            "shoal.join(divide_by_initial_world_size=False) of units on different meshes is not "
            "supported: they would divide by different numbers of ranks"
        )
    return tuple(range(torch.distributed.get_world_size()))


def _replace_method(stack: ExitStack, target: Any, name: str, call: Callable[..., Any]) -> None:
    """Let calls of one object's method go through another function, until the stack is closed."""
    own = vars(target)
    before = own.get(name)
    own[name] = partial(call, getattr(target, name))

    def restore() -> None:
        if before is None:
            del own[name]
        else:
            own[name] = before

    stack.callback(restore)


def _inside_backward(run: Callable[[], Entry | None]) -> Entry | None:
    """Run something where autograd executes a backward, as it was where it comes from."""
    found: list[Entry | None] = []
    start = torch.zeros((), requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        found.append(run())

    with torch.enable_grad():
        end = start * 1
        end.register_hook(hook)
        end.backward()
    return found[0]
