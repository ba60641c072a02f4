"""The door for grammars: whoever brings one has it compiled in a process of its own first, within bounds of time and
memory, and is told what is wrong with it. What was said of one is kept, by its content.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from planaria.errors import RequestError
from planaria.node import readable
from planaria.structured.spec import OutputForm, field_of, form_of, place_of
from planaria.types import SamplingParams, StructuredOutputsParams

logger = logging.getLogger("planaria.structured")

CPU = 1.0  # seconds of a processor for compiling one grammar
PATIENCE = 20.0  # seconds to wait for that, on a machine that is busy otherwise
START = 60.0  # seconds for the process to come up
MEMORY = 2 << 30  # bytes of addresses it may have
KEPT = 256  # verdicts that are kept
KEPT_BYTES = 16 << 20  # of their grammars

ENDING = 1.0  # seconds that it may take to end
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)  # what it makes of a grammar ends it otherwise
TOO_MUCH = f"takes more than {CPU:g} s of a processor, or too much memory, to compile"
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


class GrammarCheck:
    """vocabulary: made when the first grammar comes. Any thread; one grammar is compiled at a time."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._kept_bytes = 0
        self._closed = False

    def spelled(self, params: SamplingParams, place: str = "structured_outputs") -> SamplingParams:
        """`params` with the grammar of its structured outputs in their place. Blocks, a second at most where the
        machine has time. Raises RequestError; place: the field of a request that they are in."""
        given = params.structured_outputs
        if given is None:
            return params
        return msgspec.structs.replace(params, structured_outputs=None, grammar=self.grammar(given, place))

    def grammar(self, given: StructuredOutputsParams, place: str) -> str:
        """Raises RequestError."""
        source = form_of(given, place)
        try:
            verdict = self.verdict(source)
        except UnicodeEncodeError as e:  # of `LLM`: no request's body has half a character
            own = place_of(given, place)
            raise RequestError(f"{own} is no text: {e}", param=field_of(place), code="invalid_value") from None
        if verdict.error:
            where = ".".join([place_of(given, place), *([verdict.place] if verdict.place else [])])
            raise RequestError(f"{where}: {verdict.error}", param=field_of(place), code="invalid_value")
        return verdict.grammar

    def verdict(self, source: OutputForm) -> Verdict:
        line = msgspec.json.encode(Asked(source))
        with self._lock:
            kept = self._kept.get(line)
            if kept is not None:
                self._kept.move_to_end(line)
                return kept
            verdict = self._ask(line)
            if verdict is None:
                raise RequestError(NO_ANSWER, status=503, code="overloaded")
            self._keep(line, verdict)
            return verdict

    def _keep(self, line: bytes, verdict: Verdict) -> None:
        self._kept[line] = verdict
        self._kept_bytes += len(line) + len(verdict.grammar)
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            old, of = self._kept.popitem(last=False)
            self._kept_bytes -= len(old) + len(of.grammar)

    def _ask(self, line: bytes) -> Verdict | None:
        """None: nobody can tell, as the machine has no time, or the process was ended from outside twice."""
        for _ in range(2):
            process = self._process or self._start()
            answer = self._exchange(process, line, PATIENCE)
            if answer is not None:
                return msgspec.json.decode(answer, type=Verdict)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING)  # its output has ended before it has
            late = process.poll() is None
            self._end()
            if not late and process.returncode not in FROM_OUTSIDE:
                logger.warning("a grammar was refused: it %s", TOO_MUCH)
                return Verdict(error=TOO_MUCH)
            if late or self._closed:
                break
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        vocabulary = msgspec.json.encode(self._vocabulary())
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "planaria.structured.check_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        if self._exchange(process, vocabulary, START) is None:
            self._end()
            raise RequestError(
                "structured outputs can't be used here: the process that checks grammars did not come up; is "
                "llguidance installed, and has the model a tokenizer of bytes?", code="unsupported_parameter",
            )  # fmt: skip
        return process

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], line: bytes, patience: float) -> bytes | None:
        """The answer to a line; None: none came."""
        assert process.stdin is not None and process.stdout is not None
        deadline, answer = time.monotonic() + patience, bytearray()
        try:
            left = memoryview(line + b"\n")
            while left:
                left = left[process.stdin.write(left) :]
        except OSError:
            return None
        while not answer.endswith(b"\n"):
            if not readable(process.stdout.fileno(), max(0.0, deadline - time.monotonic())):
                return None
            part = process.stdout.read(1 << 16)
            if not part:
                return None
            answer += part
        return bytes(answer)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def close(self) -> None:
        """End the process, whatever it compiles. Idempotent."""
        self._closed, process = True, self._process
        if process is not None:
            process.kill()  # who waits for its answer holds the lock
        with self._lock:
            self._end()
