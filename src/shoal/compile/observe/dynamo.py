"""Why Dynamo cut a graph short, or compiled a function again."""

from __future__ import annotations

from dataclasses import dataclass

from shoal._torch import dynamo

_EXPLAINS = "Explanation: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A place where a graph ended before its function did."""

    reason: str
    where: str
    """File and line, as far as known."""

    @property
    def headline(self) -> str:
        """The first line of the reason, with what explains it."""
        first, *rest = [line.strip() for line in self.reason.strip().splitlines()]
        explained = [line for line in rest if line.startswith(_EXPLAINS)]
        return f"{first}: {explained[0].removeprefix(_EXPLAINS)}" if explained else first


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompile:
    """A function that was compiled again, because something that was guarded had changed."""

    function: str
    where: str
    reason: str


def breaks() -> list[Break]:
    """All breaks since Dynamo was last reset, oldest first."""
    return [
        Break(reason=reason, where=_place(*place) if place is not None else "")
        for reason, place in dynamo.graph_breaks()
    ]


def recompiles() -> list[Recompile]:
    """All recompilations since Dynamo was last reset."""
    return [
        Recompile(
            function=code.co_name,
            where=_place(code.co_filename, code.co_firstlineno),
            reason=reason,
        )
        for code, reason in dynamo.recompiles()
    ]


def _place(file: str, line: int | None) -> str:
    return f"{file}:{line}" if line is not None else file


class News:
    """What has happened since it was last asked."""

    def __init__(self) -> None:
        self._num_breaks = 0
        self._num_recompiles = 0

    def text(self) -> str:
        """New breaks and recompilations, one a line; empty if there are none."""
        broken, again = breaks(), recompiles()
        # Fewer than before: Dynamo was reset.
        fresh = broken[self._num_breaks if len(broken) >= self._num_breaks else 0 :]
        anew = again[self._num_recompiles if len(again) >= self._num_recompiles else 0 :]
        self._num_breaks, self._num_recompiles = len(broken), len(again)
        lines = [f"break at {one.where}: {one.reason.strip()}" for one in fresh]
        lines += [f"{one.function} ({one.where}) again: {one.reason.strip()}" for one in anew]
        return "\n".join(lines)


news = News()
"""Of this process."""
