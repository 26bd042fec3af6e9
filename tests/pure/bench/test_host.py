import os
import subprocess
import sys

import pytest

from shoal.bench.host import fastest_core


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
def test_all_threads_end_up_on_one_core() -> None:
    script = (
        "import os, threading\n"
        "from shoal.bench.host import fastest_core, stay_on\n"
        "done = threading.Event(); seen = []\n"
        "look = lambda: (done.wait(), seen.append(os.sched_getaffinity(0)))\n"
        "thread = threading.Thread(target=look); thread.start()\n"
        "stay_on(fastest_core()); stay_on(fastest_core()); done.set(); thread.join()\n"
        "assert seen == [os.sched_getaffinity(0)] and len(seen[0]) == 1, seen\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=env)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
def test_looking_for_a_core_moves_nobody() -> None:
    before = os.sched_getaffinity(0)
    assert fastest_core() in before
    assert os.sched_getaffinity(0) == before
