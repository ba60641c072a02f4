"""Lines for people and for machines, and that none comes inside an answer."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace

import pytest

from planaria.errors import ConfigError
from planaria.logs import _Outlet, as_json, current_level, held, setup_logging, wait_for_no_reader
from planaria.node import readable
from planaria.types import SamplingParams


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("planaria", "uvicorn")]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.level, logger.propagate = handlers, level, propagate


def test_text_is_a_line_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    logging.getLogger("planaria.server").info("ready %d", 1, extra={"fields": {"address": "here"}})
    assert capsys.readouterr().err.endswith(" I planaria.server: ready 1\n")


def test_json_is_a_line_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json")
    logger = logging.getLogger("planaria.server")
    logger.info("two\nlines", extra={"fields": {"status": 400, "code": "x"}})
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        logger.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["time"].endswith("+00:00")
    del first["time"]
    assert first == {
        "level": "info", "logger": "planaria.server", "message": "two\nlines", "status": 400, "code": "x",
    }  # fmt: skip
    assert second["level"] == "error" and "ZeroDivisionError: a bug" in second["exception"]


def test_processes_that_are_started_get_both() -> None:
    setup_logging("warning", "json")
    told = current_level()
    logging.getLogger("planaria").handlers = []
    setup_logging("info", "text")
    assert current_level() == "info" and not as_json()
    setup_logging(told)
    assert current_level() == told and as_json() and logging.getLogger("planaria").level == logging.WARNING


def test_a_level_alone_keeps_the_form() -> None:
    setup_logging("info", "json")
    setup_logging("debug")
    assert as_json() and current_level() == "debug/json"


@pytest.mark.parametrize(("level", "form", "option"), [("loud", None, "--log-level"), ("info", "xml", "--log-format")])
def test_what_is_unknown_is_refused(level: str, form: str | None, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        setup_logging(level, form)


def test_no_line_comes_inside_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    with held():
        logging.getLogger("planaria.engine").warning("rank 1 failed")
        logging.getLogger("uvicorn.error").error("a malformed request")  # a server that ran here asks for no less
        assert not capsys.readouterr().err
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in said] == ["rank 1 failed", "a malformed request"]
    logging.getLogger("planaria").info("after")
    assert capsys.readouterr().err.endswith("after\n")


def test_chat_keeps_its_answer_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from planaria.cli import chat

    inside = ""

    async def generate(ids: object, params: object) -> AsyncIterator[SimpleNamespace]:
        nonlocal inside
        for text in ("The answer ", "is long."):
            logging.getLogger("planaria.engine").warning("rank 1 failed")
            inside += capsys.readouterr().err
            yield SimpleNamespace(text=text, token_ids=[1], error=None)

    tokenizer = SimpleNamespace(encode=lambda text, **options: [1])
    llm = SimpleNamespace(tokenizer=tokenizer, chat_prompt=lambda messages: "", generate=generate)
    setup_logging("info")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    chat._converse(chat.local(llm, SamplingParams()), [])
    assert not inside and capsys.readouterr().err.count("rank 1 failed") == 2


def sockets() -> tuple[int, int]:
    """As a service manager's."""
    hear, say = socket.socketpair()
    return hear.detach(), say.detach()


@pytest.mark.parametrize(("ends", "said"), [(os.pipe, 8000), (sockets, 4000), (pty.openpty, 2000)])
@pytest.mark.parametrize("form", ["text", "json"])
def test_nobody_waits_for_who_does_not_read(
    ends: Callable[[], tuple[int, int]], said: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line comes whole, or is counted where it is missing."""
    hear, say = ends()
    setup_logging("info", form)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(_Outlet(say), line_buffering=True))  # type: ignore[type-var]
    logger, heard = logging.getLogger("planaria.server"), b""
    for _ in range(said):
        logger.info("a line %s.", "x" * 100)
    assert os.get_blocking(say), "it is others' as well"
    while b"the end" not in heard[-100:]:
        logger.info("the end")
        said += 1
        while readable(hear, 0.02):
            heard += os.read(hear, 1 << 16)
    lines = heard.decode().splitlines()
    whole = [line for line in lines if re.search(r"a line x{100}\.|the end", line)]
    missing = [int(found[1]) for line in lines if (found := re.search(r"(\d+) lines are missing here", line))]
    assert len(whole) + len(missing) == len(lines) and sum(missing) > 1000
    assert len(whole) + sum(missing) == said
    assert form == "text" or {json.loads(line)["level"] for line in lines} == {"info", "warning"}


def test_a_library_still_has_room() -> None:
    _hear, say = os.pipe()
    outlet = _Outlet(say)
    for _ in range(8_000):
        outlet.write(b"x" * 99 + b"\n")
    os.write(say, bytes(100_000))


def test_who_stops_reading_is_no_failure() -> None:
    hear, say = os.pipe()
    outlet = _Outlet(say)
    os.close(hear)
    assert outlet.write(b"a line\n") == 7


def test_what_is_captured_stays_so(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    wait_for_no_reader()
    assert (sys.stdout, sys.stderr) == before
