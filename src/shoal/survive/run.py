"""The door for own loops: steps that are applied on all ranks or on none.

    with survive(model, optimizer, batches) as run:
        for step in run:
            with step:
                loss = model(step.batch).mean() * step.weight
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

When a rank dies, `with step` ends early on the others; they regroup, and the loop goes on with the
step whose state all of them have.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shoal.errors import RankError, UsageError
from shoal.survive.corruption import CorruptionChecks, CorruptionError
from shoal.survive.environment import membership
from shoal.survive.generation import Generation, leave_groups, synchronise
from shoal.survive.launcher import FALLEN, LostStateError
from shoal.survive.protection import KeptVersion, Protection, drop_frames
from shoal.survive.rebuild import Succession, rebuild_images, reshard
from shoal.survive.roster import Decision, EventLog, Protected, Roster
from shoal.survive.shares import Batches, check_shares, share_in
from shoal.survive.snapshots import Snapshots
from shoal.survive.state import Rest, Stateful, TrainingState
from shoal.survive.watcher import Watcher

PATIENCE_S = 5.0
"""How long a failed collective may wait for the news that a rank died, before it is an error."""

_POLL_S = 0.005
_SPARE_POLL_S = 0.02
"""One that joins may wait for long, beside others that need the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How the ranks went on."""

    members: tuple[int, ...]
    version: int
    """The step that they went on from."""
    num_undone: int
    """How many steps this rank had begun or done beyond it."""
    seconds: dict[str, float]
    """What it took: break off, agree, form, rebuild, reshard."""


class SurvivingRun:
    """The steps of a training, on however many ranks there are."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        data: Batches,
        stateful: Sequence[Stateful],
        num_parities: int,
        start: int,
        snapshots: Path | None = None,
    ) -> None:
        self._place = membership()
        self._state = TrainingState(model, optimizers, stateful)
        self._data = data
        self._snapshots = None if snapshots is None else Snapshots(snapshots, self._state)
        self._num_parities = num_parities
        self.version = start
        """How many steps are applied."""
        self.recoveries: list[Recovery] = []
        """What happened so far."""
        self._held = ExitStack()
        self._watcher: Watcher
        self._roster: Roster
        self._generation: Generation | None = None
        self._number = 0
        self._num_events = 0
        self._notice = 0
        self._is_writing = False
        self._saved = start
        self._protections: list[Protection] = []
        self._generations: dict[int, Protected] = {}
        self._seconds: dict[str, float] = {}
        self._seconds_to_break_off = 0.0
        self._step: Step | None = None
        self._has_applied = False
        self._stepped: set[Optimizer] = set()
        self._undone_at = -1
        self.has_left = False
        """Whether this process was asked to go, and the others go on without it."""

    # What users ask.

    def resize(self, world_size: int) -> None:
        """Ask the launcher for so many ranks; all ranks call it alike, and go on meanwhile.

        Processes come and go between steps, one after another.
        """
        if world_size < 1:
            raise UsageError(f"expected 1 rank or more, got {world_size}")
        if self.version < len(self._data):
            check_shares(self._data[self.version], world_size)
        self._store.set("resize", str(world_size))

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers whose state is protected."""
        return self._state.optimizers

    def protect(self) -> None:
        """Wait until the state that a step begins with is one that no death can take back.

        Call it in the step, before what must not be undone, such as saving that state.
        """
        self._settle()

    @property
    def rank(self) -> int:
        """This process's rank at present."""
        assert self._generation is not None
        return self._generation.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are at present."""
        assert self._generation is not None
        return len(self._generation.members)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the present ranks; older ones raise."""
        assert self._generation is not None
        return self._generation.mesh

    @property
    def num_sent_bytes(self) -> int:
        """What this rank has sent for its last parity."""
        return self._protections[-1].num_sent_bytes

    @property
    def num_kept_bytes(self) -> int:
        """What this rank keeps beside its state: images and parities of the last versions."""
        return sum(protection.num_kept_bytes for protection in self._protections)

    # The beginning and the end.

    def __enter__(self) -> Self:
        place, info = self._place, self._state.first_info
        self._backend = dist.get_backend_config(info.shard_process_group)
        self._device_type = info.mesh.device_type
        self._axis_names = tuple(info.mesh.mesh_dim_names or ())
        if not place.joins and info.shard_mesh_size != place.num_ranks:
            raise UsageError(
                f"survive needs a model that is sharded over all {place.num_ranks} ranks, got one "
                f"over {info.shard_mesh_size}"
            )
        self._check_group(place.num_ranks)
        if not place.joins:  # alone it would make the whole state of an optimizer
            self._state.check_probe()
            found = None if self._snapshots is None else self._snapshots.load()
            self.version = self.version if found is None else found
        self._saved = self.version
        store = place.address.connect()
        self._store = store
        self._roster = Roster(store, EventLog(store), place.member, place.num_ranks)
        self._watcher = self._held.enter_context(Watcher(place.address))
        _runs[self._state.model] = self
        self._held.callback(_runs.pop, self._state.model, None)
        for optimizer in self._state.optimizers:
            handle = optimizer.register_step_pre_hook(self._before_optimizer)
            self._held.callback(handle.remove)
        try:
            if place.joins:
                self._join()
            else:
                self._begin()
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for protection in self._protections[-1:]:
            protection.stop()  # watched still: another rank may die and let this one wait
        self._watcher.watch(None)
        self._held.close()

    def _check_group(self, num_ranks: int) -> None:
        """Refuse parities that a group of this size cannot have; before anything is changed."""
        if self._num_parities not in (1, 2):
            raise UsageError(f"expected 1 or 2 parities, got {self._num_parities}")
        if num_ranks <= self._num_parities:
            raise UsageError(
                f"{self._num_parities} parities need {self._num_parities + 1} ranks or more, got "
                f"{num_ranks}"
            )

    def _begin(self) -> None:
        members = tuple(range(self._place.num_ranks))
        layout, rest = self._state.layout(), self._state.rest()
        held = self._state.locals()
        self._number = 1
        leave_groups()
        self._form(members)
        assert self._generation is not None
        for new, old in zip(
            self._state.take_over(self._generation.info, layout, rest), held, strict=True
        ):
            new.detach().copy_(old)
        self._tell_checks(is_undone=False)
        self._protect(rest)

    def _tell_checks(self, *, is_undone: bool) -> None:
        """Let checks for corruption follow the units to their new groups."""
        for inspector in {unit.inspector for unit in self._state.units}:
            if isinstance(inspector, CorruptionChecks):
                inspector.moved(is_undone=is_undone)

    def _join(self) -> None:
        self._store.set(f"arrivals/{self._place.member}", "1")
        self._number = 1
        leave_groups()
        self._regroup()

    # Steps.

    def __iter__(self) -> Iterator[Step]:
        while True:
            while self.version < len(self._data) and not self.has_left:
                assert self._generation is not None
                batch, weight = share_in(
                    self._data[self.version], self._generation.rank, self.world_size
                )
                step = Step(self, self.version, batch, weight)
                yield step
                if not step.is_over:
                    raise UsageError(
                        "a step was not run: write `for step in run:` and `with step:` inside"
                    )
            if self.has_left:
                return
            try:  # a rank may die when others have done their last step
                self._settle()
                if self._snapshots is not None:
                    self._snapshots.finish()
                self._part()
            except Exception as error:
                if not self._recover(error):
                    raise
                continue
            return

    def _part(self) -> None:
        """Wait until all have done their last step: none may need the others any more."""
        generation = self._generation
        assert generation is not None
        key = f"parted/{generation.number}"
        self._store.set(f"{key}/{self._place.member}", "1")
        keys = [f"{key}/{member}" for member in generation.members]
        while not self._store.check(keys):
            if self._watcher.has_lost(generation.members):
                raise RankError("a rank died after its last step")
            time.sleep(_POLL_S)

    def _open(self, step: Step) -> None:
        self._step = step
        self._has_applied = False
        self._stepped.clear()

    def _close(self, error: BaseException | None) -> bool:
        """A step is over; returns whether its error was dealt with."""
        self._step = None
        if error is None:
            try:
                self._finish()
                return True
            except Exception as failure:
                if self._recover(failure):
                    return True
                raise
        if not isinstance(error, Exception):
            return False
        return self._recover(error)

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if self._step is None:
            raise UsageError("optimizer.step() outside of `with step:`; survive cannot undo that")
        self._stepped.add(optimizer)
        if not self._has_applied:
            self._apply()

    def _apply(self) -> None:
        self._settle()
        if self._snapshots is not None and not self._is_writing and self._saved < self.version:
            self._saved = self.version
            self._snapshots.start(self.version)
        self._protections[-1].versions.begin_apply()
        self._has_applied = True

    def _settle(self) -> None:
        """Wait for the parity of the state that the running step began with."""
        notice, is_writing = self._protections[-1].settle()
        assert self._generation is not None
        self._generation.check()
        self._notice = max(self._notice, notice)
        self._is_writing = is_writing > 0
        del self._protections[:-1]  # all can be rebuilt from this one

    def _finish(self) -> None:
        """The block has come to its end: there is a new version."""
        if not self._has_applied:  # such as one that a gradient scaler has skipped
            self._apply()
        assert self._generation is not None
        self._generation.check()
        self._protections[-1].versions.end_apply()
        self.version += 1
        carries = self._state.carry_gradients(self._stepped)
        self._protections[-1].begin(self._state.rest(), self._notices)
        if carries:  # the next backward writes them
            self._settle()
        if self._is_changing:  # all ranks have been told so by the same notice
            self._settle()
            synchronise(self._state.device)
            self._regroup()

    @property
    def _notices(self) -> tuple[int, int]:
        """What this rank tells the others beside its parity: news, and whether it writes."""
        is_writing = self._snapshots is not None and self._snapshots.is_writing
        return self._watcher.num_events, int(is_writing)

    @property
    def _is_changing(self) -> bool:
        """Whether ranks have come or gone that the present groups do not know of."""
        return self._notice > self._num_events

    # When a rank is gone, or one has come.

    def _recover(self, error: Exception) -> bool:
        """Go on without those who died; False if nobody did, so that it is an error like others."""
        generation = self._generation
        assert generation is not None
        if isinstance(error, CorruptionError):
            return self._undo_corruption(error)
        if not self._lost_one(generation.members, error):
            return False
        drop_frames(error)
        self._break_off()
        self._regroup()
        return True

    def _undo_corruption(self, error: CorruptionError) -> bool:
        """Go back to the state that was kept before bits flipped, which all ranks raise alike.

        Once for a version: if it comes again, the kept state has it too, or it is no accident. On
        CUDA it is told a step too late.
        """
        if self._undone_at == self.version or self._state.device.type == "cuda":
            return False
        self._undone_at = self.version
        drop_frames(error)
        try:
            self._settle()
        except Exception as failure:
            return self._recover(failure)
        self._regroup()
        return True

    def _break_off(self) -> None:
        """End what is on its way in the present groups, of which a member is gone."""
        began = time.monotonic()
        if self._generation is not None:
            self._generation.cut()
        for protection in self._protections:
            protection.stop()
            protection.forget_failure()
        synchronise(self._state.device)
        self._seconds_to_break_off = time.monotonic() - began

    def _regroup(self) -> None:
        """Agree, form new groups, rebuild; again if somebody dies meanwhile."""
        while True:
            began = time.monotonic()
            # Others may need the groups until they have made their offers.
            decision = self._decide()
            self._watcher.watch(None)
            if self._generation is not None:
                self._generation.leave()
                self._generation = None
            if decision is None:
                self.has_left = True
                return
            agreed = time.monotonic()
            try:
                self._form(decision.members)
                formed = time.monotonic()
                self._rebuild(decision)
            except Exception as error:
                if not self._lost_one(decision.members, error):
                    raise
                drop_frames(error)
                self._break_off()
                continue
            self._store.set(f"entered/{self._place.member}", "1")
            if self._snapshots is not None:
                self._snapshots.give_up()
            assert decision.footing is not None
            seconds = {
                "break off": self._seconds_to_break_off,
                "agree": agreed - began,
                "form": formed - agreed,
                **self._seconds,
            }
            self.recoveries.append(
                Recovery(
                    members=decision.members,
                    version=decision.footing.whole,
                    num_undone=self._num_undone,
                    seconds=seconds,
                )
            )
            return

    def _lost_one(self, members: tuple[int, ...], error: Exception) -> bool:
        """Whether one of the members died, of which the news may be slower than the error."""
        deadline = time.monotonic() + (PATIENCE_S if isinstance(error, RuntimeError) else 0.0)
        while not self._watcher.has_lost(members):
            if self._watcher.is_alone:
                raise RankError(
                    "the launcher is gone, whose store the ranks meet in: nobody could go on "
                    "after a death. Start again from the last checkpoint"
                ) from error
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _decide(self) -> Decision | None:
        """What all agree on; None if they go on without this process, as it was asked to leave."""
        while True:
            self._number += 1
            footings = [p.footing for p in self._protections]
            self._roster.offer(self._number, [f for f in footings if f is not None])
            decision = None
            while decision is None:
                if self._generations:
                    decision = self._roster.try_to_decide(self._number, self._generations)
                else:
                    decision = self._roster.decided(self._number)
                if decision is None:
                    time.sleep(_POLL_S if self._generations else _SPARE_POLL_S)
            if self._place.member in decision.members:
                break
            if self._protections:
                return None
        self._num_events = decision.num_events
        if decision.footing is None:
            self._store.set(FALLEN, "1")
            raise LostStateError(
                f"too many ranks are lost: of the members {sorted(decision.members)} that are "
                "left, none has a parity from which the others' state could be rebuilt. Start "
                "again from the last checkpoint"
            )
        return decision

    def _form(self, members: tuple[int, ...]) -> None:
        generation = Generation(self._number, members, self._place.member)
        self._generation = generation
        self._watcher.watch(generation)
        generation.form(self._place.address, self._backend, self._device_type, self._axis_names)

    def _rebuild(self, decision: Decision) -> None:
        footing, generation = decision.footing, self._generation
        assert footing is not None
        assert generation is not None
        began = time.monotonic()
        source = next((p for p in self._protections if p.generation == footing.generation), None)
        if source is not None:
            source.go_back(footing.whole)
        kept = None if source is None else source.kept[footing.whole]
        told = _tell(source, kept, generation)
        succession = Succession(told.members, decision.members)
        images = rebuild_images(
            kept, told.kept.rows, succession, generation.parity, self._state.device
        )
        rebuilt = time.monotonic()
        rest = told.kept.rest if kept is None else kept.rest
        layout = told.kept.layout
        new_locals = self._state.take_over(generation.info, layout, rest)
        packings = [unit.shards.whole for unit in self._state.units]
        reshard(images, layout, succession, packings, new_locals, generation.parity)
        self._tell_checks(
            is_undone=told.members == decision.members and self.version == footing.whole
        )
        self._seconds = {"rebuild": rebuilt - began, "reshard": time.monotonic() - rebuilt}
        self._num_undone = 0 if kept is None else max(self.version - footing.whole, 0)
        self.version = footing.whole
        self._saved = self.version  # the same on all ranks, also on one that has joined
        self._generations.setdefault(footing.generation, self._protected_by(told.members))
        self._protections = [] if source is None else [source]
        self._protect(rest)

    def _protect(self, rest: Rest) -> None:
        generation = self._generation
        assert generation is not None
        protected = self._protected_by(generation.members)
        protection = Protection(
            generation,
            self._state,
            protected.num_parities,
            self.version,
        )
        self._generations[generation.number] = protected
        self._protections.append(protection)
        protection.begin(rest, self._notices)

    def _protected_by(self, members: tuple[int, ...]) -> Protected:
        """As many parities as were asked for, or as few ranks can have."""
        return Protected(members=members, num_parities=min(self._num_parities, len(members) - 1))


_runs: WeakKeyDictionary[nn.Module, SurvivingRun] = WeakKeyDictionary()
"""Those that go on at the moment."""


def run_of(model: nn.Module) -> SurvivingRun:
    """The run that a model is trained in."""
    run = _runs.get(model)
    if run is None:
        raise UsageError(
            f"this {type(model).__name__} is not trained under survive: write `with survive(model, "
            "optimizer, data) as run:` around the loop, with the same model"
        )
    return run


class Step:
    """One step of a run: what to train on, and the block that may be left early."""

    def __init__(self, run: SurvivingRun, number: int, batch: Any, weight: float) -> None:
        self.number = number
        """How many steps were applied before it; the same step may come again after a death."""
        self.batch = batch
        """This rank's samples of the global batch."""
        self.weight = weight
        """What to multiply a mean over these samples with; 1 where all ranks have as many."""
        self.is_over = False
        """Whether its block was left, in whichever way."""
        self._run = run

    def __enter__(self) -> Self:
        self._run._open(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.is_over = True
        return self._run._close(error) and error is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What those who were there tell those who join."""

    members: tuple[int, ...]
    kept: KeptVersion


def _tell(source: Protection | None, kept: KeptVersion | None, generation: Generation) -> _Told:
    """Give all ranks the layout and the rest of a version; its image stays where it is."""
    teller = next(rank for rank, has in enumerate(_all_have(kept is not None, generation)) if has)
    told: list[Any] = [None]
    if source is not None and kept is not None:
        light = KeptVersion(
            layout=kept.layout,
            rows=kept.rows,
            image=kept.image[:0].clone(),
            parity=kept.parity[:0].clone(),
            rest=kept.rest,
        )
        told = [_Told(members=source.members, kept=light)]
    dist.broadcast_object_list(told, src=teller)
    return told[0]


def _all_have(own: bool, generation: Generation) -> list[bool]:
    found: list[Any] = [None] * len(generation.members)
    dist.all_gather_object(found, own)
    return found
