"""One run of Transformers, PEFT, TRL or Accelerate, on torch's FSDP2 or on shoal.

    torchrun --nproc-per-node 2 accelerate_runs.py CASE FOLDER

Rank 0 writes what came out as JSON into FOLDER.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import trainer as example

from shoal import FSDPModule
from shoal.integrations import accelerate as integration


def options(folder: Path, method: str) -> Namespace:
    return Namespace(
        method=method, model=None, output=str(folder), steps=4, bf16=False, resume=False
    )


def trainer(engine: str, method: str, folder: Path, **fsdp: Any) -> Any:
    """The example's trainer on one of the engines."""
    AcceleratorState._reset_state(reset_partial_state=False)
    chosen = options(folder, method)
    settings = example.settings

    def changed(some: Namespace) -> dict[str, Any]:
        whole = settings(some)
        bf16 = fsdp.pop("bf16", False)
        return {
            **whole,
            "bf16": bf16,
            "data_seed": 0,
            "fsdp_config": {**whole["fsdp_config"], **fsdp},
            "disable_tqdm": True,
        }

    example.settings = changed
    torch.manual_seed(0)
    built = example.BUILDERS[method](example.model_of(chosen), example.dataset(), chosen)
    example.settings = settings
    if engine == "shoal":
        integration.use_shoal(built)
    else:  # what Accelerate does on accelerators, and not on CPU
        plugin = integration._asked_plugin(built, built.accelerator, None)
        integration._select(built.accelerator, plugin)
        built.is_fsdp_enabled = True
    return built


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def exact_losses(run: Any) -> list[float]:
    """The trainer's log rounds losses; this keeps each as it is computed."""
    kept: list[float] = []
    compute = run.compute_loss

    def computing(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        kept.append(float((result[0] if isinstance(result, tuple) else result).detach()))
        return result

    run.compute_loss = computing
    return kept


def full(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.named_parameters()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(
    method: str, folder: Path, for_shoal: dict[str, Any] | None = None, **fsdp: Any
) -> dict[str, Any]:
    """Both engines, then a resumed run on shoal, then plain Transformers."""
    if method == "sft":  # the first of a process takes rows in another order, with DDP too
        trainer("torch", method, folder / "unused", **fsdp).train()
    theirs = trainer("torch", method, folder / "torch", **fsdp)
    of_torch = exact_losses(theirs)
    theirs.train()
    fsdp = for_shoal or fsdp
    ours = trainer("shoal", method, folder / "shoal", **fsdp)
    of_shoal = exact_losses(ours)
    ours.train()
    found: dict[str, Any] = {
        "torch": of_torch,
        "shoal": of_shoal,
        "engine": type(ours.model).__mro__[1].__module__,
        "is_shoal": isinstance(ours.model, FSDPModule),
        "units": sum(isinstance(one, FSDPModule) for one in ours.model.modules()),
        "sharded": all(isinstance(one, DTensor) for one in ours.model.parameters()),
        "same_weights": same(full(theirs.model), full(ours.model)),
    }
    again = trainer("shoal", method, folder / "shoal", **fsdp)
    of_resumed = exact_losses(again)
    again.train(resume_from_checkpoint=str(folder / "shoal" / "checkpoint-2"))
    found["resumed"] = of_resumed
    found["same_resumed"] = same(full(ours.model), full(again.model))
    ours.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    ours.save_model(str(folder / "final"))
    found |= reload(method, ours, folder / "final")
    return found


def version_1(folder: Path) -> dict[str, Any]:
    """A config of FSDP1, against the same config of version 2 on torch's engine."""
    first = {"version": 1, "reshard_after_forward": "shard_grad_op", "sync_module_states": False}
    second = {"reshard_after_forward": False}
    return train("trainer", folder, first, **second)


def reload(method: str, run: Any, folder: Path) -> dict[str, Any]:
    """Logits of the sharded model, and of what plain `from_pretrained` makes of its files."""
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(16).reshape(1, 16)
    run.model.eval()
    with torch.no_grad():
        of_sharded = run.model(input_ids=tokens).logits
    torch.manual_seed(0)
    if method == "lora":
        from peft import PeftModel

        plain = AutoModelForCausalLM.from_config(example.TINY)
        plain = PeftModel.from_pretrained(plain, str(folder))
    else:
        plain = AutoModelForCausalLM.from_pretrained(folder)
    plain.eval()
    with torch.no_grad():
        of_plain = plain(input_ids=tokens).logits
    grown = run.model.generate(tokens, max_new_tokens=4, do_sample=False)
    expected = plain.generate(tokens, max_new_tokens=4, do_sample=False)
    return {
        "same_logits": torch.equal(of_sharded, of_plain),
        "same_tokens": torch.equal(grown, expected),
        "class": plain.config.architectures,
    }


def loop(folder: Path) -> dict[str, Any]:
    """A loop of one's own: clipping, accumulation, `save_state`, `load_state`."""
    found: dict[str, Any] = {}
    for engine in ("torch", "shoal"):
        AcceleratorState._reset_state(reset_partial_state=False)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            activation_checkpointing=True,
            cpu_ram_efficient_loading=True,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
        if engine == "shoal":
            integration.use_shoal(accelerator, plugin=plugin)
        else:
            integration._select(accelerator, plugin)
        # Other weights on other ranks: those of rank 0 count.
        torch.manual_seed(dist.get_rank())
        model = example.model_of(options(folder, "trainer"))
        optimizer = torch.optim.AdamW(
            [{"params": [one], "lr": 1e-3} for one in model.parameters()], lr=1e-3
        )
        if engine == "torch":  # there the rest of the ranks have random weights, which it ignores
            model = model.to("cpu")
        model, optimizer = accelerator.prepare(model, optimizer)
        values = steps(accelerator, model, optimizer, 4)
        accelerator.save_state(str(folder / engine))
        after = steps(accelerator, model, optimizer, 2)
        accelerator.load_state(str(folder / engine))
        found[engine] = values
        found[f"{engine} after"] = after
        found[f"{engine} reloaded"] = steps(accelerator, model, optimizer, 2)
        found[f"{engine} class"] = type(model).__mro__[1].__module__
    return found


def steps(accelerator: Any, model: Any, optimizer: Any, num: int) -> list[float]:
    kept = []
    for number in range(num):
        tokens = torch.arange(32).reshape(2, 16).add(number + accelerator.process_index) % 128
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        kept.append(float(loss.detach()))
    return kept


CASES = {
    "trainer": lambda folder: train("trainer", folder),
    "bf16": lambda folder: train("trainer", folder, bf16=True),
    "sharded": lambda folder: train("trainer", folder, state_dict_type="SHARDED_STATE_DICT"),
    "version 1": version_1,
    "lora": lambda folder: train("lora", folder),
    "sft": lambda folder: train("sft", folder),
    "loop": loop,
}


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.use_deterministic_algorithms(True)
    found = CASES[case](folder / case)
    if dist.get_rank() == 0:
        (folder / f"{case}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
