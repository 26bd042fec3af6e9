"""What a collective costs on a modelled network."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.comm.collectives import Kind
from shoal.comm.modelled import FREE, INFINIBAND, NVLINK, Network
from shoal.errors import UsageError

GB = 10**9


@pytest.mark.parametrize(
    ("kind", "num_ranks", "expected_us"),
    [
        (Kind.ALL_GATHER, 8, 5 + 7 / 8 * 1e6 / 100),
        (Kind.REDUCE_SCATTER, 8, 5 + 7 / 8 * 1e6 / 100),
        (Kind.ALL_REDUCE, 8, 5 + 2 * 7 / 8 * 1e6 / 100),
        (Kind.ALL_TO_ALL, 2, 5 + 1 / 2 * 1e6 / 100),
        (Kind.BROADCAST, 8, 5 + 1e6 / 100),
        (Kind.SEND, 8, 5 + 1e6 / 100),
        (Kind.BARRIER, 8, 5),
        (Kind.ALL_GATHER, 1, 0),
    ],
)
def test_ring_model(kind: Kind, num_ranks: int, expected_us: float) -> None:
    network = Network("test", 100.0, 5.0)
    assert network.duration_us(kind, GB, num_ranks) == pytest.approx(expected_us)


def test_the_known_networks() -> None:
    assert FREE.is_free
    assert FREE.duration_us(Kind.ALL_REDUCE, GB, 1024) == 0
    assert (NVLINK.bandwidth_gb_per_s, NVLINK.latency_us) == (370, 20)
    assert (INFINIBAND.bandwidth_gb_per_s, INFINIBAND.latency_us) == (45, 60)
    assert not NVLINK.is_free


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("inf"), float("nan")])
def test_bandwidth_must_make_sense(bandwidth: float) -> None:
    with pytest.raises(UsageError, match="'odd': bandwidth_gb_per_s must be positive, or None"):
        Network("odd", bandwidth, 0.0)


@pytest.mark.parametrize("latency", [-1.0, float("inf"), float("nan")])
def test_latency_must_make_sense(latency: float) -> None:
    with pytest.raises(UsageError, match="'odd': latency_us must be 0 or more"):
        Network("odd", 1.0, latency)


def test_a_network_is_a_value() -> None:
    assert Network("a", 1.0, 2.0) == Network("a", 1.0, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVLINK.latency_us = 0.0  # pyright: ignore[reportAttributeAccessIssue]
