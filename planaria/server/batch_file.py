"""The files of a batch: requests that come in, the journal of what is answered, the output.

The rule kept here: an answer is in the journal once and whole, or it isn't there. The journal (OUT.journal) is only
appended to; what a kill tore off its end is cut away at the next start. Its first line says what it belongs to. When
every request is answered, the output is put in place in one go, in the input's order, and the journal is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from planaria.errors import CapacityError, ConfigError

DRAWN = ("/v1/chat/completions", "/v1/completions")  # whose requests get a seed
URLS = (*DRAWN, "/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling", "/classify")
VERSION = 1


class Item(msgspec.Struct, frozen=True):
    """A line of the input. `problem`: (code, message) of one that can't be asked, else None."""

    line: int  # from 1
    custom_id: str | None
    url: str
    body: dict[str, Any]
    problem: tuple[str, str] | None


class Header(msgspec.Struct, frozen=True):
    """What a journal belongs to. seed: from which requests that bring none get theirs."""

    planaria_batch: int
    input: str  # sha256
    model: str
    seed: int


class BatchRecord(msgspec.Struct, frozen=True):
    """A line of the journal: the line of the input that is answered, and the line of the output."""

    line: int
    result: msgspec.Raw


class Result(msgspec.Struct):
    """What is looked at in a line of the output."""

    class Response(msgspec.Struct):
        status_code: int

    custom_id: str | None
    response: Response | None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


_result = msgspec.json.Decoder(Result)


def read_input(path: Path) -> tuple[list[Item], str]:
    """Requests, empty lines left out, and the input's sha256. Raises ConfigError for a file that can't be read and for
    a custom_id that comes twice."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError("IN", path, f"can't be read ({e.strerror})") from None
    items = [_item(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    first: dict[str, int] = {}
    for item in items:
        if item.custom_id is not None and first.setdefault(item.custom_id, item.line) != item.line:
            raise ConfigError(
                "IN", path, f"lines {first[item.custom_id]} and {item.line} have the same custom_id "
                f"{item.custom_id[:200]!r}", "give each request its own",
            )  # fmt: skip
    return items, hashlib.sha256(data).hexdigest()


def _item(number: int, line: bytes) -> Item:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        return Item(number, None, "", {}, ("invalid_json", f"line {number} is not JSON: {e}"))
    if not isinstance(value, dict):
        return Item(number, None, "", {}, ("invalid_json", f"line {number} is not a JSON object"))
    id, url, body, method = (value.get(key) for key in ("custom_id", "url", "body", "method"))
    problem: tuple[str, str] | None = None
    if not isinstance(id, str) or not id:
        id, problem = None, ("invalid_custom_id", "custom_id must be a text, and not empty")
    elif method != "POST":
        problem = ("invalid_method", f"method must be POST, got {method!r:.60}")
    elif url not in URLS:
        problem = ("invalid_url", f"url must be one of {', '.join(URLS)}, got {url!r:.200}")
    elif not isinstance(body, dict):
        problem = ("invalid_body", "body must be a JSON object")
    elif body.get("stream"):
        problem = ("unsupported_parameter", "stream must be left out: an answer of a batch comes whole")
    if problem is None and isinstance(url, str) and isinstance(body, dict):
        return Item(number, id, url, body, None)
    code, message = problem or ("invalid_json", "not a request")
    return Item(number, id, "", {}, (code, f"line {number}: {message}"))


def model_of(items: list[Item]) -> str:
    """The model that the requests name. Raises ConfigError unless it is one."""
    named = [item.body.get("model") for item in items if item.problem is None]
    names = list(dict.fromkeys(name for name in named if isinstance(name, str)))
    if len(names) != 1:
        found = f"the input names {', '.join(names[:5])}" if names else "the input names none"
        raise ConfigError("--model", "", found, "say which model is to answer")
    return names[0]


class Answers:
    """The journal of a batch, open in this process and no other. `done`: line of the input -> line of the output."""

    def __init__(self, fd: int, path: Path, header: Header, done: dict[int, bytes]) -> None:
        self._fd, self.path, self.header, self.done = fd, path, header, done

    @classmethod
    def open(cls, output: Path, header: Header, seed: int | None) -> Answers:
        """Begin a journal with `header`, or go on with the one there is. Raises ConfigError for one that belongs to
        something else (or to another `seed`, where one was asked for) or is in use."""
        path = output.with_name(output.name + ".journal")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as e:
            raise ConfigError("OUT", output, f"can't be written there ({e.strerror})") from None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError("OUT", output, "another process is at work on it", "wait for its end") from None
            with os.fdopen(os.dup(fd), "rb") as f:
                whole, known, done = _read(f.read())
            if known is None:
                os.ftruncate(fd, 0)
                answers = cls(fd, path, header, {})
                answers._write(msgspec.json.encode(header))
                return answers
            for what, here, there in (
                ("input", header.input, known.input), ("model", header.model, known.model),
                ("seed", header.seed if seed is not None else known.seed, known.seed),
                ("version", header.planaria_batch, known.planaria_batch),
            ):  # fmt: skip
                if here != there:
                    raise ConfigError(
                        "OUT", output, f"{path} was begun with another {what}",
                        "give the one of then or another OUT, or remove that file to begin anew",
                    )  # fmt: skip
            os.ftruncate(fd, whole)
            return cls(fd, path, known, done)
        except BaseException:
            os.close(fd)
            raise

    def add(self, item: Item, result: bytes) -> None:
        """Write down a line of the output. Raises CapacityError when it can't be."""
        self._write(msgspec.json.encode(BatchRecord(item.line, msgspec.Raw(result))))
        self.done[item.line] = result

    def _write(self, line: bytes) -> None:
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as e:
            raise CapacityError(
                f"{self.path} can't be written: {e.strerror}; the same command goes on when it can"
            ) from None

    def finish(self, output: Path, items: list[Item]) -> None:
        """Put the output in place and remove the journal. Raises CapacityError."""
        part = output.with_name(output.name + ".part")
        try:
            with part.open("wb") as f:
                f.writelines(self.done[item.line] + b"\n" for item in items)
                f.flush()
                os.fsync(f.fileno())
            part.replace(output)
            folder = os.open(output.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as e:
            raise CapacityError(
                f"{output} can't be written: {e.strerror}; the same command goes on when it can"
            ) from None
        self.path.unlink()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _read(data: bytes) -> tuple[int, Header | None, dict[int, bytes]]:
    """Bytes of a journal that are whole lines, its header (None: not even that is whole) and its answers."""
    header: Header | None = None
    done: dict[int, bytes] = {}
    whole = 0
    records = msgspec.json.Decoder(BatchRecord)
    while (end := data.find(b"\n", whole)) >= 0:
        line = data[whole:end]
        try:
            if header is None:
                header = msgspec.json.decode(line, type=Header)
            else:
                record = records.decode(line)
                done[record.line] = bytes(record.result)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # a machine that lost its power may leave such a line
            break
        whole = end + 1
    return whole, header, done


def already_there(output: Path, items: list[Item]) -> list[bytes] | None:
    """The lines of an output that is complete for this input; None where there is no file. Raises ConfigError for
    another file, which is never written over."""
    try:
        lines = output.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ConfigError("OUT", output, f"can't be read ({e.strerror})") from None
    try:
        ids = [_result.decode(line).custom_id for line in lines]
    except msgspec.MsgspecError:
        ids = [None]
    if ids != [item.custom_id for item in items]:
        raise ConfigError("OUT", output, "is there already, and not the output of this input", "give another name")
    return lines


def num_failed(lines: list[bytes]) -> int:
    return sum(_result.decode(line).failed for line in lines)
