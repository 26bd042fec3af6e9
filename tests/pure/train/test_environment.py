"""Finding one's place among the ranks."""

import pytest

from shoal.errors import UsageError
from shoal.train import environment
from shoal.train.environment import Place

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_outside_of_torchrun_there_is_no_place():
    assert environment.place() is None


def test_torchrun_says_where(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    expected = Place(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert environment.place() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_RANK": None}, "RANK and WORLD_SIZE and LOCAL_WORLD_SIZE are set but LOCAL_RANK"),
        ({"RANK": "x"}, "expected numbers"),
        ({"RANK": "8"}, "contradict"),
        ({"LOCAL_RANK": "4"}, "contradict"),
    ],
)
def test_a_place_that_cannot_be_is_refused(monkeypatch, changes, message):
    for name, value in (TORCHRUN | changes).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        environment.place()
