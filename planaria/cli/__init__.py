"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import logging
import sys


def main(args: list[str] | None = None) -> int:
    """Run a command; exit code 2 for a user's mistake, 1 for a failure, each with one line on standard error."""
    words = sys.argv[1:] if args is None else args
    serves = words[:1] == ["serve"] and not any(word.startswith("--help") for word in words)
    try:
        if not serves or sys.platform != "linux":  # elsewhere nothing is kept in processes, and _run says so
            return _run(words)
        from planaria.cli.early import begun

        with begun():
            return _run(words)
    except MemoryError:
        print("planaria: there is no more memory (ulimit -v, a container's limit)", file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    from planaria.preload import importing

    with importing():
        from planaria.cli.app import app, only
    from planaria.env import log_format, log_level
    from planaria.errors import CapacityError, PlanariaError, UserError
    from planaria.logs import as_json, setup_logging
    from planaria.processes import few_addresses

    try:
        setup_logging(log_level(), log_format())
        if words[:1] in (["serve"], ["generate"], ["batch"]) and (few := few_addresses()):
            raise CapacityError(few)
        only(app, words[0] if words else "")(words, standalone_mode=True)
    except PlanariaError as e:
        if as_json():
            logging.getLogger("planaria").error("%s", e)
        else:
            print(f"planaria: {e}", file=sys.stderr)
        return 2 if isinstance(e, UserError) else 1
    except RuntimeError as e:
        if str(e) != "can't start new thread":
            raise
        print(f"planaria: {e}: there is no more memory, or no more threads (ulimit -u, pids.max)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1 if e.code else 0
    return 0
