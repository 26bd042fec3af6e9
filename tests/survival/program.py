"""A training that survives, run by the launcher: dies where it is told to, writes what it saw.

program.py FOLDER PLAN      PLAN: {"<member>": [[step, phase], …], "steps": …, …} as JSON

A member dies when it comes to that phase for the first time in or after that step.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal import fully_shard
from shoal.checkpoint import latest, load_training, save_training, step_folder
from shoal.errors import UsageError
from shoal.layout import Flat, Rows
from shoal.survive import resize, survive
from shoal.survive.protection import Protection

LAYOUTS = {"even": None, "flat": Flat(), "rows": Rows()}
WIDTH = 13
DEATHS = "deaths.txt"
"""Where it is written who died when."""


class Batches:
    """Global batches that any process makes alike."""

    def __init__(self, num_steps: int, num_samples: int, device: str = "cpu") -> None:
        self.num_steps, self.num_samples = num_steps, num_samples
        self.device = device

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + step)
        return torch.randn(self.num_samples, WIDTH, generator=generator).to(self.device)


def build(device: str = "cpu") -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5)
    ).to(device)


def shard(model: nn.Module, layout: str) -> nn.Module:
    for index in (0, 2):
        fully_shard(model[index], layout=LAYOUTS[layout])
    return fully_shard(model, layout=LAYOUTS[layout])


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)


def train_step(model, optimizer, scheduler, inputs: torch.Tensor, weight: float) -> float:
    """One step; returns this rank's part of the mean loss, bit for bit."""
    loss = model(inputs).square().mean() * weight
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All parameters and what the optimizer keeps of them, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = _whole(parameter.detach())
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = _whole(value)
    return found


def _whole(value: Any) -> torch.Tensor:
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    if hasattr(value, "placement"):
        out = torch.empty(value.shape, device=value.local.device) if dist.get_rank() == 0 else None
        value.gather(0, out)
        return torch.empty(0) if out is None else out
    return torch.as_tensor(value).clone()


def kill(folder: Path, member: int, pid: int) -> None:
    with open(folder / DEATHS, "a") as file:
        file.write(f"{time.time()} {member}\n")
    os.kill(pid, signal.SIGKILL)


def resume(folder: Path, model, optimizer, scheduler) -> int:
    """Load the last checkpoint, if there is one; returns its step."""
    saved = latest(folder)
    if saved is None:
        return 0
    scheduler.load_state_dict(load_training(saved, model, optimizer)["scheduler"])
    return int(saved.name.partition("-")[2])


def _is_saved(folder: Path, step: int) -> bool:
    """Whether a checkpoint is there; all ranks must say the same."""
    found = [step_folder(folder, step).exists()]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def refusals(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """What is said of resizes that cannot be."""
    found = []
    other = torch.optim.SGD(model.parameters())
    for one, size in ((optimizer, 0), (optimizer, 13), (other, 2)):
        try:
            resize(model, one, size)
        except UsageError as error:
            found.append(str(error))
    return found


def fork_a_child() -> None:
    """A process that holds this one's sockets, as workers of a DataLoader do."""
    if os.fork() == 0:
        time.sleep(8)
        os._exit(0)


class Doom:
    """Lets this process die in one phase of one step."""

    def __init__(self, folder: Path, member: int, plan: dict[str, Any]) -> None:
        self.folder, self.member = folder, member
        self.moments = [(step, phase) for step, phase in plan.get(str(member), [])]
        self.step = -1
        self.noticed: dict[int, float] = {}
        """When this process heard of deaths, by member."""
        self.broken_at: list[float] = []
        """When this process left the groups of a dead one."""

    def at(self, phase: str) -> None:
        if any(self.step >= step and phase == planned for step, planned in self.moments):
            kill(self.folder, self.member, os.getpid())

    def hook(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from shoal.runtime import reduction
        from shoal.survive import protection, roster, run, versions

        model[2].register_forward_pre_hook(lambda *_: self.at("forward"))
        model[2].register_full_backward_hook(lambda *_: self.at("backward"))
        optimizer.register_step_post_hook(lambda *_: self.at("optimizer"))
        self._around(reduction.UnitReducer, "launch", "reduction", after=True)
        self._around(protection, "exchange", "parity", after=False)
        self._around(protection, "exchange", "parity sent", after=True)
        self._around(versions.Versions, "end_keep", "parity done", after=True)
        self._around(run.SurvivingRun, "_decide", "deciding", after=True)
        save = importlib.import_module("shoal.checkpoint.save")
        self._around(save, "write_regions", "saving", after=True)
        self._note_breaks(run.SurvivingRun)
        self._note_news(roster)
        self._around(run, "rebuild_images", "rebuilding", after=True)

    def _note_news(self, roster: Any) -> None:
        read = roster.EventLog.read

        def around(log: Any) -> list[Any]:
            found = read(log)
            for event in found:
                if event.kind is roster.EventKind.LOST:
                    self.noticed.setdefault(event.member, time.time())
            return found

        roster.EventLog.read = around

    def _note_breaks(self, owner: Any) -> None:
        function = owner._break_off

        def around(*args: Any) -> None:
            self.broken_at.append(time.time())
            function(*args)

        owner._break_off = around

    def _around(self, owner: Any, name: str, phase: str, *, after: bool) -> None:
        function = getattr(owner, name)

        def around(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self.at(phase)
            result = function(*args, **kwargs)
            if after:
                self.at(phase)
            return result

        setattr(owner, name, around)


def main(folder: Path, plan: dict[str, Any]) -> None:
    member = int(os.environ["SHOAL_SURVIVE_MEMBER"])
    torch.set_num_threads(1)
    if plan.get("without_gc"):
        gc.disable()
    device = plan.get("device", "cpu")
    if device == "cpu":
        dist.init_process_group("gloo")
    else:
        # All on one GPU: NCCL allows that to ranks that claim hosts of their own.
        os.environ |= {"NCCL_HOSTID": f"member-{member}", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    layout = plan.get("layout", "even")
    model = shard(build(device), layout)
    optimizer = optimizer_of(model, plan.get("optimizer", "adamw"))
    scheduler = scheduler_of(optimizer)
    doom = Doom(folder, member, plan)
    doom.hook(model, optimizer)
    batches = Batches(plan["steps"], plan.get("samples", 12), device)
    joins = os.environ["SHOAL_SURVIVE_JOINS"] == "1"
    start = 0 if joins else resume(folder, model, optimizer, scheduler)
    snapshots = folder / "snapshots" if plan.get("snapshots") else None
    if start or (snapshots is not None and latest(snapshots) is not None):
        doom.moments.clear()
    losses: dict[int, list] = {}
    ends: list[float] = []
    progress = os.open(folder / f"{member}.at", os.O_CREAT | os.O_WRONLY)
    saves = plan.get("saves", [plan.get("save_at")])
    waits = {int(step): number for step, number in plan.get("wait_for_events", {}).items()}
    with survive(
        model,
        optimizer,
        batches,
        stateful=[scheduler],
        parities=plan.get("parities", 1),
        start=start,
        snapshots=snapshots,
    ) as run:
        began = time.time()
        refused = refusals(model, optimizer) if plan.get("wrong_sizes") else []
        for step in run:
            os.pwrite(progress, f"{step.number:9}".encode(), 0)
            if step.number in waits:  # until it is known who came and went
                while run._watcher.num_events < waits[step.number] and not run._watcher.is_alone:
                    time.sleep(0.005)
            if str(step.number) in plan.get("resize", {}):
                resize(model, optimizer, plan["resize"][str(step.number)])
            if plan.get("pause_s"):
                time.sleep(plan["pause_s"])
            with step:
                doom.step = step.number
                loss = train_step(model, optimizer, scheduler, step.batch, step.weight)
                losses[step.number] = [run.rank, loss.hex()]
                if step.number + 1 in saves and not _is_saved(folder, step.number + 1):
                    extra = {"scheduler": scheduler.state_dict()}
                    save_training(step_folder(folder, step.number + 1), model, optimizer, extra)
            ends.append(time.time())
            if step.number == plan.get("fork_at"):
                fork_a_child()
        if not run.has_left:
            state = whole_state(model, optimizer)
            if run.rank == 0:
                torch.save(state, folder / "state.pt")
        story = {
            "has_left": run.has_left,
            "losses": losses,
            "recoveries": [
                {
                    "members": r.members,
                    "version": r.version,
                    "undone": r.num_undone,
                    "seconds": r.seconds,
                }
                for r in run.recoveries
            ],
            "sent": run.num_sent_bytes,
            "kept": run.num_kept_bytes,
            "broken_at": doom.broken_at,
            "noticed": doom.noticed,
            "ends": ends,
            "began": began,
            "refused": refused,
            "protections": sum(isinstance(one, Protection) for one in gc.get_objects()),
            "kept_on": [str(k.image.device) for p in run._protections for k in p.kept.values()],
        }
        (folder / f"{member}.json").write_text(json.dumps(story))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
