"""A server with the fake engine, as a process: options as JSON in the first argument."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time

from planaria.checkpoint import resolve_checkpoint
from planaria.server.config import ServerConfig
from planaria.server.serve import serve
from planaria.server.tokenise import load_tokenizer
from tests.api.fake_engine import FakeEngine


async def main() -> int:
    started = time.monotonic()
    options = json.loads(sys.argv[1])
    logging.basicConfig(stream=sys.stderr, level=options.pop("log_level", "INFO"), format="%(message)s")
    tokenizer = load_tokenizer(resolve_checkpoint("smollm2"))
    engine = FakeEngine(tokenizer, delay=options.pop("delay", 0.0), **options.pop("facts", {}))
    if options.pop("fast", False):  # the engine's own cost is not what is measured then
        engine.draw = lambda message, position: engine.palette[position % 20]
    die_at = options.pop("die_at", None)
    if die_at is not None:
        step = engine.step

        def fatal_step() -> None:
            step()
            if engine.stats.step == die_at:
                engine.die("rank 0 was killed")

        engine.step = fatal_step
    try:
        return await serve(engine, tokenizer, ServerConfig(port=0, **options), started=started)
    finally:
        await engine.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
