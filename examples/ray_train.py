"""Ray Train: a sharded model in the workers of `TorchTrainer`, saved, and resumed after a failure.

python examples/ray_train.py --workers 2 --storage /tmp/ray-runs
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

from shoal.integrations.ray import prepare_model, report, resume


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layer makes of its input."""
        return x + self.layer(x)


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(*(Block(16) for _ in range(3))), units=[Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    extra = resume(model, optimizer) or {"step": 0}
    for step in range(int(extra["step"]) + 1, config["steps"] + 1):
        torch.manual_seed(100 * step + ray.train.get_context().get_world_rank())
        x = torch.randn(8, 16)
        loss = (model(x) - x.flip(-1)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics = {"step": step, "loss": loss.item()}
        if step % 2 == 0:
            report(metrics, model, optimizer, {"step": step})
        else:
            report(metrics)
        fail_once(config, step)


def fail_once(config: dict[str, Any], step: int) -> None:
    """Raise in one step, the first time, so that Ray starts the workers again."""
    mark = Path(config["storage"]) / "failed"
    leads = ray.train.get_context().get_world_rank() == 0
    if leads and step == config["fail_at"] and not mark.exists():
        mark.write_text("once")
        raise RuntimeError("a worker fails, once")


def trainer_of(options: argparse.Namespace) -> TorchTrainer:
    """The trainer, on GPUs where there are some."""
    has_gpu = torch.cuda.is_available()
    return TorchTrainer(
        train_loop,
        train_loop_config={
            "steps": options.steps,
            "fail_at": options.fail_at,
            "storage": options.storage,
        },
        torch_config=TorchConfig(backend="nccl" if has_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=has_gpu),
        run_config=ray.train.RunConfig(
            name="shoal",
            storage_path=options.storage,
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Ray Train on shoal")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--fail-at", type=int, default=0, help="a step in which a worker fails")
    parser.add_argument("--storage", default="/tmp/ray-runs", help="a folder that all see")
    return parser.parse_args()


def main() -> None:
    """Train on a local cluster, or on the one that RAY_ADDRESS names."""
    options = parse()
    Path(options.storage).mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=options.workers + 1, include_dashboard=False, log_to_driver=False)
    result = trainer_of(options).fit()
    assert result.metrics is not None
    print(f"step {result.metrics['step']}  loss {result.metrics['loss']!r}")
    print(f"checkpoint {result.checkpoint.path if result.checkpoint else 'none'}")
    ray.shutdown()


if __name__ == "__main__":
    main()
