"""One rank in a process of its own: `python rank_main.py`, its boot as a pickled value on stdin's first line,
then one plan per line; one reply per line on stdout. For tests and benchmarks: the product's launchers do more."""

from __future__ import annotations

import base64
import pickle
import sys
from typing import Any

from planaria.worker.worker import Worker


def decode(line: str) -> Any:
    return pickle.loads(base64.b64decode(line))


def encode(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def main() -> None:
    worker = Worker(decode(sys.stdin.readline()))
    for line in sys.stdin:
        print(encode(worker.handle(decode(line))), flush=True)


if __name__ == "__main__":
    main()
