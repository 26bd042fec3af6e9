"""Runs a program eagerly and compiled, and compares all that its caller can see, stage by stage.

`compare` is the one verb. It makes fresh inputs for every run from the same seed, looks at the
world after forward, after an in-place edit of every output, and after backward, and fails with one
line per difference. Eager is the truth. Where torch's own ahead-of-time runtime is known to differ
from eager in a way that no number depends on, a test says so with `ignore` and the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_leaves

import shoal  # noqa: F401  (gives the backend its name where no entry point did)
from compile_facts import Stage, differences, stage_of, tensors_of, versions_of

BACKEND = os.environ.get("SHOAL_TEST_BACKEND", "shoal")
"""The compiler under test, by its name in `torch.compile`."""

Scenario = Literal["train", "edit", "infer"]
Entry = Literal["compile", "aot"]
Program = Callable[..., Any]
Backward = Callable[[Any, "Given"], None]

ENTRIES: tuple[Entry, ...] = ("compile", "aot")
SEED = 1234

WRAPPED = ("*.history", "*.requires_grad", "*: relation *", "*.bumped")
"""Of tensor subclasses that wrap tensors: where the inner ones stand in autograd's graph, and how
they alias, is no promise of the wrapper's. To be ignored in comparisons of such inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Arguments of one call, and tensors that the caller watches without passing them."""

    args: tuple[Any, ...]
    watched: Mapping[str, Any] = field(default_factory=dict)


def compiled(
    fn: Program, *, backend: str | Callable[..., Any], through: Entry, **options: Any
) -> Program:
    """`fn` compiled by `backend`: whole through Dynamo, or straight by its `aot_function`."""
    if through == "compile":
        torch._dynamo.reset()
        return torch.compile(fn, backend=backend, **{"fullgraph": True, **options})
    door = import_module("shoal.aot" if backend == "shoal" else "functorch.compile")
    return door.aot_function(fn, fw_compiler=door.nop)


def outer_tensors(outputs: Any) -> list[Tensor]:
    """The tensors of a result, each object once."""
    found: list[Tensor] = []
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and all(leaf is not other for other in found):
            found.append(leaf)
    return found


def tangent_for(tensor: Tensor) -> Tensor:
    """Numbers that no two elements share, so that a misplaced gradient shows."""
    plain = torch.arange(1, tensor.numel() + 1, dtype=torch.float32).reshape(tensor.shape) / 8
    return (torch.ones_like(tensor) * plain).to(tensor.dtype)


def backward_all(outputs: Any, given: Given) -> None:
    """Backward from every output that requires a gradient."""
    roots = [tensor for tensor in outer_tensors(outputs) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [tangent_for(root) for root in roots])


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of one program: calls, looks, and keeps what it saw."""

    call: Program
    given: Given
    scenario: Scenario
    backward: Backward
    stages: list[Stage] = field(default_factory=list)

    def watch(self, outputs: Any, edits: Any) -> dict[str, Any]:
        """What the caller holds; the arguments before the outputs, so that names are stable."""
        return {"arg": self.given.args, **self.given.watched, "out": outputs, "edit": edits}

    def stage(self, name: str, act: Callable[[], Any], outputs: Any = None) -> Any:
        """Do one thing and describe the world after it; None when it raised."""
        held = {**self.watch(outputs, None)}
        versions = {
            name: count
            for key, value in held.items()
            for name, count in versions_of(tensors_of(value, key)).items()
        }
        try:
            result = act()
        except Exception as error:
            inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
            self.stages.append(Stage(name=name, error=inner))
            return None
        after = result if name.endswith("forward") else outputs
        edits = result if name.endswith("edit") else None
        self.stages.append(stage_of(name, self.watch(after, edits), versions))
        return result

    @property
    def failed(self) -> bool:
        """Whether the last stage raised."""
        return bool(self.stages) and self.stages[-1].error is not None

    def step(self, number: int) -> None:
        """Forward, then what the scenario asks for."""
        prefix = f"{self.scenario} {number} "
        outputs = self.stage(f"{prefix}forward", lambda: self.call(*self.given.args))
        if self.failed or self.scenario == "infer":
            return
        if self.scenario == "edit":
            self.stage(f"{prefix}edit", lambda: edit_all(outputs), outputs)
        self.stage(f"{prefix}backward", lambda: self.backward(outputs, self.given), outputs)


def edit_all(outputs: Any) -> list[str]:
    """Add one to every output in place; what that raised, by the type's name."""
    seen: list[str] = []
    for tensor in outer_tensors(outputs):
        try:
            tensor.add_(1)
            seen.append("added")
        except Exception as error:
            seen.append(type(error).__name__)
    return seen


def observe(
    call: Program,
    make_inputs: Callable[[], Any],
    *,
    scenario: Scenario,
    steps: int,
    backward: Backward,
) -> list[Stage]:
    """Run `call` on fresh inputs from one seed; what was there to see."""
    torch.manual_seed(SEED)
    made = make_inputs()
    given = made if isinstance(made, Given) else Given(args=made)
    run = Run(call=call, given=given, scenario=scenario, backward=backward)
    # The context puts back what a program that switches the grad mode leaves behind.
    with torch.set_grad_enabled(scenario != "infer"):
        for number in range(steps):
            run.step(number)
            if run.failed:
                break
    return run.stages


def without_eager_refusal(
    want: list[Stage], got: list[Stage], train: list[Stage] | None
) -> list[Stage]:
    """Allow a backward after an edit where eager refuses it, if its gradients are the true ones.

    Eager refuses when an edit overwrote a saved tensor. A compiled graph may have saved another
    one. Adding a constant changes no gradient, so the truth is that of the run without edits.
    """
    last = len(want) - 1
    if train is None or want[last].error is None or len(got) <= last or got[last].error:
        return want
    if not want[last].name.endswith("backward"):
        return want
    truth = next(s for s in train if s.name.split(" ", 1)[1] == want[last].name.split(" ", 1)[1])
    grads = {key: facts for key, facts in truth.tensors.items() if ".grad" in key}
    seen = got[last]
    allowed = Stage(
        name=seen.name,
        tensors={**seen.tensors, **grads},
        constants=seen.constants,
        relations=seen.relations,
        rng=truth.rng,
        modes=truth.modes,
    )
    return [*want[:last], allowed, *got[last + 1 :]]


def compare(
    fn: Program,
    make_inputs: Callable[[], Any],
    backend: str | Callable[..., Any] = BACKEND,
    *,
    through: Entry = "compile",
    scenarios: tuple[Scenario, ...] = ("train", "edit", "infer"),
    steps: int = 1,
    backward: Backward = backward_all,
    ignore: tuple[str, ...] = (),
    tolerance: float = 0.0,
    may_refuse: str | None = None,
    **options: Any,
) -> None:
    """Fail with a line per difference between eager and compiled runs of `fn`.

    `make_inputs` gives a tuple of arguments or a `Given`. `ignore` holds patterns of what may
    differ. With `may_refuse`, a `NotImplementedError` that says that word is right as well.
    """
    lines: list[str] = []
    trained: list[Stage] | None = None
    call = compiled(fn, backend=backend, through=through, **options)
    for scenario in scenarios:
        if scenario == "infer" and through == "aot":
            # Without guards, what was compiled under one grad mode serves no other.
            call = compiled(fn, backend=backend, through=through)
        setting: Any = {"scenario": scenario, "steps": steps, "backward": backward}
        want = observe(fn, make_inputs, **setting)
        got = observe(call, make_inputs, **setting)
        refused = got[-1].error
        if may_refuse is not None and isinstance(refused, NotImplementedError):
            assert may_refuse in str(refused), f"a refusal of {may_refuse} says: {refused}"
            continue
        if scenario == "train":
            trained = want
        else:
            want = without_eager_refusal(want, got, trained)
        lines += differences(want, got, ignore=ignore, tolerance=tolerance)
    assert not lines, f"{backend} through {through} differs from eager:\n  " + "\n  ".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of a table of programs; its name is the function's."""

    fn: Program
    inputs: Callable[[], Any]
    entries: tuple[Entry, ...] = ENTRIES
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, through: Entry) -> None:
        """Compare this program with eager."""
        compare(self.fn, self.inputs, through=through, **self.options)


def table(*cases: Case, torch_differs: Mapping[str, str] | None = None) -> pytest.MarkDecorator:
    """Parametrize a test over `case` and `through`.

    `torch_differs` says, by pattern of row name, why torch's own ahead-of-time runtime fails a row.
    Those rows are for ours alone.
    """
    rows: list[Any] = []
    for case in cases:
        for entry in case.entries:
            name = f"{case.fn.__name__}-{case.inputs.__name__}-{entry}"
            reasons = [why for like, why in (torch_differs or {}).items() if fnmatch(name, like)]
            marks = [torch_fails(reason) for reason in reasons]
            rows.append(pytest.param(case, entry, id=name, marks=marks))
    return pytest.mark.parametrize(("case", "through"), rows)


def torch_fails(reason: str) -> pytest.MarkDecorator:
    """Run a test only on our own backend, because torch's differs from eager there."""
    return pytest.mark.skipif(BACKEND != "shoal", reason=f"torch differs from eager: {reason}")


def plain() -> tuple[Tensor]:
    """One tensor that needs no gradient."""
    return (torch.randn(4, 6),)


def leaf() -> tuple[Tensor]:
    """One leaf that needs a gradient."""
    return (torch.randn(4, 6, requires_grad=True),)


def inner() -> Given:
    """One tensor inside an autograd graph, which a program may mutate; its leaf is watched."""
    root = torch.randn(4, 6, requires_grad=True)
    return Given(args=(root * 1,), watched={"root": root})


def two_leaves() -> tuple[Tensor, Tensor]:
    """Two leaves that need gradients."""
    return torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)


def inner_pair() -> Given:
    """Two tensors inside an autograd graph."""
    roots = two_leaves()
    args = tuple(root * 1 for root in roots)
    return Given(args=args, watched={"root0": roots[0], "root1": roots[1]})
