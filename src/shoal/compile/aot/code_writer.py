"""Write Python source at compile time, with the objects that it refers to."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.compile.observe.logs import Topic
from shoal.compile.observe.observation import say

_FOLDER = str(Path(__file__).parent)


def listed(texts: Iterable[str]) -> str:
    """Expressions or names in a row, each with a comma after it, as tuples and assignments need."""
    return "".join(f"{text}, " for text in texts)


class CodeWriter:
    """The lines of one function, and the objects that it refers to by name."""

    def __init__(self, title: str, name: str, arguments: Iterable[str]) -> None:
        self._title = title
        self._name = name
        self._lines = [f"def {name}({', '.join(arguments)}):"]
        self._depth = 1
        self._names: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def line(self, text: str) -> None:
        """Write one line."""
        self._lines.append("    " * self._depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Let the lines that are written meanwhile be a block; one without lines goes."""
        self.line(head)
        self._depth += 1
        before = len(self._lines)
        yield
        self._depth -= 1
        if len(self._lines) == before:
            self._lines.pop()

    def name(self, prefix: str, value: Any) -> str:
        """A name for an object; the same one for the same object."""
        known = self._known.get(id(value))
        if known is not None:
            return known
        # In capitals, because graphs bring names of their own.
        name = f"SHOAL_{prefix}_{len(self._names)}"
        self._names[name] = value
        self._known[id(value)] = name
        return name

    def call(self, function: Any, *arguments: str) -> str:
        """A call of a function with these expressions."""
        return f"{self.name(function.__name__, function)}({', '.join(arguments)})"

    def literal(self, value: Any) -> str:
        """A value as an expression: written out where that is exact, by name otherwise."""
        is_finite = type(value) is float and math.isfinite(value)
        if is_finite or value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is list:
            return f"[{', '.join(map(self.literal, value))}]"
        if type(value) is tuple:
            return f"({listed(map(self.literal, value))})"
        if type(value) is slice:
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self.literal, parts))})"
        return self.name("constant", value)

    def compiled(self) -> Callable[..., Any]:
        """Run the source, and return the function."""
        text = "\n".join(self._lines) + "\n"
        say(Topic.CODE, lambda: f"{self._title}\n{text}")
        # In this folder, which Dynamo skips, so that it does not trace the function.
        file = f"{_FOLDER}/<{self._title} {abs(hash(text)):x}>"
        # So that tracebacks and debuggers show the lines.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        space = dict(self._names)
        exec(compile(text, file, "exec"), space)
        function = space[self._name]
        function.source = text
        return function
