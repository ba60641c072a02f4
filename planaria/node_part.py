"""A node's part of an engine of several nodes: `python -m planaria.node_part PARENT LEVEL`, the engine's configuration
on standard input, with this node's number among the engine's nodes. It ends with its parent, and with the engine.
"""

from __future__ import annotations

import logging
import sys

import msgspec

from planaria.build import run_agent
from planaria.config.options import EngineConfig
from planaria.errors import PlanariaError
from planaria.logs import setup_logging
from planaria.processes import die_with_parent

logger = logging.getLogger("planaria.agent")


def main() -> int:
    """Exit code 0 when the engine has ended, 1 when it never came, or can't have this node."""
    parent, level = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    setup_logging(level)
    try:
        return run_agent(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig))
    except PlanariaError as e:
        logger.error("%s", e)
        return 1


if __name__ == "__main__":
    sys.exit(main())
