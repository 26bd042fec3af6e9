"""The peak memory of a rank that trains a model of Hugging Face from the meta device.

    python benchmarks/hugging_face_memory.py --layers 16 --dim 2048 --folder /tmp/hf

Three kinds of processes, one after the other: the plain model of transformers in one process; the
same on `--ranks` gloo ranks, built on meta, filled and sharded unit by unit, saved and exported;
and a plain `from_pretrained` of the export, whose logits must be those of the ranks. With AdamW, in
one dtype throughout, and one thread in every process: with more, matrices are added up in another
order, and logits differ. Prints JSON:

    built, peak, saved   the process's peak of resident memory (`ru_maxrss`) after the model was
                         built, after the steps, after the checkpoint; libraries included
    state                bytes of parameters, gradients and moments when the steps are over
    ratio                the largest peak of a rank, by that of the plain process
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def config_of(options: argparse.Namespace) -> Any:
    """A Llama of the asked size."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.dim,
        intermediate_size=4 * options.dim,
        num_hidden_layers=options.layers,
        num_attention_heads=options.dim // 64,
        num_key_value_heads=max(1, options.dim // 256),
        max_position_embeddings=2048,
        use_cache=False,
    )


def batch(options: argparse.Namespace, seed: int) -> torch.Tensor:
    """Random tokens, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(options.vocabulary, (1, options.context), generator=generator)


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    """The dtype of weights, gradients and moments."""
    return getattr(torch, options.dtype)


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(model: torch.nn.Module, options: argparse.Namespace) -> tuple[list[float], int]:
    """A few steps of AdamW, one parameter at a time: no temporaries of all of them.

    Returns the losses, and the bytes of parameters, gradients and moments.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for seed in range(options.steps):
        tokens = batch(options, seed)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if seed < options.steps - 1:
            optimizer.zero_grad()
    held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for state in optimizer.state.values():
        held += [value for value in state.values() if value.dim()]
    return losses, sum(local(tensor).nbytes for tensor in held)


def whole(options: argparse.Namespace) -> dict[str, Any]:
    """Train the plain model in one process."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(options), dtype=dtype_of(options))
    before = peak_bytes()
    losses, state = train(model, options)
    num = sum(parameter.numel() for parameter in model.parameters())
    peaks = {"built": before, "peak": peak_bytes(), "state": state}
    return {"parameters": num, "losses": losses, **peaks}


def cast_parameters(unit: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast what is trained. Buffers (rotary frequencies) stay as the plain model has them."""
    for parameter in unit.parameters():
        if not isinstance(parameter, DTensor):  # of a unit inside, which is sharded already
            parameter.data = parameter.data.to(dtype)


def sharded(options: argparse.Namespace) -> dict[str, Any]:
    """Build on meta, train on ranks, save and export."""
    from shoal.checkpoint import export_weights, save
    from shoal.fsdp import fully_shard
    from shoal.train.hugging_face.materialise import materialise
    from shoal.train.hugging_face.models import build_skeleton, units_of

    dist.init_process_group("gloo")
    model = build_skeleton(config_of(options))
    units = units_of(model)
    for unit in (*units, model):
        materialise(model, units, unit, weights=None, seed=0)
        cast_parameters(unit, dtype_of(options))
        fully_shard(unit)
    before = peak_bytes()
    losses, state = train(model, options)
    trained = peak_bytes()
    model.eval()
    with torch.no_grad():
        logits = model(batch(options, 99)).logits
    folder = Path(options.folder)
    save(folder / "saved", {f"model/{k}": v for k, v in model.state_dict().items()}, {})
    peaks: list[Any] = [None] * dist.get_world_size()
    own = {"built": before, "peak": trained, "saved": peak_bytes(), "state": state}
    dist.all_gather_object(peaks, own)
    if dist.get_rank() == 0:
        export_weights(folder / "saved", folder / "export")
        config = config_of(options)
        config.architectures = ["LlamaForCausalLM"]
        config.dtype = options.dtype
        config.save_pretrained(folder / "export")
        torch.save(logits, folder / "logits.pt")
    dist.barrier()
    dist.destroy_process_group()
    return {"losses": losses, "ranks": peaks}


def reload(options: argparse.Namespace) -> dict[str, Any]:
    """Load the export in plain transformers, and compare logits."""
    from transformers import AutoModelForCausalLM

    folder = Path(options.folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "export").eval()
    with torch.no_grad():
        logits = model(batch(options, 99)).logits
    return {"equal_logits": torch.equal(logits, torch.load(folder / "logits.pt"))}


PARTS = {"whole": whole, "sharded": sharded, "reload": reload}


def run(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part in processes of its own, whose peak is theirs alone."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    start = [sys.executable, *(launcher if part == "sharded" else [])]
    began_at = time.monotonic()
    flags = [f"--{name}={value}" for name, value in vars(options).items() if name != "part"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*start, __file__, *flags, f"--part={part}"], check=True, env=environment)
    found = json.loads((Path(options.folder) / f"{part}.json").read_text())
    return {**found, "seconds": round(time.monotonic() - began_at, 1)}


def main() -> None:
    """Run all parts, or as one of their processes one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--folder", required=True, help="an empty one")
    parser.add_argument("--part", choices=sorted(PARTS))
    options = parser.parse_args()
    if options.part is not None:
        found = PARTS[options.part](options)
        if int(os.environ.get("RANK", "0")) == 0:
            (Path(options.folder) / f"{options.part}.json").write_text(json.dumps(found))
        return
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    if any(Path(options.folder).iterdir()):
        parser.error(f"--folder {options.folder} is not empty")
    found = {part: run(part, options) for part in ("whole", "sharded", "reload")}
    peak = max(rank["peak"] for rank in found["sharded"]["ranks"])
    found["ratio"] = round(peak / found["whole"]["peak"], 3)
    found["torch"], found["command"] = torch.__version__, " ".join(sys.argv)
    print(json.dumps({"options": vars(options), **found}, indent=2))


if __name__ == "__main__":
    main()
