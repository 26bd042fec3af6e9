"""Models, optimizers and loops of many kinds: a rank dies, and they go on right, or are refused."""

import pytest
import torch

from harness import GLOO, on_ranks
from shoal.errors import RankError
from survival.jobs import launch
from survival.varieties import REFUSED, STALE, VARIETIES, one_stretch

PHASES = ["reduction", "optimizer", "parity", "parity done"]
QUICK = {"accumulates_over_steps": "optimizer", "grad_scaler": "unscaled"}
SIZE = 3


def plan_for(name, phase, **more):
    victim = sum(map(ord, name)) % SIZE  # always the same one, and not always the first
    plan = {"variety": name, "steps": 8, "samples": 13, str(victim): [[3, phase]], **more}
    return victim, plan


def uninterrupted(name, folder, recoveries, plan):
    """The truth: losses, the whole state, and what each member has of its own."""
    stretches = [(0, list(range(SIZE)))] + [(r["version"], r["members"]) for r in recoveries]
    ends = [start for start, _ in stretches[1:]] + [plan["steps"]]
    losses, found, members = {}, [], []
    for (first, members), last in zip(stretches, ends, strict=True):
        found = on_ranks(
            len(members), one_stretch, name, folder, first, last, members, plan, setup=GLOO
        )
        for step in range(first, last):
            losses[step] = dict(enumerate(by_step[step] for by_step, _, _ in found))
    return losses, found[0][1], {m: own for m, (_, _, own) in zip(members, found, strict=True)}


def is_same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return one == other


def assert_goes_on(name, phase, folder):
    victim, plan = plan_for(name, phase)
    outcome = launch(folder / "job", SIZE, plan)
    assert outcome.lost == [victim]
    losses, state, own = uninterrupted(name, folder, outcome.recoveries, plan)
    for step, by_rank in outcome.losses.items():
        assert {rank: losses[step][rank] for rank in by_rank} == by_rank, step
    assert outcome.state
    assert is_same(outcome.state, state)
    for member, expected in own.items():
        found = torch.load(folder / "job" / f"own-{member}.pt", weights_only=False)
        assert is_same(found, expected), member


def message_of(name, folder, phase="reduction", **more):
    """What is said before the ranks end, and the steps that some have done."""
    num_spares = more.pop("num_spares", 0)
    with pytest.raises(RankError) as caught:
        launch(folder / "job", SIZE, plan_for(name, phase, **more)[1], num_spares=num_spares)
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("name", sorted(QUICK))
def test_what_is_state_in_the_middle_of_a_step_goes_back_with_it(name, tmp_path):
    """Gradients that a later step adds to; gradients that a scaler has unscaled already."""
    assert_goes_on(name, QUICK[name], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", sorted(VARIETIES.keys() - REFUSED - STALE.keys()))
def test_they_go_on_as_one_that_was_resized(name, phase, tmp_path):
    assert_goes_on(name, phase, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_not_go_on_right_is_refused_before_a_step(name, tmp_path):
    """Each error comes before the first step of the training is over."""
    assert REFUSED[name] in message_of(name, tmp_path)
    assert not list(tmp_path.glob("job/*.done"))


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(STALE))
def test_tensors_and_groups_of_ranks_that_are_gone_raise(name, tmp_path):
    """Also when a spare is there, so that there are as many ranks as before."""
    text = message_of(name, tmp_path, num_spares=1, steps=1000)
    assert any(part in text for part in STALE[name]), text
