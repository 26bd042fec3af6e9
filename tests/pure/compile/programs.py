"""Random programs that mix views, writes, detach and dropout over inputs that may share memory.

A program is source text: what fails is printed as it ran. The generator draws small integers, and
`build` turns them into statements, trying each on real tensors and leaving out those that eager
refuses. So every draw is a valid program, and a shorter draw is a shorter program.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from compile_compare import Given

STATEMENTS = (
    "{new} = {a} * 2",
    "{new} = {a}.sin()",
    "{new} = {a} + {b}",
    "{new} = {a} * {b}",
    "{new} = {a} + {b}.sum()",
    "{new} = {a}.t()",
    "{new} = {a}[1:]",
    "{new} = {a}[0]",
    "{new} = {a}.view(-1)",
    "{new} = {a}.reshape(-1)",
    "{new} = {a}.unsqueeze(0)",
    "{new} = {a}.split(2)[0]",
    "{new} = {a}.unbind(0)[-1]",
    "{new} = {a}.diagonal()",
    "{new} = {a}.expand(2, *{a}.shape)",
    "{new} = {a}.clone()",
    "{new} = {a}.contiguous()",
    "{new} = {a}.detach()",
    "{new} = F.dropout({a}, 0.5)",
    "{new} = torch.rand_like({a}) * {a}",
    "{new} = {a} > {b}.mean()",
    "{a}.mul_(2)",
    "{a}.relu_()",
    "{a}.add_({b})",
    "{a}.copy_({b})",
    # Into booleans eager fills a sum that has a gradient; autograd itself refuses them later.
    "{a}[0] = {b}.sum().to({a}.dtype)",
    "{a}.add_({b}.detach().mean())",
    "with torch.no_grad(): {a}.mul_(3)",
    "with torch.no_grad(): {new} = {a} * 3",
    "{a}.detach().add_(1)",
    # What has gradients autograd takes again, after a write, as it was before its shape changed.
    "{new} = {a}.detach().t_()",
    "{new} = {a}.detach()[:1].squeeze_(0)",
    "{new} = {a}.detach().t().unsqueeze_(0)",
)
"""Lines of a body: `a` and `b` are names in scope, `new` a fresh one."""

SOURCES = (
    ("{new} = torch.randn(3, 4, requires_grad=True)",),
    ("{new} = torch.randn(3, 4)",),
    ("{root} = torch.randn(3, 4, requires_grad=True)", "{new} = {root} * 1"),
    ("{root} = torch.randn(4, 3, requires_grad=True)", "{new} = ({root} * 1).t()"),
    ("{root} = torch.randn(3, 8, requires_grad=True)", "{new} = ({root} * 1)[:, ::2]"),
    ("{new} = torch.randn(6, 4)[::2]",),
)
"""Lines that make an argument which shares memory with no other."""

TIES = ("{new} = {a}", "{new} = {a}[1:]", "{new} = {a}.t()", "{new} = {a}.view(-1)[2:7]")
"""Lines that make an argument out of another one."""

NAMESPACE = {"torch": torch, "F": F, "Given": Given}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomProgram:
    """A function and the maker of its arguments, as source."""

    making: tuple[str, ...]
    arguments: tuple[str, ...]
    roots: tuple[str, ...]
    body: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def source(self) -> str:
        """Both functions, ready to paste into a file."""
        watched = ", ".join(f"{root!r}: {root}" for root in self.roots)
        made = f"Given(args=({', '.join(self.arguments)},), watched={{{watched}}})"
        results = "".join(f"{name}, " for name in self.results)
        lines = [
            "def inputs():",
            *(f"    {line}" for line in self.making),
            f"    return {made}",
            "",
            f"def program({', '.join(self.arguments)}):",
            *(f"    {line}" for line in self.body),
            f"    return ({results})",
        ]
        return "\n".join(lines)

    def load(self) -> tuple[Callable[..., Any], Callable[[], Given]]:
        """The program and the maker of its inputs, freshly defined."""
        scope: dict[str, Any] = dict(NAMESPACE)
        exec(compile(self.source, "<random program>", "exec"), scope)
        return scope["program"], scope["inputs"]

    def __repr__(self) -> str:
        return f"\n{self.source}\n"


WRITE = re.compile(
    r"(?:with torch.no_grad\(\): )?(\w+)(?:\.detach\(\))?(?:\.\w+_\(|\[0\] = )(\w+\))?"
)
"""A line that writes to a name, and the name that it reads as it is meanwhile, with its bracket."""


def tried(line: str, scope: dict[str, Any]) -> bool:
    """Run one line; whether eager accepts it.

    Left out is what torch does not define, though it may happen to work: writes to memory that is
    shown repeatedly, or that is read at other places meanwhile.
    """
    write = WRITE.match(line)
    if write is not None:
        target, source = scope[write[1]], scope.get((write[2] or "").rstrip(")"))
        if 0 in target.stride() or (isinstance(source, Tensor) and _is_elsewhere(target, source)):
            return False
    try:
        exec(line, scope)
    except (RuntimeError, IndexError):
        return False
    return True


def _is_elsewhere(target: Tensor, source: Tensor) -> bool:
    """Whether two tensors show one memory, and not the same elements at the same places."""
    places = [(x.shape, x.stride(), x.storage_offset()) for x in (target, source)]
    memory = [x.untyped_storage().data_ptr() for x in (target, source)]
    return memory[0] == memory[1] and places[0] != places[1]


def living(body: list[str], results: tuple[str, ...]) -> tuple[str, ...]:
    """The lines that write in place or make what is read later.

    Dynamo drops a random draw that nobody reads, and eager's generator would run ahead.
    """
    read = set(results)
    kept: list[str] = []
    for line in reversed(body):
        made = re.search(r"\b(v\d+) = ", line)
        if made is None or made[1] in read:
            kept.append(line)
            read |= set(re.findall(r"\b[vx]\d+\b", line))
    return tuple(reversed(kept))


def build(
    sources: list[tuple[int, int]], steps: list[tuple[int, int, int]], results: list[int]
) -> RandomProgram:
    """Turn drawn numbers into a program; a step that eager refuses is left out."""
    scope: dict[str, Any] = dict(NAMESPACE)
    making: list[str] = []
    names: list[str] = []
    roots: list[str] = []
    for kind, other in sources:
        new, root = f"x{len(names)}", f"r{len(names)}"
        if kind < len(SOURCES) or not names:
            lines = [t.format(new=new, root=root) for t in SOURCES[kind % len(SOURCES)]]
        else:
            template = TIES[kind - len(SOURCES)]
            lines = [template.format(new=new, a=names[other % len(names)])]
        if all(tried(line, scope) for line in lines):
            making += lines
            names.append(new)
            roots += [root] if root in scope else []
    arguments = tuple(names)
    body: list[str] = []
    for kind, first, second in steps:
        new = f"v{len(body)}"
        line = STATEMENTS[kind].format(
            new=new, a=names[first % len(names)], b=names[second % len(names)]
        )
        if tried(line, scope):
            body.append(line)
            if isinstance(scope.get(new), Tensor):
                names.append(new)
    # Counting from the end makes the latest values the likeliest results.
    chosen = tuple(dict.fromkeys(names[-1 - index % len(names)] for index in results))
    return RandomProgram(
        making=tuple(making),
        arguments=arguments,
        roots=tuple(roots),
        body=living(body, chosen),
        results=chosen,
    )


def random_programs(*, tied: bool = True, most_steps: int = 8) -> st.SearchStrategy[RandomProgram]:
    """Programs of up to `most_steps` statements; without `tied`, no two inputs share memory."""
    kinds = len(SOURCES) + (len(TIES) if tied else 0)
    small = st.integers(0, 11)
    return st.builds(
        build,
        st.lists(st.tuples(st.integers(0, kinds - 1), small), min_size=1, max_size=3),
        st.lists(
            st.tuples(st.integers(0, len(STATEMENTS) - 1), small, small),
            min_size=1,
            max_size=most_steps,
        ),
        st.lists(st.integers(0, 5), min_size=1, max_size=3),
    )
