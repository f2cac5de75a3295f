"""An example for torchrun in which processes kill themselves, at moments that were drawn before.

    torchrun ... killed_at_random.py KILLS examples/elastic.py --folder ...

KILLS is JSON: for each start of the job the rank that ends, and the seconds after which it does.
A clock of its own does it, wherever the rank is by then: it compiles, is in a collective, or writes
a checkpoint.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading

if __name__ == "__main__":
    kills = json.loads(sys.argv[1])
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start < len(kills) and kills[start][0] == int(os.environ["RANK"]):
        clock = threading.Timer(kills[start][1], os.kill, (os.getpid(), signal.SIGKILL))
        clock.daemon = True
        clock.start()
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
