"""What came of the prompts of one `generate`, written down as it comes, so that the same program goes on from there
when it is started again: by an outer launcher, or by hand.

A line says what is asked (a digest, and the seeds that were drawn), each further one is a delta and whose. Rule: a
delta is written before anybody hears of it. A last line that is torn is as if it had not been begun.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from planaria.errors import ConfigError, EngineDead
from planaria.executor.link.faults import LinkError
from planaria.server.stream import Choices
from planaria.topology.outer import OuterLauncher
from planaria.types import Delta
from planaria.wire import Submit


class AskedBefore(msgspec.Struct, frozen=True):
    """digest: of prompts and parameters, seeds aside."""

    digest: str
    seeds: list[int]


class KeptBefore(msgspec.Struct, frozen=True, array_like=True):
    """What a journal says: seeds of all sequences, deltas with the number of the sequence that each is of."""

    seeds: list[int]
    deltas: list[tuple[int, Delta]] = []


_asked = msgspec.json.Decoder(AskedBefore)
_delta = msgspec.json.Decoder(tuple[int, Delta])
_kept = msgspec.msgpack.Decoder(KeptBefore)


class GenerateJournal:
    """submits: all sequences. Raises ConfigError for a file that is of other ones, or can't be used."""

    def __init__(self, path: Path, submits: Sequence[Submit]) -> None:
        self._numbers = {submit.id: number for number, submit in enumerate(submits)}
        plain = [msgspec.structs.replace(submit, id="", seed=0) for submit in submits]
        digest = hashlib.blake2b(msgspec.msgpack.encode(plain), digest_size=16).hexdigest()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o600)
            lines = path.read_bytes().splitlines(keepends=True)
            if lines and not lines[-1].endswith(b"\n"):
                os.truncate(self._file, sum(map(len, lines[:-1])))
                lines.pop()
            asked = _asked.decode(lines[0]) if lines else AskedBefore(digest, [submit.seed for submit in submits])
            self.kept = KeptBefore(asked.seeds, [_delta.decode(line) for line in lines[1:]])
        except (OSError, msgspec.MsgspecError) as e:
            raise ConfigError("journal", path, f"can't be used: {e}", "give another file") from None
        if asked.digest != digest:
            rule = "is of other prompts, or other parameters"
            raise ConfigError("journal", path, rule, "give another file, or remove it")
        if not lines:
            self._write(asked)

    def add(self, delta: Delta) -> None:
        """What has failed is not noted: it is tried again. Raises OSError."""
        if delta.error is None:
            self._write((self._numbers[delta.request_id], delta))

    def _write(self, line: object) -> None:
        data = memoryview(msgspec.json.encode(line) + b"\n")
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def going_on(
    path: str | os.PathLike[str] | None, opened: Sequence[tuple[str, Choices, list[Submit]]],
    share: Callable[[bytes], tuple[int, list[bytes]]], outer: OuterLauncher | None,
) -> Iterator[None]:  # fmt: skip
    """Streams are what the journal says, of what is submitted what is still to be computed is left, and what comes is
    noted. Of processes that run the same the first one has the journal, and tells the others (see SpmdLink.share).
    Without a path nothing is done. Raises ConfigError, EngineDead."""
    if path is None:
        yield
        return
    first = outer is None or outer.rank == 0
    submits = [submit for _, _, each in opened for submit in each]
    journal = GenerateJournal(Path(path), submits) if first else None
    try:
        _resume(opened, share, journal)
        for _, choices, _ in opened:
            choices.note = journal.add if journal is not None else None
        yield
    finally:
        if journal is not None:
            journal.close()


def _resume(
    opened: Sequence[tuple[str, Choices, list[Submit]]], share: Callable[[bytes], tuple[int, list[bytes]]],
    journal: GenerateJournal | None,
) -> None:  # fmt: skip
    try:
        _, parts = share(msgspec.msgpack.encode(journal.kept) if journal is not None else b"")
    except LinkError as e:
        raise EngineDead(str(e)) from None
    kept = _kept.decode(parts[0])
    streams = [(choices, stream) for _, choices, _ in opened for stream in choices.sequences]
    for (_, stream), seed in zip(streams, kept.seeds, strict=True):
        stream.submit = msgspec.structs.replace(stream.submit, seed=seed)
    for number, delta in kept.deltas:
        choices, stream = streams[number]
        choices.take(msgspec.structs.replace(delta, request_id=stream.id))
    for _, choices, submits in opened:
        submits[:] = [stream.resubmit() for stream in choices.sequences if stream.finish is None]
