"""Checkpoints that are whole or not there.

In: named tensors, plain or sharded (`DTensor`, `ShardedTensor`), and a few JSON values. Out: a
folder that appears all at once, holds no pickle, and loads on any number of ranks, every
byte checked first.
"""

from shoal.checkpoint.async_save import async_save
from shoal.checkpoint.dcp_import import import_dcp
from shoal.checkpoint.dcp_storage import DcpReader, DcpWriter
from shoal.checkpoint.hugging_face import export_weights, import_weights
from shoal.checkpoint.latest import latest, step_folder
from shoal.checkpoint.load import load
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.offline import reshard, verify
from shoal.checkpoint.optimizer import (
    optimizer_tensors,
    prepare_optimizer,
    restore_hyper_parameters,
)
from shoal.checkpoint.pending import PendingSave
from shoal.checkpoint.publish import drop_unfinished
from shoal.checkpoint.retention import Retention, point_latest
from shoal.checkpoint.save import save
from shoal.checkpoint.training import load_model, load_training, save_training, training_state

__all__ = [
    "DcpReader",
    "DcpWriter",
    "PendingSave",
    "Retention",
    "async_save",
    "drop_unfinished",
    "export_weights",
    "import_dcp",
    "import_weights",
    "latest",
    "load",
    "load_model",
    "load_training",
    "optimizer_tensors",
    "point_latest",
    "prepare_optimizer",
    "read_manifest",
    "reshard",
    "restore_hyper_parameters",
    "save",
    "save_training",
    "step_folder",
    "training_state",
    "verify",
]
