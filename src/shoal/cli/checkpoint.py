"""`shoal checkpoint`: look at a checkpoint, check it, or write it anew in another form."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.table import Table

from shoal.checkpoint import (
    export_weights,
    import_dcp,
    import_weights,
    read_manifest,
    reshard,
    verify,
)
from shoal.checkpoint.dcp_import import METADATA
from shoal.checkpoint.manifest import Manifest
from shoal.cli.flags import Parser
from shoal.errors import CheckpointError, UsageError
from shoal.train.hugging_face.export import export_adapters, export_model, model_folder_of
from shoal.train.safe_stream import printable

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def main(argv: Sequence[str]) -> int:
    """Do what the words after `shoal checkpoint` say."""
    options = make_parser().parse(argv)
    action: Callable[[Namespace], None] = options.action
    try:
        action(options)
    except NotImplementedError as error:  # what a file holds is no fault of the program
        raise CheckpointError(f"{options.checkpoint}: {error}") from error
    return 0


def make_parser() -> Parser:
    """Build the parser of `shoal checkpoint`."""
    parser = Parser(
        prog="shoal checkpoint",
        description="Work on a checkpoint in one process; nothing is ever overwritten.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)

    def add(name: str, action: Callable[[Namespace], None], text: str) -> Parser:
        added = actions.add_parser(name, help=text, description=text)
        added.set_defaults(action=action)
        added.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
        return added

    inspecting = add("inspect", _inspect, "List what a checkpoint holds, without reading its data.")
    inspecting.add_argument("--json", action="store_true", help="print JSON")
    add("verify", _verify, "Compare every byte with its checksum.")
    exporting = add("export", _export, "Write the weights as Hugging Face keeps them.")
    exporting.add_argument("--dtype", choices=sorted(_DTYPES), help="convert the weights")
    exporting.add_argument(
        "--adapters", action="store_true", help="of a run with --lora: the adapters alone, for PEFT"
    )
    importing = add("import", _import, "Make a checkpoint of Hugging Face's or DCP's files.")
    cutting = add("reshard", _reshard, "Write a checkpoint anew, cut for a number of ranks.")
    cutting.add_argument("--ranks", type=int, required=True, metavar="N")
    for writing in (exporting, importing, cutting):
        writing.add_argument("folder", type=Path, metavar="FOLDER", help="must not exist yet")
    return parser


def _inspect(options: Namespace) -> None:
    manifest = read_manifest(options.checkpoint)
    if options.json:
        print(printable(json.dumps(_summary(manifest), indent=2), keep="\n"))
        return
    table = Table("tensor", "dtype", "shape", "regions", "layout", box=None)
    for name, entry in manifest.tensors.items():
        shape = "×".join(map(str, entry.shape)) or "–"
        dtype = str(entry.dtype).removeprefix("torch.")
        layout = printable(entry.layout)
        table.add_row(printable(name), dtype, shape, str(len(entry.regions)), layout)
    # Names are no markup: `[red]` and `:smile:` are shown as they are.
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    console.print(
        f"{len(manifest.tensors)} tensors, {manifest.num_bytes:,} bytes, "
        f"{len(manifest.files)} files of {manifest.world_size} ranks"
    )
    if "training" in manifest.extra:
        console.print(printable(f"training: {json.dumps(manifest.extra['training'])}"))


def _summary(manifest: Manifest) -> dict[str, object]:
    tensors = {
        name: {
            "shape": list(entry.shape),
            "dtype": str(entry.dtype).removeprefix("torch."),
            "layout": entry.layout,
            "files": sorted({stored.file for stored in entry.regions}),
        }
        for name, entry in manifest.tensors.items()
    }
    return {
        "world_size": manifest.world_size,
        "bytes": manifest.num_bytes,
        "tensors": tensors,
        "extra": manifest.extra,
    }


def _verify(options: Namespace) -> None:
    total = read_manifest(options.checkpoint).num_bytes
    with _progress("verify", total) as advance:
        manifest = verify(options.checkpoint, advance)
    where = printable(str(options.checkpoint))
    print(f"{where}: {len(manifest.tensors)} tensors are as they were saved")


def _export(options: Namespace) -> None:
    if options.adapters:
        if options.dtype is not None:
            raise UsageError("--dtype does not go with --adapters, which are written as they are")
        export_adapters(options.checkpoint, options.folder)
        print(printable(str(options.folder)))
        return
    tensors = read_manifest(options.checkpoint).tensors
    total = sum(e.num_bytes for name, e in tensors.items() if name.startswith("model/"))
    dtype = None if options.dtype is None else _DTYPES[options.dtype]
    model = model_folder_of(options.checkpoint)
    with _progress("export", total) as advance:
        if model is None:
            export_weights(options.checkpoint, options.folder, dtype=dtype, progress=advance)
        else:
            export_model(options.checkpoint, model, options.folder, dtype=dtype, progress=advance)
    print(printable(str(options.folder)))


def _import(options: Namespace) -> None:
    is_dcp = (options.checkpoint / METADATA).is_file()
    with _progress("import", None) as advance:
        if is_dcp:
            import_dcp(options.checkpoint, options.folder, progress=advance)
        else:
            import_weights(options.checkpoint, options.folder, advance)
    print(printable(str(options.folder)))


def _reshard(options: Namespace) -> None:
    total = read_manifest(options.checkpoint).num_bytes
    with _progress("reshard", total) as advance:
        reshard(options.checkpoint, options.folder, options.ranks, advance)
    print(printable(str(options.folder)))


@contextmanager
def _progress(title: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """Draw a bar while a command runs, on a terminal only."""
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
