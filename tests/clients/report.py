"""What clients' programs said, as a table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass
class Row:
    """Of one client: what was done, what was not and why, what failed and how."""

    client: str
    version: str = "?"
    done: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def read(self, lines: str) -> None:
        """A program's standard output; what is no line of `steps` is the client's own."""
        for line in lines.splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            match said:
                case {"version": str(version)}:
                    self.version = version
                case {"step": str(name), "skipped": str(why)}:
                    self.skipped[name] = why
                case {"step": str(name), "failed": str(how)}:
                    self.failed[name] = how
                case {"step": str(name)}:
                    self.done.append(name)

    def cells(self) -> tuple[str, str, str, str]:
        what = [*self.done, *(f"SKIPPED {name}: {why}" for name, why in self.skipped.items())]
        what += [f"FAILED {name}" for name in self.failed]
        return self.client, self.version, ", ".join(what), "no" if self.failed else f"{self.seconds:.0f} s"


ROWS: list[Row] = []


def table() -> str:
    rows = [("client", "version", "what was done", "ok"), *(row.cells() for row in ROWS)]
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{a:{wide[0]}} | {b:{wide[1]}} | {d:5} | {c}" for a, b, c, d in rows)
