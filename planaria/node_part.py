"""A node's part of an engine of several nodes: it is told the engine's configuration, with
this node's number among the engine's nodes. It ends with its parent, and with the engine.
"""

from __future__ import annotations

import logging
import sys

import msgspec

from planaria.build import run_agent
from planaria.config.options import EngineConfig
from planaria.errors import PlanariaError
from planaria.hosts import child
from planaria.logs import setup_logging

logger = logging.getLogger("planaria.agent")


def main() -> int:
    """Exit code 0 when the engine has ended, 1 when it never came, or can't have this node."""
    (level,) = child.begin()
    setup_logging(level)
    try:
        return run_agent(msgspec.msgpack.decode(next(child.hear()), type=EngineConfig))
    except PlanariaError as e:
        logger.error("%s", e)
        return 1


if __name__ == "__main__":
    sys.exit(main())
