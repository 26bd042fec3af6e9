import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
def test_all_threads_end_up_on_one_core() -> None:
    script = (
        "import os, threading\n"
        "from shoal.bench.pin import Pin\n"
        "done = threading.Event(); seen = []\n"
        "look = lambda: (done.wait(), seen.append(os.sched_getaffinity(0)))\n"
        "thread = threading.Thread(target=look); thread.start()\n"
        "pin = Pin(); pin.renew(); pin.renew(); done.set(); thread.join()\n"
        "assert seen == [os.sched_getaffinity(0)] and len(seen[0]) == 1, seen\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=env)
