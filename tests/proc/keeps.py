"""Who keeps a fork, and says its pid and that of its server, once it is up."""

from __future__ import annotations

import os
import signal
import threading

from planaria.hosts.host import Program
from planaria.hosts.local import HERE, LocalHost
from planaria.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(os.getppid())
    host = LocalHost(devices=(), forks={"tests.proc.kept": ["tests.proc.kept"]})
    up = threading.Event()
    child = host.spawn((HERE, 0), Program("tests.proc.kept", ("deaf",)), None, lambda child: up.set())
    up.wait()
    with open(f"/proc/{child.place.pid}/stat") as f:
        parent = f.read().rpartition(")")[2].split()[1]
    print(child.place.pid, parent, flush=True)
    signal.pause()
