"""What a process asks of its node."""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
from pathlib import Path
from typing import NoReturn

import pytest

from planaria.env import cache_dir
from planaria.node import readable, writable


@pytest.fixture
def high() -> int:
    """A number of a descriptor that select() refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 1100:
        pytest.skip(f"this machine allows {hard} descriptors")
    if soft != resource.RLIM_INFINITY and soft <= 1100:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1101, hard))
    return 1100


def test_whatever_its_number_a_descriptor_is_looked_at(high: int) -> None:
    read, write = os.pipe()
    try:
        os.dup2(read, high)
        assert not readable(high)
        os.write(write, b"x")
        assert readable(high, 5.0)
        os.dup2(write, high)
        assert writable(high, 5.0)
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, bytes(4096))
        assert not writable(high, 0.0)
    finally:
        for fd in (read, write, high):
            os.close(fd)


def test_another_end_that_has_gone_is_something_to_read() -> None:
    read, write = os.pipe()
    os.close(write)
    assert readable(read)
    os.close(read)


def test_an_id_that_the_system_does_not_know_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    for name in ("HOME", "PLANARIA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_dir() == Path("/.cache/planaria")
