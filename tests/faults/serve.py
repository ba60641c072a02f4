"""`python -m tests.faults.serve serve MODEL ...`: a server that fails when told to, as do its engines."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from planaria.cli import main as planaria
from planaria.processes import die_with_parent
from planaria.server import engine_client
from tests.faults.harm import watch
from tests.faults.orders import Orders

_start = asyncio.create_subprocess_exec


async def start(program: str, *args: str, **options: Any) -> asyncio.subprocess.Process:
    own = ["tests.faults.engine" if arg == "planaria.engine_process" else arg for arg in args]
    return await _start(program, *own, **options)


def main() -> int:
    die_with_parent(os.getppid())
    orders = Orders()
    orders.sign("server")
    watch(lambda: "server", orders)
    engine_client.asyncio.create_subprocess_exec = start  # type: ignore[assignment]
    return planaria()


if __name__ == "__main__":
    sys.exit(main())
