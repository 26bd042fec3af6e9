"""JSON and pickles that nobody vouches for, read in no more memory than real ones of their length.

JSON may say nothing twice, and holds finite numbers alone. A text of `{}` takes 26 times its length
as Python objects, and one of `[[[[]]]]` 42 times, where a manifest of ours takes 9 times. So the
signs that become objects are counted first.

A pickle is a program. Here its instructions are an allow-list: those of numbers, texts, lists,
tuples, tables, and of objects, which become records that keep what they are given: nothing is
called. Python's own unpickler would take 2 GiB for 10 bytes (a place in its memo, a length that the
file does not have), and 80 bytes for each byte of a file of empty lists. So each instruction is
charged with what it can take, and a pickle may not take more than a real one of its length.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shoal.errors import CheckpointError

_OBJECT_BYTES, _LIST_BYTES, _KEY_BYTES, _STRING_BYTES, _ITEM_BYTES = 300, 80, 220, 72, 40
"""The most that each takes while it is parsed, as measured; a key, if no other has its name.
A key that comes again takes the room of a pointer."""

_JSON_RATIO = 9
_JSON_SLACK_BYTES = 32 << 20


def strict_json(data: bytes, keys: Iterable[str] = ()) -> Any:
    """Parse a text, in which `keys` may come again and again.

    Raises ValueError, or RecursionError where it nests without end.
    """
    check_size(data, keys)
    return json.loads(
        data,
        object_pairs_hook=_no_duplicates,
        parse_constant=_no_constant,
        parse_float=_finite,
    )


def check_size(data: bytes, keys: Iterable[str] = ()) -> None:
    """Raise ValueError if a text can take more memory than real ones of its length do."""
    again = sum(data.count(f'"{key}":'.encode()) for key in keys)
    # Signs within strings are counted, too.
    expected = (
        _OBJECT_BYTES * data.count(b"{")
        + _LIST_BYTES * data.count(b"[")
        + _KEY_BYTES * (data.count(b":") - again)
        + _STRING_BYTES * (data.count(b'"') // 2 - again)
        + _ITEM_BYTES * data.count(b",")
        + 8 * again
    )
    if expected > _JSON_RATIO * len(data) + _JSON_SLACK_BYTES:
        raise ValueError(
            f"its {len(data):,} bytes can take {expected:,} in memory: too many small values"
        )


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("the same key twice in one object")
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is larger than any number here")
    return value


Names = Callable[[str, str], Any]
"""Gives what stands for a name of a module; raises CheckpointError unless it is allowed."""

_PICKLE_RATIO = 20
"""A pickle may be charged this much for each byte; DCP's metadata is charged 14."""
_PICKLE_SLACK_BYTES = 1 << 20
_MAX_ARGUMENTS = 16


class PickledObject:
    """Stands for an object: its class's name, its arguments, and its state."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[object, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None

    def __getitem__(self, key: str) -> Any:
        """Give a field; raises CheckpointError if there is none."""
        if not isinstance(self.state, dict) or key not in self.state:
            raise CheckpointError(f"expected a {self.kind} with a field {key!r}")
        return self.state[key]

    def get(self, key: str) -> Any:
        """Give a field that is left out of the state where it is None."""
        return self[key] if isinstance(self.state, dict) and key in self.state else None


@dataclass(frozen=True, slots=True)
class PickledClass:
    """Stands for a class, or for a function that makes objects."""

    make: Callable[[tuple[object, ...]], object]


def read_pickle(data: bytes, names: Names) -> Any:
    """Give the value that a pickle makes; raises CheckpointError for any that is not allowed."""
    return _Interpreter(data, names).run()


class _Interpreter:
    def __init__(self, data: bytes, names: Names) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._names = names
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._classes: dict[tuple[str, str], Any] = {}
        self._left = _PICKLE_RATIO * len(data) + _PICKLE_SLACK_BYTES

    def run(self) -> Any:
        """Follow the instructions to the end."""
        while True:
            code = self.take(1)[0]
            if code == _STOP:
                return self.pop()
            found = _INSTRUCTIONS.get(code)
            if found is None:
                raise CheckpointError(f"instruction {code:#04x} is not allowed there")
            cost, follow = found
            self.charge(cost)
            follow(self)

    def charge(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise CheckpointError(
                f"its {len(self._data):,} bytes would take more memory than real ones"
            )

    def take(self, count: int) -> memoryview:
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise CheckpointError(f"it ends at byte {len(self._data):,}, within an instruction")
        self._at += count
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def long(self) -> int:
        return int.from_bytes(self.take(self.take(1)[0]), "little", signed=True)

    def text(self, form: str) -> str:
        value = str(self.take(self.number(form)), "utf-8", "surrogatepass")
        self.charge(sys.getsizeof(value))
        return value

    def line(self) -> str:
        stop = bytes(self._data[self._at : self._at + 200]).find(b"\n")
        if stop < 0:
            raise CheckpointError("it holds a name of more than 200 letters")
        return str(self.take(stop + 1)[:-1], "utf-8")

    def push(self, value: object) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        # Never below a mark: what is there belongs to a container that is not made yet.
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise CheckpointError("it takes a value that is not there")
        return self._stack.pop()

    def pop_many(self, count: int) -> list[Any]:
        """The last values, in the order in which they were pushed."""
        return [self.pop() for _ in range(count)][::-1]

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def pop_since_mark(self) -> list[Any]:
        if not self._marks:
            raise CheckpointError("it takes values since a mark that is not there")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _top(self, kind: type) -> Any:
        value = self._stack[-1] if self._stack else None
        if type(value) is not kind:
            raise CheckpointError(f"expected a {kind.__name__}, got a {type(value).__name__}")
        return value

    def protocol(self) -> None:
        if self.take(1)[0] > 5:
            raise CheckpointError("it is of a protocol that is not known")

    def extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        table = self._top(dict)
        if len(values) % 2:
            raise CheckpointError("it has a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Tuples within tuples without end would overflow the stack when they are hashed.
            if not isinstance(key, str | int | PickledObject):
                raise CheckpointError(f"it has a {type(key).__name__} as a key")
            table[key] = value
        self.charge(len(values) * (_ENTRY_BYTES if len(table) <= 5 else _GROWN_ENTRY_BYTES) // 2)

    def memoize(self, place: int | None = None) -> None:
        value = self.pop()
        self.push(value)
        place = len(self._memo) if place is None else place
        # Picklers count; a place that is far away would be room for all before it.
        if place > len(self._memo):
            raise CheckpointError(f"it remembers value {place:,} after {len(self._memo):,}")
        self._memo[place : place + 1] = [value]

    def recall(self, place: int) -> None:
        if place >= len(self._memo):
            raise CheckpointError("it recalls a value that is not there")
        self.push(self._memo[place])

    def name(self, module: object, name: object) -> None:
        """Push what stands for a name, the same at each mention."""
        if not isinstance(name, str) or not isinstance(module, str):
            raise CheckpointError("it names something by what is no text")
        if (module, name) not in self._classes:
            self._classes[module, name] = self._names(module, name)
        self.push(self._classes[module, name])

    def reduce(self) -> None:
        function, arguments = self.pop_many(2)
        if not isinstance(function, PickledClass) or type(arguments) is not tuple:
            raise CheckpointError(f"it calls a {type(function).__name__}")
        if len(arguments) > _MAX_ARGUMENTS:
            raise CheckpointError(f"it calls something with {len(arguments):,} arguments")
        made = function.make(arguments)
        self.charge(sys.getsizeof(made) if isinstance(made, PickledObject | dict) else 0)
        self.push(made)

    def build(self) -> None:
        state = self.pop()
        self._top(PickledObject).state = state


_STOP = pickle.STOP[0]
_ENTRY_BYTES, _GROWN_ENTRY_BYTES = 24, 100

_INSTRUCTIONS: dict[int, tuple[int, Callable[[_Interpreter], object]]] = {
    code[0]: (cost, follow)
    for code, cost, follow in (
        (pickle.PROTO, 0, _Interpreter.protocol),
        (pickle.FRAME, 0, lambda i: i.number("<Q")),
        (pickle.NONE, 8, lambda i: i.push(None)),
        (pickle.NEWTRUE, 8, lambda i: i.push(True)),
        (pickle.NEWFALSE, 8, lambda i: i.push(False)),
        (pickle.BININT, 40, lambda i: i.push(i.number("<i"))),
        (pickle.BININT1, 8, lambda i: i.push(i.number("<B"))),
        (pickle.BININT2, 40, lambda i: i.push(i.number("<H"))),
        (pickle.LONG1, 320, lambda i: i.push(i.long())),
        (pickle.BINFLOAT, 32, lambda i: i.push(i.number(">d"))),
        (pickle.SHORT_BINUNICODE, 8, lambda i: i.push(i.text("<B"))),
        (pickle.BINUNICODE, 8, lambda i: i.push(i.text("<I"))),
        (pickle.BINUNICODE8, 8, lambda i: i.push(i.text("<Q"))),
        (pickle.MARK, 8, _Interpreter.mark),
        (pickle.EMPTY_TUPLE, 8, lambda i: i.push(())),
        (pickle.TUPLE1, 56, lambda i: i.push(tuple(i.pop_many(1)))),
        (pickle.TUPLE2, 56, lambda i: i.push(tuple(i.pop_many(2)))),
        (pickle.TUPLE3, 56, lambda i: i.push(tuple(i.pop_many(3)))),
        (pickle.TUPLE, 56, lambda i: i.push(tuple(i.pop_since_mark()))),
        (pickle.EMPTY_LIST, 80, lambda i: i.push([])),
        (pickle.APPEND, 32, lambda i: i.extend(i.pop_many(1))),
        (pickle.APPENDS, 32, lambda i: i.extend(i.pop_since_mark())),
        (pickle.EMPTY_DICT, 72, lambda i: i.push({})),
        (pickle.SETITEM, 100, lambda i: i.set_items(i.pop_many(2))),
        (pickle.SETITEMS, 100, lambda i: i.set_items(i.pop_since_mark())),
        (pickle.MEMOIZE, 8, _Interpreter.memoize),
        (pickle.BINPUT, 8, lambda i: i.memoize(i.number("<B"))),
        (pickle.LONG_BINPUT, 8, lambda i: i.memoize(i.number("<I"))),
        (pickle.BINGET, 8, lambda i: i.recall(i.number("<B"))),
        (pickle.LONG_BINGET, 8, lambda i: i.recall(i.number("<I"))),
        (pickle.GLOBAL, 8, lambda i: i.name(i.line(), i.line())),
        (pickle.STACK_GLOBAL, 8, lambda i: i.name(*i.pop_many(2))),
        (pickle.REDUCE, 8, _Interpreter.reduce),
        (pickle.NEWOBJ, 8, _Interpreter.reduce),
        (pickle.BUILD, 0, _Interpreter.build),
        (pickle.BINPERSID, 128, lambda i: i.push(PickledObject("storage", (i.pop(),)))),
    )
}
"""Each instruction that is followed, with the memory that it can take."""
