"""Two hundred deaths dealt out to jobs: aimed at phases, or at any moment; always the same."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from survival.jobs import Order

IN_STEPS = [
    "forward", "backward", "reduction", "optimizer", "parity", "parity sent", "parity done",
]  # fmt: skip
AIMED = [*IN_STEPS, "saving", "joining", "recovering"]
ANY_TIME = "any time"
NUM_AIMED_EACH = 15
NUM_DEATHS = 200
MOST_RANKS = 8
GAP = 7
"""Steps from one death to the next: by then all know the parity of the ranks that were left."""


@dataclass
class Job:
    """One run with several deaths."""

    num_ranks: int
    plan: dict[str, Any]
    orders: list[Order] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Who dies, in this order."""
    phases: list[str] = field(default_factory=list)
    unnoticed: set[int] = field(default_factory=set)
    """Those of them that die while the others do not train but meet."""


def all_jobs(seed: int = 0) -> list[Job]:
    draw = random.Random(seed)
    deck = [phase for phase in AIMED for _ in range(NUM_AIMED_EACH)]
    deck += [ANY_TIME] * (NUM_DEATHS - len(deck))
    draw.shuffle(deck)
    jobs = []
    while deck:
        num = draw.randint(3, 5)
        jobs.append(_Dealer(draw, deck[:num]).job)
        deck = deck[num:]
    return jobs


class _Dealer:
    """Makes one job: each death waits until all know of the one before."""

    def __init__(self, draw: random.Random, phases: list[str]) -> None:
        num_ranks = draw.randint(4, MOST_RANKS)
        self.draw = draw
        self.alive = list(range(num_ranks))
        self.keeper = draw.choice(self.alive)  # who can tell the whole story
        self.next_member = num_ranks
        self.num_events = 0
        self.step = draw.randint(1, 3)
        parities = 2 if "recovering" in phases else 1
        plan = {
            "samples": draw.randint(MOST_RANKS, 2 * MOST_RANKS),
            "layout": draw.choice(["even", "flat", "rows"]),
            "optimizer": draw.choice(["adamw", "sgd"]),
            "parities": parities,
            "pause_s": draw.choice([0, 0.005]),
            "saves": [],
            "wait_for_events": {},
            "limit_s": 110,
        }
        self.job = Job(num_ranks, plan)
        for phase in phases:
            while len(self.alive) < (5 if phase == "recovering" else 3):
                self._join()
            if len(self.alive) < MOST_RANKS and draw.random() < 0.25:
                self._join()
            self._deal(phase)
        plan["steps"] = self.step + draw.randint(1, 4)

    def _deal(self, phase: str) -> None:
        self.job.phases.append(phase)
        if phase == "joining":
            self._die_joining()
        elif phase == "recovering":
            self._doom(self._victim(), self.draw.choice(IN_STEPS[:4]))
            self._doom(self._victim(), self.draw.choice(["deciding", "rebuilding"]), notes=False)
        elif phase == ANY_TIME:
            victim, delay_s = self._victim(), self.draw.uniform(0, 0.06)
            self.job.orders.append(Order(step=self.step, victim=victim, delay_s=delay_s))
            self._die(victim)
        else:
            if phase == "saving":
                self.job.plan["saves"].append(self.step + 1)
            self._doom(self._victim(), phase)
        self._rest()

    def _die_joining(self) -> None:
        """One that joins dies, or another while it does."""
        joiner = self.next_member
        self._join(rests=False)
        moment = self.draw.choice(["deciding", "rebuilding"])
        if self.draw.random() < 0.5:
            self.alive.remove(joiner)
            self._doom(joiner, moment, notes=False, step=-1)
        else:
            self._doom(self._victim(besides=joiner), moment, notes=False)

    def _join(self, *, rests: bool = True) -> None:
        if len(self.alive) == MOST_RANKS:  # there are no more samples in a batch
            self.job.orders.append(Order(step=self.step, victim=(victim := self._victim())))
            self._die(victim)
            self._rest()
        self.job.orders.append(Order(step=self.step))
        self.alive.append(self.next_member)
        self.next_member += 1
        self.num_events += 1
        self.step += 1
        self.job.plan["wait_for_events"][self.step] = self.num_events
        if rests:
            self._rest()

    def _victim(self, besides: int = -1) -> int:
        found = self.draw.choice([m for m in self.alive if m not in (self.keeper, besides)])
        self.alive.remove(found)
        return found

    def _doom(self, member: int, phase: str, *, notes: bool = True, step: int = 0) -> None:
        moments = self.job.plan.setdefault(str(member), [])
        moments.append([step or self.step, phase])
        if not notes:
            self.job.unnoticed.add(member)
        self._die(member)

    def _die(self, member: int) -> None:
        self.job.lost.append(member)
        self.num_events += 1

    def _rest(self) -> None:
        self.job.plan["wait_for_events"][self.step + 3] = self.num_events
        self.step += GAP


def num_by_phase(jobs: list[Job]) -> Counter[str]:
    return Counter(phase for job in jobs for phase in job.phases)
