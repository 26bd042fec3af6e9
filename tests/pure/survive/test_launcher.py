"""The launcher says who is gone, calls spares, and knows when nobody is left."""

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress

import pytest

from shoal.errors import RankError
from shoal.survive.launcher import Launcher, LostStateError
from shoal.survive.roster import Event, EventKind, EventLog


def sleeper(_: int, variables: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(["sleep", "100"], start_new_session=True)


def leaver(status: int):
    """Starts processes that end at once, but for those that join."""

    def start(member: int, variables: Mapping[str, str]) -> subprocess.Popen:
        if variables["SHOAL_SURVIVE_JOINS"] == "1":
            return sleeper(member, variables)
        process = subprocess.Popen(["sh", "-c", f"exit {status}"], start_new_session=True)
        process.wait()
        return process

    return start


def kill(launcher: Launcher, member: int) -> None:
    process = launcher.processes[member]
    os.kill(process.pid, signal.SIGKILL)
    assert isinstance(process, subprocess.Popen)
    process.wait()


def events_of(launcher: Launcher) -> list[Event]:
    return EventLog(launcher.store).read()


def test_a_spare_that_is_ready_takes_the_place_of_a_lost_rank():
    with Launcher(sleeper, 2, num_spares=1) as launcher:
        assert launcher.poll()
        assert sorted(launcher.processes) == [0, 1, 2]
        launcher.store.set("arrivals/2", "1")
        assert launcher.poll()
        assert events_of(launcher) == []  # it waits
        kill(launcher, 0)
        assert launcher.poll()
        lost = Event(kind=EventKind.LOST, member=0)
        assert events_of(launcher) == [lost, Event(kind=EventKind.JOINED, member=2)]
        assert sorted(launcher.processes) == [0, 1, 2, 3]  # and the next one waits
        kill(launcher, 3)  # of which nobody has heard
        assert launcher.poll()
        assert len(events_of(launcher)) == 2
        assert sorted(launcher.processes) == [0, 1, 2, 3, 4]


def test_a_spare_that_comes_late_is_let_in_when_it_has_come():
    with Launcher(sleeper, 2, num_spares=1) as launcher:
        launcher.poll()
        kill(launcher, 1)
        launcher.poll()
        assert [event.kind for event in events_of(launcher)] == [EventKind.LOST]
        launcher.store.set("arrivals/2", "1")
        launcher.poll()
        assert [event.member for event in events_of(launcher)] == [1, 2]


def test_if_all_have_died_one_that_waits_to_join_is_no_training():
    with Launcher(sleeper, 2) as launcher:
        launcher.join()
        launcher.store.set("arrivals/2", "1")
        assert launcher.poll()
        kill(launcher, 0)
        kill(launcher, 1)
        with pytest.raises(LostStateError, match="all 2 ranks died"):
            launcher.poll()


def test_if_all_have_finished_one_that_waits_to_join_is_ended():
    with Launcher(leaver(0), 2) as launcher:
        launcher.join()
        launcher.store.set("arrivals/2", "1")
        assert not launcher.poll()
        assert launcher.processes[2].poll() is not None
        assert launcher.lost == []


def test_statuses_that_are_fine_and_others():
    with Launcher(leaver(130), 2, fine=(0, 130)) as launcher:
        assert not launcher.poll()
    with Launcher(leaver(3), 2) as launcher:
        with pytest.raises(RankError, match="member 0 ended with status 3"):
            launcher.poll()


def test_the_store_listens_on_this_machine_alone():
    with Launcher(leaver(0), 1) as launcher:
        text = ""
        with suppress(OSError):
            with open("/proc/net/tcp") as file:
                text = file.read()
        if not text:
            pytest.skip("no /proc/net/tcp here")
        port = f":{launcher._port:04X}"
        listening = [line.split()[1] for line in text.splitlines() if line.split()[3] == "0A"]
        assert [where for where in listening if where.endswith(port)] == [f"0100007F{port}"]
