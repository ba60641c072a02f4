"""The door for grammars: whoever brings one has it compiled in a process of its own first, within bounds of time and
memory, and is told what is wrong with it. What was said of one is kept, by its content.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from planaria.errors import RequestError
from planaria.node import readable, writable
from planaria.processes import LeftoverTime
from planaria.structured.spec import OutputForm, field_of, form_of, place_of
from planaria.types import SamplingParams, StructuredOutputsParams

logger = logging.getLogger("planaria.structured")

CPU = 1.0  # seconds of a processor for compiling one grammar
LONGER = 0.1  # seconds of it, after which it is compiled anew where only those are that take as long
QUICK = 0.01  # and so first: a usual grammar takes a millisecond
LEVELS = (QUICK, LONGER, CPU)  # of the processes that compile, which are as many
PATIENCE = 20.0  # seconds to wait for that, on a machine that is busy otherwise
START = 60.0  # seconds for the process to come up
MEMORY = 2 << 30  # bytes of addresses it may have
KEPT = 256  # verdicts that are kept
KEPT_BYTES = 16 << 20  # of their grammars

NICE = 10  # a tenth of a core's time where others want it all: ranks of the same machine compute meanwhile
ENDING = 1.0  # seconds that it may take to end
UP = b"up"  # is said by who compiles from now on, before its id; of answers the number of what was asked stands there
TOO_MUCH = f"takes more than {CPU:g} s of a processor, or too much memory, to compile"
NOT_UP = (
    "structured outputs can't be used here: the process that checks grammars did not come up; is llguidance installed, "
    "and has the model a tokenizer of bytes?"
)
NO_ANSWER = "the process that compiles grammars gave no answer; send the request again"


class Vocabulary(msgspec.Struct, frozen=True):
    """tokenizer: as JSON; size: tokens the model has logits for; eos_id: ends an output."""

    tokenizer: str
    size: int
    eos_id: int


class Asked(msgspec.Struct, frozen=True):
    source: OutputForm


class Verdict(msgspec.Struct, frozen=True):
    """grammar: for ranks, where nothing is wrong; place: within what was given, of what is."""

    grammar: str = ""
    error: str = ""
    place: str = ""


class GrammarProcess:
    """One that has the vocabulary, and has forks of it compile, another one when a grammar has ended one: that takes
    milliseconds, and to come up half a second. cpu: seconds of a processor for one grammar. Not for two threads at
    once: `lock`."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], cpu: float) -> None:
        self._vocabulary, self._cpu = vocabulary, cpu
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.share: LeftoverTime | None = None  # of the fork, and of who forks
        self._asked = 0
        self._heard = bytearray()
        self._closed = False

    def ask(self, line: bytes) -> Verdict | None:
        """None: nobody can tell, as the machine has no time, or the process was ended from outside twice."""
        for _ in range(2):
            if self._closed:
                break
            up = self.process is not None or self._start()
            self._asked += 1
            word, answer = (self._exchange(b"%d %b" % (self._asked, line), PATIENCE) if up else None) or (b"", b"")
            if word == UP:
                self.share = self._share(answer)
                return Verdict(error=TOO_MUCH)
            if word:
                return msgspec.json.decode(answer, type=Verdict)
            status = self._end()
            if status is None:
                break
            if not up and status >= 0:
                raise RequestError(NOT_UP, code="unsupported_parameter")
        return None

    def _start(self) -> bool:
        """Is it up? Somebody waits for that, once."""
        vocabulary = msgspec.json.encode(self._vocabulary())
        self.process = process = subprocess.Popen(
            [sys.executable, "-m", "planaria.structured.check_process", str(self._cpu)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self.share, self._heard = None, bytearray()
        said = self._exchange(vocabulary, START)
        if said is None:
            return False
        self.share = self._share(said[1])
        return True

    def _share(self, fork: bytes) -> LeftoverTime:
        assert self.process is not None
        return LeftoverTime(int(fork), self.process.pid)

    def _exchange(self, line: bytes, patience: float) -> tuple[bytes, bytes] | None:
        """The answer to a line, as its first word and the others; None: none came."""
        process, share = self.process, self.share
        assert process is not None and process.stdin is not None and process.stdout is not None
        if share is not None:
            share.begin()
        deadline, heard = time.monotonic() + patience, self._heard
        try:
            left = memoryview(line + b"\n")
            while left:
                if not writable(process.stdin.fileno(), max(0.0, deadline - time.monotonic())):
                    return None
                left = left[process.stdin.write(left) or 0 :]
        except OSError:
            return None
        while True:
            while b"\n" in heard:
                end = heard.index(b"\n")
                word, _, answer = bytes(heard[:end]).partition(b" ")
                del heard[: end + 1]
                if word in (UP, b"%d" % self._asked):
                    return word, answer
            left_for_it = deadline - time.monotonic()
            if left_for_it <= 0:
                return None
            if not readable(process.stdout.fileno(), min(left_for_it, share.look() if share else math.inf)):
                continue
            part = process.stdout.read(1 << 16)
            if not part:
                return None
            heard += part

    def _end(self) -> int | None:
        """The status with which it ended; None: it was still there."""
        process, self.process = self.process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)  # its output ends before it does
        status = process.poll()
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        return status

    def close(self) -> None:
        """End it, whatever it compiles. Idempotent."""
        self._closed, process = True, self.process
        if process is not None:
            process.kill()  # who waits for its answer holds the lock
        with self.lock:
            self._end()


class GrammarCheck:
    """vocabulary: made when the first grammar comes. Any thread. A grammar is compiled at one level after the other,
    each with ten times what the last one had, and at each it waits for those alone that got there, too."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._processes = [GrammarProcess(vocabulary, cpu) for cpu in LEVELS]
        self._keeping = threading.Lock()
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._kept_bytes = 0

    def spelled(self, params: SamplingParams, place: str = "structured_outputs") -> SamplingParams:
        """`params` with the grammar of its structured outputs in their place. Blocks, a second at most where the
        machine has time. Raises RequestError; place: the field of a request that they are in."""
        return next(found for level in range(len(LEVELS)) if (found := self.tried(params, place, level)) is not None)

    def tried(self, params: SamplingParams, place: str, level: int) -> SamplingParams | None:
        """`spelled`, at one level; None: its grammar takes more, and is for the next one."""
        given = params.structured_outputs
        if given is None:
            return params
        return _held(params, self._verdict(_line(given, place), level), place)

    def known(self, params: SamplingParams, place: str) -> SamplingParams | None:
        """What `spelled` gives, if it need not wait for anything to be compiled. Raises RequestError."""
        given = params.structured_outputs
        if given is None:
            return params
        return _held(params, self._found(_line(given, place)), place)

    def grammar(self, given: StructuredOutputsParams, place: str) -> str:
        """Raises RequestError."""
        return self.spelled(SamplingParams(structured_outputs=given), place).grammar

    def _verdict(self, line: bytes, level: int) -> Verdict | None:
        """None: it takes more than it may at this level."""
        process = self._processes[level]
        with process.lock:
            if (verdict := self._found(line)) is not None:
                return verdict
            verdict = process.ask(line)
            if verdict is None:
                raise RequestError(NO_ANSWER, status=503, code="overloaded")
            if verdict.error == TOO_MUCH:
                if process is not self._processes[-1]:
                    return None
                logger.warning("a grammar was refused: it %s", TOO_MUCH)
            self._keep(line, verdict)
            return verdict

    def _found(self, line: bytes) -> Verdict | None:
        with self._keeping:
            kept = self._kept.get(line)
            if kept is not None:
                self._kept.move_to_end(line)
            return kept

    def _keep(self, line: bytes, verdict: Verdict) -> None:
        with self._keeping:
            self._kept[line] = verdict
            self._kept_bytes += len(line) + len(verdict.grammar)
            while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
                old, of = self._kept.popitem(last=False)
                self._kept_bytes -= len(old) + len(of.grammar)

    def close(self) -> None:
        """End the processes, whatever they compile. Idempotent."""
        for process in self._processes:
            process.close()


def _line(given: StructuredOutputsParams, place: str) -> bytes:
    """As the process is asked. Raises RequestError."""
    try:
        return msgspec.json.encode(Asked(form_of(given, place)))
    except UnicodeEncodeError as e:  # of `LLM`: no request's body has half a character
        own = place_of(given, place)
        raise RequestError(f"{own} is no text: {e}", param=field_of(place), code="invalid_value") from None


def _held(params: SamplingParams, verdict: Verdict | None, place: str) -> SamplingParams | None:
    """`params` with their grammar, where there is a verdict. Raises RequestError."""
    given = params.structured_outputs
    if verdict is None or given is None:
        return None
    if verdict.error:
        where = ".".join([place_of(given, place), *([verdict.place] if verdict.place else [])])
        raise RequestError(f"{where}: {verdict.error}", param=field_of(place), code="invalid_value")
    return msgspec.structs.replace(params, structured_outputs=None, grammar=verdict.grammar)
