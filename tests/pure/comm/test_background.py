"""Collectives of a thread in the background are nobody's business."""

import threading

import torch.distributed as dist
from torch import Tensor

from shoal.comm import observer


class Listener:
    """Writes down what it hears of."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def launching(self, reason: str, group: dist.ProcessGroup, tensor: Tensor | None) -> str:
        self.heard.append(reason)
        return reason

    def in_stream(self, launched: object = None) -> None: ...

    def waiting(self, reason: str) -> None:
        self.heard.append(f"wait for {reason}")

    def arrived(self) -> None: ...

    def explained(self, failure: str) -> str:
        return failure


def test_nobody_hears_of_a_thread_in_the_background():
    listener, group, told = Listener(), dist.ProcessGroup(0, 1), []

    def run() -> None:
        with observer.in_background():
            told.append(observer.launching("parity", group, None))
            told.append(observer.of_this_thread())
        told.append(observer.of_this_thread())

    with observer.observing(listener):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert observer.launching("a gather", group, None) == "a gather"
    assert told == [None, None, listener]
    assert listener.heard == ["a gather"]
