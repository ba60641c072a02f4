"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import sys

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def main(args: list[str] | None = None) -> int:
    """Run a command; exit code 2 for a user's mistake, 1 for a failure, each with one line on standard error."""
    if args is None:  # it is what this process is for, and a last look for garbage would take a fifth of a second
        atexit.register(gc.freeze)
    words = sys.argv[1:] if args is None else args
    _have_streams()
    serves = args is None and words[:1] == ["serve"] and not any(word.startswith("--help") for word in words)
    try:
        if not serves or sys.platform != "linux":  # elsewhere nothing is kept in processes, and _run says so
            return _run(words)
        from planaria.cli.early import begun

        with begun():
            return _run(words)
    except MemoryError:
        print("planaria: there is no more memory (ulimit -v, a container's limit)", file=sys.stderr)
        return 1


def _have_streams() -> None:
    """Those that this process was started without (`>&-`) lead nowhere; else they'd be whatever is opened next."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r", closefd=False))


def _run(words: list[str]) -> int:
    from planaria.preload import importing

    with importing():
        from planaria.cli.app import app, only
    from planaria.env import log_format, log_level
    from planaria.errors import CapacityError, PlanariaError, UserError
    from planaria.logs import setup_logging
    from planaria.processes import few_addresses

    try:
        try:
            setup_logging(log_level(), log_format())
            if words[:1] in (["serve"], ["generate"], ["batch"]) and (few := few_addresses()):
                raise CapacityError(few)
            only(app, words[0] if words else "")(words, standalone_mode=True)
        finally:
            sys.stdout.flush()
    except PlanariaError as e:
        return _failed(str(e), 2 if isinstance(e, UserError) else 1)
    except RuntimeError as e:
        if str(e) != "can't start new thread":
            raise
        return _failed(f"{e}: there is no more memory, or no more threads (ulimit -u, pids.max)")
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            return _failed(f"{e}: there are no more file descriptors (ulimit -n)")
        if e.errno not in NO_SPACE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of its output would be tried again
        return _failed(f"{e}: there is no more room where it writes (standard output, its cache, $TMPDIR, /dev/shm)")
    except KeyboardInterrupt:
        return 130
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1 if e.code else 0
    return 0


def _failed(why: str, code: int = 1) -> int:
    from planaria.logs import as_json

    if as_json():
        logging.getLogger("planaria").error("%s", why)
    else:
        print(f"planaria: {why}", file=sys.stderr)
    return code
