"""Trying cells of `docs/compose.md`: features, in the way of a column, beside one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compose import columns_of
from compositions.feature import NUM_STEPS, Feature
from compositions.ways import Way, ways_of
from harness import on_ranks

TIMEOUT_S = 540.0


def claimed(request: pytest.FixtureRequest, column: str) -> list[str]:
    """The features that the test's markers claim for a column."""
    markers = [mark.args for mark in request.node.iter_markers("compose")]
    return [name for name, *columns in reversed(markers) if column in columns_of(name, columns)]


def try_column(
    column: str, names: Sequence[str], rows: Mapping[str, Sequence[Feature]], folder: Path
) -> None:
    """Train the features of some rows in the way of one column.

    All in one call on the ranks: process groups, and DTensor's caches, are made once.
    """
    worlds = sorted({feature.world_of(column) for name in names for feature in rows[name]})
    for world in worlds:
        chosen = [
            (f"{name} {index}", feature)
            for name in names
            for index, feature in enumerate(rows[name])
            if feature.world_of(column) == world
        ]
        for phase in range(len(ways_of(column, folder))):
            # What is resumed goes on with twice as many ranks.
            size = world * 2 if phase else world
            on_ranks(size, train_all, column, phase, chosen, folder, timeout_s=TIMEOUT_S)


def train_all(
    column: str, phase: int, features: Sequence[tuple[str, Feature]], folder: Path
) -> None:
    """On every rank: one feature after the other; an error says which one it was."""
    for name, feature in features:
        try:
            check(ways_of(column, folder / name)[phase], feature)
        except Exception as error:
            error.add_note(f"{name}: {type(feature).__name__} with {column}")
            raise


def refused(column: str, feature: Feature, words: str, folder: Path) -> None:
    """On every rank: training a feature in a way raises, and says why."""
    (way, *_) = ways_of(column, folder)
    with pytest.raises(Exception, match=words) as caught:
        way.train(feature)
    assert not isinstance(caught.value, AssertionError), caught.value


def check(way: Way, feature: Feature) -> None:
    """Train a feature in a way: whole weights must be those of the unsharded model."""
    found = way.train(feature)
    last = way.steps[-1] + 1
    plain = Way(
        num_data=way.num_data,
        has_experts=way.has_experts,
        steps=range(last),
        resumes_at=way.resumes_at,
    )
    expected = plain.train(feature)
    assert found
    for name, parameter in found.items():
        message = functools.partial(_named, name)
        torch.testing.assert_close(parameter, expected[name], msg=message, **feature.tolerance)
    if last == NUM_STEPS:
        _check_training(feature, expected, has_experts=way.has_experts)


def _named(name: str, message: str) -> str:
    return f"{name}: {message}"


def _check_training(feature: Feature, trained: dict[str, Tensor], *, has_experts: bool) -> None:
    """Weights have moved far more than errors may be; those that must stay have stayed."""
    least = max(3e-4, 2 * feature.tolerance.get("atol", 0.0))
    for name, parameter in feature.net(has_experts=has_experts).named_parameters():
        distance = (trained[name] - parameter.detach()).abs().max()
        assert (distance > least) == feature.moves(name), f"{name} moved by {distance}"
