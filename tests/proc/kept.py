"""A process for tests of hosts: `python -m tests.proc.kept PARENT SAYS GIVEN... HOW`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading

from planaria.hosts import child


def main() -> None:
    *given, how = child.begin()
    if how == "deaf":
        child.say("up")
        threading.Event().wait(60)
    elif how == "ends":
        child.say("last word")
    elif how == "what":
        told = next(child.hear()).decode()
        found = {"imported": "colorsys" in sys.modules, "cwd": os.getcwd(), "env": os.environ.get("KEPT"), "told": told}
        found["given"] = [os.read(int(fd), 100).decode() for fd in given]
        child.say(json.dumps({**found, "keeper": child.keeper(), "threads": len(os.listdir("/proc/self/task"))}))
        print("on standard output", flush=True)
        sys.exit(3)
    else:
        heard = child.hear()
        child.say(" ".join(hashlib.sha256(next(heard)).hexdigest() for _ in range(int(how))))
        next(heard, None)


if __name__ == "__main__":
    main()
