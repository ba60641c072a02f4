"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import logging
import sys


def main(args: list[str] | None = None) -> int:
    """Run a command; exit code 2 for a user's mistake, 1 for a failure, each with one line on standard error."""
    from planaria.cli.app import app, only
    from planaria.env import log_format, log_level
    from planaria.errors import PlanariaError, UserError
    from planaria.logs import as_json, setup_logging

    try:
        setup_logging(log_level(), log_format())
        words = sys.argv[1:] if args is None else args
        only(app, words[0] if words else "")(args, standalone_mode=True)
    except PlanariaError as e:
        if as_json():
            logging.getLogger("planaria").error("%s", e)
        else:
            print(f"planaria: {e}", file=sys.stderr)
        return 2 if isinstance(e, UserError) else 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1 if e.code else 0
    return 0
