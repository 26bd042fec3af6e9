"""Checkpoints that are whole or not there.

In: named tensors, plain or sharded (`DTensor`, `ShardedTensor`), and a few JSON values. Out: a
folder, or another `Storage`, in which they appear all at once, without pickles, and load on any
number of ranks, every byte checked first.
"""

from shoal.checkpoint.background import PendingSave
from shoal.checkpoint.dcp_import import import_dcp
from shoal.checkpoint.dcp_plugin import DcpReader, DcpWriter
from shoal.checkpoint.hugging_face import export_weights, import_weights
from shoal.checkpoint.load import load
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.offline import reshard, verify
from shoal.checkpoint.optimizer import (
    optimizer_tensors,
    prepare_optimizer,
    restore_hyper_parameters,
)
from shoal.checkpoint.retention import (
    Retention,
    drop_unfinished,
    latest,
    point_latest,
    step_folder,
)
from shoal.checkpoint.save import async_save, save
from shoal.checkpoint.storage import Checkpoint, Storage
from shoal.checkpoint.training import load_model, load_training, save_training, training_state

__all__ = [
    "Checkpoint",
    "DcpReader",
    "DcpWriter",
    "PendingSave",
    "Retention",
    "Storage",
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
