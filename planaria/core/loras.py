"""Which adapters are in the ranks' slots, which rows use them, and which comes next.

Rule: a request enters only while its adapter, known by its digest, is in a slot, and nothing else comes into a slot
while a row uses it. Commands are carried out in order, so a slot is free as soon as the last step of its last row is
planned. Ranks that have just come have nothing in their slots: what is wanted comes there first, by the same door.
"""

from __future__ import annotations

from collections import Counter, OrderedDict


class LoraSlots:
    """Of all lanes' ranks, which have the same in theirs. count: slots of each."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.slot_of: OrderedDict[str, int] = OrderedDict()  # what is in slots, the longest unused first
        self.users: Counter[str] = Counter()  # rows
        self.wanted: str = ""  # digest of what is to come into a slot next
        self.slot = 0  # that it gets
        self.short = False  # in this step somebody waits for a slot: who comes after it with an adapter waits, too

    def lost(self) -> None:
        """There are other ranks, or other rows on them: nothing is in slots, nobody uses any."""
        self.slot_of.clear()
        self.users.clear()
        self.wanted = ""

    def begin(self) -> None:
        """Another step is planned."""
        self.short = False

    def may_enter(self, digest: str) -> bool:
        """Can a row have this adapter in the step that is planned? If not, it gets a slot as soon as there is one."""
        if not digest:
            return True
        if self.short:
            return False
        if digest in self.slot_of:
            return True
        self.want(digest)
        self.short = self.wanted != digest
        return False

    def want(self, digest: str) -> None:
        """Have it come into a slot that nobody uses, if there is one and nothing else is on its way."""
        if self.wanted or digest in self.slot_of:
            return
        if len(self.slot_of) < self.count:
            self.slot = min(set(range(self.count)).difference(self.slot_of.values()))
        else:
            unused = next((known for known in self.slot_of if not self.users[known]), None)
            if unused is None:
                return
            self.slot = self.slot_of.pop(unused)
        self.wanted = digest

    def warm(self, digest: str) -> None:
        """Have it come into a slot that nothing has been in yet, before anybody asks."""
        if len(self.slot_of) < self.count:
            self.want(digest)

    def placed(self) -> None:
        """All ranks have been told all of what was wanted."""
        self.slot_of[self.wanted] = self.slot
        self.wanted = ""

    def enter(self, digest: str) -> None:
        """A row has it."""
        if digest:
            self.users[digest] += 1
            self.slot_of.move_to_end(digest)

    def leave(self, digest: str) -> None:
        """The row's last step is planned."""
        if digest:
            self.users[digest] -= 1
