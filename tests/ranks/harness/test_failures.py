"""What a test sees when a rank raises, dies, hangs or skips, and that the next test works."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import RankDied, RankFailed, RankHung, on_ranks, ranks


@pytest.fixture(autouse=True)
def next_run_works():
    yield
    assert on_ranks(2, meet) == [2.0, 2.0]


def meet() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        left, right = [1, 2], [1, 3]
        assert left == right, "lists differ"
    wait_in_a_collective()


def wait_in_a_collective() -> None:
    dist.barrier()


def raise_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()}")


def hold_the_interpreter() -> None:
    if dist.get_rank() == 0:
        ctypes.PyDLL(None).sleep(100)  # a PyDLL call keeps the GIL


def end_process(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        ctypes.string_at(0)
    wait_in_a_collective()


def skip_on(*chosen: int) -> None:
    if dist.get_rank() in chosen:
        pytest.skip("not today")


def is_running(pid: int) -> bool:
    """Whether any thread of a process lives: a dead main thread may leave others behind."""
    try:
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return is_running(pid)  # a thread ended while we looked
    return any(stat.rpartition(")")[2].split()[0] not in "ZX" for stat in stats)


def speak() -> None:
    print("hello from python")
    sys.stdout.flush()
    os.write(2, b"hello from below\n")


def hang_with_a_child(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "100"])
    (folder / str(child.pid)).touch()
    if dist.get_rank() == 0:
        wait_in_a_collective()
    child.wait()


def test_a_failing_rank_shows_its_traceback_and_where_the_others_are():
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        on_ranks(2, raise_on_one)
    assert time.monotonic() - start < 20  # far below the timeout, which the other rank would reach
    failure = caught.value
    assert failure.rank == 1
    assert failure.headline == "rank 1 of 2 failed: AssertionError: lists differ"
    assert "assert [1, 2] == [1, 3]" in failure.traceback
    assert 'assert left == right, "lists differ"' in failure.traceback
    assert "tests/harness" not in failure.traceback
    assert failure.others.keys() == {0}
    assert failure.others[0].startswith("still running")
    assert "in wait_in_a_collective\n    dist.barrier()" in failure.others[0]
    assert failure.traceback in str(failure)
    assert failure.others[0] in str(failure)


def test_every_rank_that_fails_is_heard_and_lives_on():
    before = on_ranks(2, os.getpid)
    with pytest.raises(RankFailed) as caught:
        on_ranks(2, raise_everywhere)
    assert on_ranks(2, os.getpid) == before
    failure = caught.value
    assert f"KeyError: 'rank {failure.rank}'" in failure.traceback
    assert f"KeyError: 'rank {1 - failure.rank}'" in failure.others[1 - failure.rank]


def test_a_hang_ends_at_the_timeout_with_all_stacks(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankHung, match="ranks 0, 1 of 2 did not finish within 2 s") as caught:
        on_ranks(2, hang_with_a_child, tmp_path, timeout_s=2)
    assert time.monotonic() - start < 10
    assert "in wait_in_a_collective" in caught.value.traceback
    assert "in hang_with_a_child\n    child.wait()" in caught.value.others[1]
    children = [int(child.name) for child in tmp_path.iterdir()]
    assert len(children) == 2
    assert not any(map(is_running, children))


def test_stacks_come_even_from_a_rank_that_holds_the_interpreter():
    with pytest.raises(RankHung, match=r"rank 0 of 2 did not") as caught:
        on_ranks(2, hold_the_interpreter, timeout_s=1)
    assert "ctypes.PyDLL(None).sleep(100)" in caught.value.traceback
    assert caught.value.others[1] == "returned"


@pytest.mark.parametrize(
    ("how", "says"),
    [("kill", "died of SIGKILL"), ("exit", "died with exit code 3"), ("crash", "died of SIGSEGV")],
)
def test_a_dead_rank_is_noticed_at_once(how, says):
    start = time.monotonic()
    with pytest.raises(RankDied, match=f"rank 1 of 2 {says}") as caught:
        on_ranks(2, end_process, how)
    assert time.monotonic() - start < 15
    assert caught.value.rank == 1
    assert ("in end_process" in caught.value.traceback) == (how == "crash")
    assert "wait_in_a_collective" in caught.value.others[0]


def test_a_rank_that_dies_between_tests_is_replaced():
    victim = on_ranks(2, os.getpid)[1]
    os.kill(victim, signal.SIGKILL)
    while is_running(victim):
        time.sleep(0.01)
    assert victim not in on_ranks(2, os.getpid)


def test_a_skip_on_all_ranks_skips_and_keeps_the_pool():
    before = on_ranks(2, os.getpid)
    with pytest.raises(pytest.skip.Exception, match="not today"):
        on_ranks(2, skip_on, 0, 1)
    assert on_ranks(2, os.getpid) == before


def test_a_skip_on_one_rank_is_a_failure():
    with pytest.raises(RankFailed, match="rank 1 of 2 skipped not today, but others did not"):
        on_ranks(2, skip_on, 1)


@ranks(2)
def test_xfail_inside_a_body_counts():
    pytest.xfail("expected")


def test_output_of_ranks_is_shown(capsys):
    for _ in range(2):
        on_ranks(2, speak)
        assert capsys.readouterr().out.splitlines() == [
            f"[rank {rank}] hello from {where}" for rank in (0, 1) for where in ("python", "below")
        ]


def test_an_interrupt_replaces_the_ranks():
    before = on_ranks(2, os.getpid)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        on_ranks(2, time.sleep, 100)
    assert not set(before) & set(on_ranks(2, os.getpid))
