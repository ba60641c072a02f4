"""Traces: when requests came to a service, how long they were, and which prefixes they shared.

Two formats. CSV with a header: timestamp (a date and time, or seconds), context tokens, generated tokens. JSON lines:
timestamp (ms), input_length, output_length and, where known, hash_ids, one for each block of the input; equal ids are
equal blocks. A trace has no text: prompts of those lengths are made up, and equal blocks get equal tokens.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

import msgspec

from planaria.errors import ConfigError

OPTION = "--trace"
COLUMNS = {"timestamp": "TIMESTAMP", "contexttokens": "ContextTokens", "generatedtokens": "GeneratedTokens"}
Count = Annotated[int, msgspec.Meta(ge=1)]


class TracedRequest(NamedTuple):
    """A request. `at`: seconds after the first one. `blocks`: ids of its input's blocks, if they are known."""

    at: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


class Trace(NamedTuple):
    """Arrivals in order. `block_len`: tokens in a block; the last one of an input may have fewer."""

    arrivals: list[TracedRequest]
    block_len: int

    def scaled(self, lengths: float) -> Trace:
        """All lengths times so much, and at least 1: a long trace for a small machine."""

        def times(length: int) -> int:
            return max(1, round(length * lengths))

        block_len = times(self.block_len)
        return Trace([
            a._replace(
                input_len=min(times(a.input_len), len(a.blocks) * block_len) if a.blocks else times(a.input_len),
                output_len=times(a.output_len),
            )
            for a in self.arrivals
        ], block_len)  # fmt: skip


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[int] = []


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """At most the first `limit` requests of the file.

    Raises ConfigError for a file that can't be read, and for the first bad line, naming it.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            is_json = first.lstrip().startswith("{")
            rows = _from_json(path, file) if is_json else _from_csv(path, file)
            found = list(itertools.islice(rows, limit))
    except OSError as e:
        raise ConfigError(OPTION, path, f"can't be read ({e.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(OPTION, path, "is not text", "give a CSV file or JSON lines") from None
    if not found:
        raise ConfigError(OPTION, path, "has no requests")
    block_len = _block_len(path, found)
    start = min(arrival.at for _, arrival in found)
    arrivals = sorted((arrival._replace(at=arrival.at - start) for _, arrival in found), key=lambda a: a.at)
    return Trace(arrivals, block_len)


def _bad(path: Path, line: int, rule: str) -> ConfigError:
    return ConfigError(OPTION, path, f"line {line}: {rule}")


def _from_json(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, TracedRequest]]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as e:
            raise _bad(path, number, str(e)) from None
        yield number, TracedRequest(row.timestamp / 1000, row.input_length, row.output_length, tuple(row.hash_ids))


def _from_csv(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, TracedRequest]]:
    reader = csv.reader(lines)
    try:
        first = next(reader, None)
        if first is None:
            return
        head = ["".join(c for c in name.lower() if c.isalnum()) for name in first]
        missing = [shown for name, shown in COLUMNS.items() if name not in head]
        if missing:
            raise _bad(
                path, 1, f"no column {', '.join(missing)}; a CSV trace has {', '.join(COLUMNS.values())}, and other "
                "traces are lines of JSON",
            )  # fmt: skip
        time, context, generated = (head.index(name) for name in COLUMNS)
        for row in reader:
            if not row:
                continue
            if len(row) != len(head):
                raise _bad(path, reader.line_num, f"{len(row)} fields, the first line has {len(head)}")
            lengths = []
            for column in (context, generated):
                text = row[column].strip()
                if not (text.isascii() and text.isdigit() and int(text) > 0):
                    raise _bad(path, reader.line_num, f"{text[:40]!r} is no number of tokens")
                lengths.append(int(text))
            at = _seconds(path, reader.line_num, row[time].strip())
            yield reader.line_num, TracedRequest(at, lengths[0], lengths[1])
    except csv.Error as e:
        raise _bad(path, reader.line_num, str(e)) from None


def _seconds(path: Path, line: int, text: str) -> float:
    try:
        seconds = float(text)
        if 0 <= seconds < float("inf"):
            return seconds
    except ValueError:
        try:
            when = datetime.fromisoformat(text)
            return (when - datetime.fromtimestamp(0, when.tzinfo)).total_seconds()
        except ValueError:
            pass
    raise _bad(path, line, f"{text[:40]!r} is neither a date and time nor seconds")


def _block_len(path: Path, found: list[tuple[int, TracedRequest]]) -> int:
    """Tokens in a block, such that every input has as many blocks as ids; 1 where there are no ids.

    The file doesn't say it. Several lengths may do: then the smallest power of two, else the smallest.
    """
    low, high = 1, max(arrival.input_len for _, arrival in found)
    for line, (_, length, _, blocks) in found:
        if blocks:
            least = -(-length // len(blocks))
            most = high if len(blocks) == 1 else -(-length // (len(blocks) - 1)) - 1
            low, high = max(low, least), min(high, most)
            if low > high:
                raise _bad(path, line, f"{len(blocks)} hash_ids for {length} tokens don't fit the lines before")
    power = 1 << (low - 1).bit_length()
    return power if power <= high else low


class TracePrompts:
    """Made-up prompts of a trace: token ids from `lowest` up to, not including, `highest`."""

    def __init__(self, block_len: int, seed: int, lowest: int, highest: int) -> None:
        self.block_len, self.seed, self.ids = block_len, seed, range(lowest, highest)
        self._own = Random(seed)

    def tokens(self, arrival: TracedRequest) -> list[int]:
        """`arrival.input_len` ids: those of its blocks, or (without any) random ones."""
        if not arrival.blocks:
            return self._own.choices(self.ids, k=arrival.input_len)
        tokens: list[int] = []
        for block in arrival.blocks:
            tokens += Random(f"{self.seed} {block}").choices(self.ids, k=self.block_len)
        return tokens[: arrival.input_len]
