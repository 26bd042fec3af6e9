"""Write Python source at compile time, with the objects that it refers to."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.compile.observe.logs import Topic
from shoal.compile.observe.observation import say

_FOLDER = str(Path(__file__).parent)


class CodeWriter:
    """Lines of one or more functions, and the names that they use."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._lines: list[str] = []
        self._opened: list[int] = []
        self._names: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def line(self, text: str) -> None:
        """Write one line."""
        self._lines.append("    " * len(self._opened) + text)

    def begin(self, text: str) -> None:
        """Write a line that opens a block."""
        self.line(text)
        self._opened.append(len(self._lines))

    def end(self) -> None:
        """Close the block; one without lines goes."""
        if self._opened.pop() == len(self._lines):
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

    def literal(self, value: Any) -> str:
        """A value as an expression: written out where that is exact, by name otherwise."""
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        if type(value) is list:
            return "[" + ", ".join(self.literal(item) for item in value) + "]"
        if type(value) is tuple:
            return "(" + "".join(f"{self.literal(item)}, " for item in value) + ")"
        if type(value) is slice:
            parts = (value.start, value.stop, value.step)
            return "slice(" + ", ".join(self.literal(part) for part in parts) + ")"
        return self.name("constant", value)

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self._lines) + "\n"

    def compiled(self, name: str) -> Callable[..., Any]:
        """Run the source, and return the function of that name."""
        text = self.text
        say(Topic.CODE, lambda: f"{self._title}\n{text}")
        # In this folder, so that Dynamo, which skips the folder, does not trace what it holds.
        file = f"{_FOLDER}/<{self._title} {abs(hash(text)):x}>"
        # So that tracebacks and debuggers show the lines.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        space = dict(self._names)
        exec(compile(text, file, "exec"), space)
        function = space[name]
        function.source = text
        return function
