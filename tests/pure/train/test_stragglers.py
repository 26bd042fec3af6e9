"""Ranks that hold the others up are named."""

from shoal.train.stragglers import Stragglers
from shoal.train.told import Told, Word


def told(*own_ms: float) -> Told:
    words = [
        Word(loss=1, own_ms=ms, memory_bytes=1, stop=False, save_status=0, collectives=0)
        for ms in own_ms
    ]
    return Told(tuple(words))


def test_a_rank_that_is_slow_for_a_while_is_named_once():
    stragglers = Stragglers()
    notes = [note for step in range(1, 21) for note in stragglers.notes(step, told(50, 51, 99))]
    assert notes == [
        f"step {step}: rank 2 holds the others up: 99 ms of its own per step, where 51 ms are usual"
        for step in (10, 20)
    ]


def test_a_single_slow_step_and_noise_are_not_told():
    stragglers = Stragglers()
    for step in range(1, 31):
        slow = 500 if step == 7 else 50
        assert stragglers.notes(step, told(50, slow, 52)) == []
    for step in range(31, 51):
        assert stragglers.notes(step, told(1, 4, 1)) == []
