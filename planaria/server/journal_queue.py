"""What is to be done to the journal's files, in order, and who may be told what when it is done. Pure: `journal.py`
carries it out.

Two rules are kept here. A request is acknowledged when its file is where a power failure leaves it (`synced`); what
came of it may be told when it is written, which a death of every process leaves. And what can't be written now is tried
again, in its order, but for a new file: whose request that is hears why instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec


class Op(msgspec.Struct):
    """kind: create, append, replace or remove. count: records of the response that are in the file after it."""

    kind: str
    id: str
    data: bytes = b""
    count: int = 0


class JournalNews(msgspec.Struct, frozen=True):
    """what: accepted (a new file is safe), written (`count` records are), failing (`why` they are not), or lost (what
    was written of it may be gone: it is to be written anew)."""

    what: str
    id: str
    count: int = 0
    why: str = ""


class WriteQueue:
    """waiting: by file, in the order in which it came; failing: why, by file; unsafe: new files that are written."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Op]] = {}
        self.failing: dict[str, str] = {}
        self.unsafe: dict[str, None] = {}

    def add(self, op: Op) -> None:
        """To be done. What makes others needless takes their place."""
        own = self.waiting.setdefault(op.id, [])
        if op.kind in ("replace", "remove"):
            own.clear()
        elif op.kind == "append" and own and own[-1].kind in ("append", "replace"):
            own[-1] = Op(own[-1].kind, op.id, own[-1].data + op.data, op.count)
            return
        own.append(op)

    def batch(self, *, again: bool) -> list[Op]:
        """What is to be done now, taken from `waiting`. again: also what has failed."""
        ready = [id for id in self.waiting if again or id not in self.failing]
        return [op for id in ready for op in self.waiting.pop(id)]

    @property
    def idle(self) -> bool:
        return not self.waiting

    def done(self, op: Op) -> Iterator[JournalNews]:
        """It is written."""
        self.failing.pop(op.id, None)
        if op.kind == "remove":
            self.unsafe.pop(op.id, None)
        elif op.kind == "create":
            self.unsafe[op.id] = None
        else:
            yield JournalNews("written", op.id, op.count)

    def failed(self, op: Op, why: str, later: Iterable[Op] = ()) -> Iterator[JournalNews]:
        """It isn't, and its file is as before. later: others of the file that were taken with it."""
        yield JournalNews("failing", op.id, op.count, why)
        if op.kind == "create":
            return
        newer = self.waiting.pop(op.id, [])
        if not (newer and newer[0].kind in ("replace", "remove")):
            for one in (op, *later):
                self.add(one)
        for one in newer:
            self.add(one)
        self.failing[op.id] = why

    def synced(self, ids: Iterable[str]) -> Iterator[JournalNews]:
        """What was written to these files is safe, and so are their names."""
        for id in ids:
            if id in self.unsafe:
                del self.unsafe[id]
                yield JournalNews("accepted", id)

    def unsynced(self, id: str, why: str) -> Iterator[JournalNews]:
        """The kernel has lost what was written to a file, or may have."""
        if id in self.unsafe:
            del self.unsafe[id]
            yield JournalNews("failing", id, 0, why)
        else:
            yield JournalNews("lost", id, 0, why)
