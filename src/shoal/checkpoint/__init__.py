"""Checkpoints that are whole or not there.

In: named tensors, plain or sharded (`DTensor`, `ShardedTensor`), and a few JSON values. Out: a
folder that appears all at once, holds no pickle, and loads on any number of ranks, every
byte checked first.
"""

from shoal.checkpoint.latest import latest, step_folder
from shoal.checkpoint.load import load
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.optimizer import (
    optimizer_tensors,
    prepare_optimizer,
    restore_hyper_parameters,
)
from shoal.checkpoint.publish import drop_unfinished
from shoal.checkpoint.save import save
from shoal.checkpoint.training import load_training, save_training

__all__ = [
    "drop_unfinished",
    "latest",
    "load",
    "load_training",
    "optimizer_tensors",
    "prepare_optimizer",
    "read_manifest",
    "restore_hyper_parameters",
    "save",
    "save_training",
    "step_folder",
]
