"""A loss or gradient that is not finite on one rank: all ranks decide alike, nothing changes."""

import itertools
import math
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from harness import on_ranks
from shoal.train.build import build_model, shard_model
from shoal.train.checkpoints import CheckpointSaver
from shoal.train.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from shoal.train.environment import Place
from shoal.train.model import next_token_loss
from shoal.train.optimizer import LossScale, make_optimizer, set_learning_rate
from shoal.train.run_folder import RunFolder
from shoal.train.step import training_step
from shoal.train.step_gate import MOST_SKIPPED, StepGate
from shoal.train.world import World, make_mesh

# 2 ranks x loss or gradient x 3 values x 2 precisions x 2 accumulations, less what says the same.
CASES = [
    dict(zip(("rank", "where", "value", "precision", "accumulate"), case, strict=True))
    for number, case in enumerate(
        itertools.product(
            (0, 1), ("loss", "grad"), (math.nan, math.inf, -math.inf), ("fp32", "bf16"), (1, 2)
        )
    )
    if number % 8 != 5 and number % 4 != 2
]
assert len(CASES) == 30


def make_config(precision, accumulate: int = 1, engine="fully_shard") -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(dim=8, layers=1, heads=2, context=8),
        data=DataConfig(max_bytes=5_000),
        parallel=ParallelConfig(device="cpu", precision=precision, engine=engine),
        run=RunConfig(batch_size=4, accumulate=accumulate, out=Path("/nowhere"), name="run"),
    )


class Trial:
    """A model of one rank, with a loss that can be made bad."""

    def __init__(self, config: TrainConfig, on_nonfinite) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        place = Place(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
        self.world = World(
            place=place, device=torch.device("cpu"), mesh=make_mesh("cpu", size, replicas=1)
        )
        folder = RunFolder(Path(tempfile.mkdtemp()))
        saver = CheckpointSaver(folder, config, self.world, saved=None)
        scale = LossScale.for_precision(config.parallel.precision)
        self.gate = StepGate(self.world, on_nonfinite, lambda: False, saver, scale)
        self.config = config
        self.model = shard_model(build_model(config), config, self.world)
        self.optimizer = make_optimizer(self.model, config.optim)
        set_learning_rate(self.optimizer, 0.1)

    def step(self, number: int, *, rank: int = -1, where: str = "", value: float = 0.0) -> None:
        """Take a step; the last micro-batch of `rank` has a bad loss, or bad gradients."""
        calls = itertools.count(1)

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            is_bad = rank == self.world.rank and next(calls) == self.config.run.accumulate
            if is_bad and where == "grad":
                logits = logits * 1.0
                logits.register_hook(lambda grad: torch.full_like(grad, value))
            # A bad loss whose gradients are good: only telling each other the losses shows it.
            return next_token_loss(logits, targets) + (value if is_bad and where == "loss" else 0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.train.step.next_token_loss", loss)
            training_step(
                self.model,
                self.optimizer,
                torch.randint(0, 256, (2, 9)).chunk(self.config.run.accumulate),
                clip=1.0,
                accept=partial(self.gate.admits, number),
                scale=self.gate.scale.factor,
            )

    def everything(self) -> list[torch.Tensor]:
        """Copies of the weights and of what the optimizer remembers."""
        found = [parameter.detach() for parameter in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [(t.to_local() if isinstance(t, DTensor) else t).clone() for t in found]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def judge(case: dict, on_nonfinite: str) -> tuple[str, tuple[str, ...], bool, bool]:
    """One good step, the bad one, a good one: what was said, and what moved."""
    bad = {name: case[name] for name in ("rank", "where", "value")}
    trial = Trial(make_config(case["precision"], case["accumulate"]), on_nonfinite)
    trial.step(1)
    assert not trial.gate.notes
    before = trial.everything()
    trial.step(2, **bad)
    said = trial.gate.diverged, trial.gate.notes
    stayed = same(before, trial.everything())
    trial.step(3)
    return *said, stayed, same(before, trial.everything())


def judge_all() -> list[tuple]:
    answers = [judge(case, "skip") for case in CASES]
    return answers + [judge(case, "stop") for case in CASES[::6]]


def test_thirty_bad_numbers_are_skipped_or_stop_the_run_on_all_ranks():
    answers, others = on_ranks(2, judge_all)
    assert answers == others
    for case, (diverged, notes, stayed, rested) in zip(CASES, answers, strict=False):
        assert diverged == "", case
        (note,) = notes
        assert note.startswith("step 2: "), case
        assert note.endswith("; the step is skipped on all ranks"), case
        who = f"the loss of rank {case['rank']}" if case["where"] == "loss" else "the norm"
        assert who in note, case
        assert stayed, f"the bad step changed something: {case}"
        assert not rested, f"the step after it did nothing: {case}"
    for diverged, notes, stayed, _ in answers[len(CASES) :]:
        assert diverged.startswith("step 2: ")
        assert notes == ()
        assert stayed


def ignore_or_lose_patience() -> tuple[bool, str, str]:
    trial = Trial(make_config("fp32"), "ignore")
    before = trial.everything()
    trial.step(1, rank=1, where="loss", value=math.nan)
    moved = not same(before, trial.everything())
    trial = Trial(make_config("fp32", engine="fsdp1-style"), "skip")
    for step in range(1, MOST_SKIPPED):
        trial.step(step, rank=0, where="loss", value=math.inf)
    almost = trial.gate.diverged
    trial.step(MOST_SKIPPED, rank=0, where="loss", value=math.inf)
    return moved, almost, trial.gate.diverged


def test_bad_numbers_may_be_ignored_and_are_not_skipped_for_ever():
    answer, other = on_ranks(2, ignore_or_lose_patience)
    assert answer == other
    moved, almost, diverged = answer
    assert moved
    assert almost == ""
    assert (
        diverged
        == f"step {MOST_SKIPPED}: the loss of rank 0 is not finite, as in the 49 steps before it"
    )


def overflow_in_fp16() -> tuple[list[float], bool, str, str]:
    """A good step, an overflow, a good step, a bad loss."""
    trial = Trial(make_config("fp16"), "stop")
    trial.step(1)
    factors, before = [trial.gate.scale.factor], trial.everything()
    trial.step(2, rank=1, where="grad", value=math.inf)
    factors.append(trial.gate.scale.factor)
    stayed, diverged = same(before, trial.everything()), trial.gate.diverged
    trial.step(3)
    factors.append(trial.gate.scale.factor)
    assert not same(before, trial.everything())
    trial.step(4, rank=0, where="loss", value=math.nan)
    return factors, stayed, diverged, trial.gate.diverged


def test_an_overflow_in_fp16_shrinks_the_scale_on_all_ranks_and_a_bad_loss_stops():
    answer, other = on_ranks(2, overflow_in_fp16)
    assert answer == other
    factors, stayed, diverged, at_last = answer
    assert factors == [2.0**16, 2.0**15, 2.0**15]
    assert stayed
    assert diverged == ""
    assert at_last == "step 4: the loss of rank 0 is not finite"
