"""One error tree. A user's mistake raises at the door, before any process starts, naming the bad value and the fix.

PlanariaError
├── UserError             something given to us is wrong; the CLI prints it in one line and exits with 2
│   ├── ConfigError       an option: which one, its value, the rule, the way out
│   ├── ModelError        a model folder or file: missing, corrupt, unsupported
│   └── RequestError      one request: HTTP 400 with the field; no other request notices
├── CapacityError         the machine has not what was asked (memory for KV, devices); exits with 1
├── RanksDiffer           ranks of one group don't agree on configuration or versions; exits with 1
├── CallFailed            a method that collective_rpc called raised on a rank; the engine goes on
├── WorkersLost           ranks died or stopped; handled in one place, by a new epoch
└── EngineDead            the engine gave up; every open request was answered
"""

from __future__ import annotations


class PlanariaError(Exception):
    """Root of all errors raised on purpose."""


class UserError(PlanariaError):
    """Something the user gave is wrong. `str()` is one line that says what, where and what to do."""


class ConfigError(UserError):
    """A refused option.

    `option` is the flag as typed, `value` what was given, `rule` what it breaks, `fix` the way out.
    """

    def __init__(self, option: str, value: object, rule: str, fix: str = "") -> None:
        self.option, self.value, self.rule, self.fix = option, value, rule, fix
        super().__init__(f"{option} {value}: {rule}" + (f"; {fix}" if fix else ""))


class ModelError(UserError):
    """A checkpoint that can't be served: missing, corrupt, unsupported."""


class RequestError(UserError):
    """A refused request.

    `param` is the JSON field, `code` a short machine-readable word, `status` the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status


class CapacityError(PlanariaError):
    """The machine lacks what was asked for; the message gives both numbers."""


class RanksDiffer(PlanariaError):
    """Ranks that would step together have different configurations or versions; the message names rank and field."""


class CallFailed(PlanariaError):
    """A worker's method raised. The message names method and rank; `traceback` is the rank's."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class WorkersLost(PlanariaError):
    """Ranks of one epoch are gone, or one could not go on: `cause` says how, `phase` in what, `traceback` where.

    `dead`: their processes must be replaced; else they answered, and can go on in another epoch. `kind` as in
    protocol.Failed. `detect`: seconds from the first sign (its process's end, its silence) until it was sure.
    """

    def __init__(
        self, epoch: int, ranks: tuple[int, ...], cause: str, phase: str = "", traceback: str = "", *,
        dead: bool = True, kind: str = "error", detect: float = 0.0,
    ) -> None:  # fmt: skip
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "a rank"
        super().__init__(f"{who} failed in {phase}: {cause}")
        self.epoch, self.ranks, self.cause, self.phase = epoch, ranks, cause, phase
        self.traceback, self.dead, self.kind, self.detect = traceback, dead, kind, detect


class EngineDead(PlanariaError):
    """The engine gave up; the message says why."""
