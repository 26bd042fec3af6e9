"""A wrong way to use shoal inside of Accelerate: python accelerate_mistakes.py CASE."""

import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.optim import SGD

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import trainer as example

from shoal.integrations.accelerate import use_shoal

case = sys.argv[1]
settings = {
    "hybrid": {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD"},
    "layer": {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Blok"],
    },
}.get(case, {"fsdp_version": 2})
plugin = None if case in ("not distributed", "not sharded") else settings
plugin = plugin and FullyShardedDataParallelPlugin(**plugin)
accelerator = Accelerator(cpu=True)
model = example.AutoModelForCausalLM.from_config(example.TINY)
optimizer = SGD(model.parameters(), lr=0.1)
if case == "late":
    accelerator.prepare(model, optimizer)
use_shoal(accelerator, plugin=plugin)
accelerator.prepare(model, optimizer)
