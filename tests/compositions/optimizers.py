"""Rows of the table: optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal.optim
from compositions.feature import Feature
from compositions.ways import Way

Make = Callable[[list[nn.Parameter]], Optimizer]


class By(Feature):
    """Trained by an optimizer."""

    def __init__(self, make: type[Optimizer], **options: Any) -> None:
        self.make, self.given = make, options

    def optimizer(self, way: Way, parameters: Iterable[nn.Parameter]) -> Any:
        options = dict(self.given)
        if (
            way.is_sharded
            and way.has_parallel_layers
            and options.pop("fused", options.pop("foreach", False))
        ):
            # torch's lists take DTensors of one mesh.
            return Joined(*(self.make(part, **self.given) for part in _by_mesh(parameters)))
        return self.make(list(parameters), **options)  # pyright: ignore


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())


class Whole(By):
    """An optimizer that looks across elements; ours where no rank has all of a parameter."""

    def __init__(self, ours: Any, theirs: Any, **options: Any) -> None:
        super().__init__(theirs, **options)
        self.ours = ours

    def optimizer(self, way: Way, parameters: Iterable[nn.Parameter]) -> Any:
        if not way.is_sharded:
            return self.make(list(parameters), **self.given)  # pyright: ignore
        mesh = None if way.has_parallel_layers else way.given["mesh"]
        return self.ours(list(parameters), mesh=mesh, **self.given)


class Searched(Whole):
    """Every step is a search, which asks for several losses."""

    tolerance = {"rtol": 1e-3, "atol": 1e-4}

    def step(self, way: Way, number: int) -> None:
        def closure() -> Tensor:
            way.optimizer.zero_grad()
            return way.backward(number)

        way.optimizer.step(closure)
        way.optimizer.zero_grad()


class Orthogonal(Feature):
    """Muon for matrices, SGD for everything else."""

    tolerance = {"rtol": 1e-2, "atol": 2e-3}

    def optimizer(self, way: Way, parameters: Iterable[nn.Parameter]) -> Any:
        parameters = list(parameters)
        matrices = [p for p in parameters if p.dim() == 2]
        others = [p for p in parameters if p.dim() != 2]
        make: Any = shoal.optim.Muon if way.is_sharded else torch.optim.Muon
        mesh = {"mesh": way.given["mesh"]} if way.is_sharded and not way.has_parallel_layers else {}
        return Joined(make(matrices, lr=0.1, **mesh), torch.optim.SGD(others, lr=0.5))


class Joined:
    """Optimizers that step together."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


ROWS: dict[str, list[Feature]] = {
    "Adam and AdamW": [
        By(torch.optim.AdamW, lr=1e-2, fused=True, eps=1e-3),
        By(torch.optim.Adam, lr=1e-2, foreach=True, eps=1e-3),
        By(shoal.optim.AdamW, lr=1e-2, foreach=True, eps=1e-3),
    ],
    "SGD, fused too": [
        By(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
        By(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    ],
    "other element-wise optimizers": [
        By(torch.optim.Adagrad, lr=0.1, eps=1e-3),
        By(torch.optim.RMSprop, lr=1e-2, centered=True, momentum=0.5, eps=1e-3),
        By(torch.optim.NAdam, lr=1e-2, eps=1e-3),
        By(torch.optim.RAdam, lr=0.1, eps=1e-3),
        By(torch.optim.Adamax, lr=1e-2, eps=1e-3),
        By(torch.optim.ASGD, lr=0.1),
        By(torch.optim.Adadelta, lr=1.0, eps=1e-3),
        By(torch.optim.Rprop, lr=1e-2),
    ],
    "Adafactor": [Whole(shoal.optim.Adafactor, torch.optim.Adafactor, lr=0.1)],
    "LBFGS": [
        Searched(shoal.optim.LBFGS, torch.optim.LBFGS, lr=0.3, max_iter=3),
        Searched(shoal.optim.LBFGS, torch.optim.LBFGS, max_iter=2, line_search_fn="strong_wolfe"),
    ],
    "Muon": [Orthogonal()],
}
