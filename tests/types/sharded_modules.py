"""What type checkers know of sharded modules. `make check` reads this file; nothing runs it."""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_type

import torch
from torch import nn

import shoal.fsdp
from shoal import FSDPModule, MixedPrecisionPolicy, fully_shard
from shoal.layout import Rows
from shoal.runtime.fully_shard import ReplicateModule, replicate


class Model(nn.Module):
    num_layers: int = 3


model = fully_shard(Model(), mp_policy=MixedPrecisionPolicy(), layout=Rows())
assert_type(model, FSDPModule)
model.set_requires_gradient_sync(False)
handle = model.unshard(async_op=True)
if handle is not None:
    handle.wait()
assert_type(model.parameters(), Iterator[nn.Parameter])
model.to(torch.bfloat16)

blocks = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], reshard_after_forward=2)
assert_type(blocks, Sequence[FSDPModule])

in_place = Model()
fully_shard(in_place)
if isinstance(in_place, FSDPModule):
    in_place.set_prefetch_depth(2)
    assert_type(in_place.num_layers, int)

assert_type(replicate(Model()), ReplicateModule)
assert_type(shoal.fsdp.fully_shard(Model()), FSDPModule)

fully_shard(Model(), layuot=Rows())  # pyright: ignore[reportCallIssue]
fully_shard("model")  # pyright: ignore[reportCallIssue, reportArgumentType]
fully_shard(Model(), reshard_after_forward="yes")  # pyright: ignore[reportCallIssue, reportArgumentType]
model.set_requires_gradient_snyc(False)  # pyright: ignore[reportCallIssue]
