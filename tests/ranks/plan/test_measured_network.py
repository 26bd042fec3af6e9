"""The network between ranks here, measured."""

from __future__ import annotations

import torch

from harness import on_ranks
from shoal.comm.network import Network
from shoal.plan.measured_network import measure_network


def measured() -> Network:
    return measure_network(torch.device("cpu"))


def test_ranks_here_have_one() -> None:
    for found in on_ranks(2, measured):
        assert "2 ranks on cpu" in found.name
        assert 0 < (found.bandwidth_gb_per_s or 0) < 1e4
