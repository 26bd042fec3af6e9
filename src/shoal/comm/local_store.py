"""A key-value store for ranks that take turns: who waits for a key lets the others run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store

Wait = Callable[[Callable[[], bool], Callable[[], str]], None]


class LocalStore(Store):
    """One rank's view of keys that all ranks share."""

    def __init__(self, shared: dict[str, bytes], wait_until: Wait) -> None:
        super().__init__()
        self._shared = shared
        self._wait_until = wait_until

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._shared[key] = _to_bytes(value)

    def get(self, key: str) -> bytes:
        """Wait for a key, and read it."""
        self.wait([key])
        return self._shared[key]

    def add(self, key: str, value: int) -> int:
        """Count, from 0 where the key is new."""
        total = int(self._shared.get(key, b"0")) + value
        self._shared[key] = str(total).encode()
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Lengthen a key's value."""
        self._shared[key] = self._shared.get(key, b"") + _to_bytes(value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self._shared for key in keys)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key only if it has the expected value, or has none and none is expected."""
        present = self._shared.get(key, b"")
        if present == _to_bytes(expected_value):
            present = self._shared[key] = _to_bytes(desired_value)
        return present or _to_bytes(expected_value)

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._shared.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._shared)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Let others run until all keys are there."""
        self._wait_until(
            lambda: self.check(keys), lambda: f"waits for the store to hold {', '.join(keys)}"
        )


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
