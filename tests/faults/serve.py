"""`python -m tests.faults.serve serve MODEL ...`: a server that fails when told to, as do its engines."""

from __future__ import annotations

import os
import sys

from planaria.cli import main as planaria
from planaria.processes import die_with_parent
from planaria.server import engine_client
from tests.faults.harm import watch
from tests.faults.orders import Orders


def main() -> int:
    die_with_parent(os.getppid())
    orders = Orders()
    orders.sign("server")
    watch(lambda: "server", orders)
    engine_client.ENGINE = "tests.faults.engine"
    return planaria()


if __name__ == "__main__":
    sys.exit(main())
