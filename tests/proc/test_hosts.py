"""Processes of this machine, as a host keeps them."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from planaria.hosts import forkserver, local
from planaria.hosts.host import Program
from planaria.hosts.local import HERE, LocalChild, LocalHost
from planaria.node import process_state, readable
from tests.proc.servers import PATIENCE, alive, limit_for, wait_until

BIG = [bytes([number]) * (1 << 20) for number in range(3)]  # each more than a pipe takes


def start(how: str, *, boot: bytes | None = None) -> LocalChild:
    return LocalHost(devices=()).spawn((HERE, 0), Program("tests.proc.kept", (how,)), boot, lambda child: None)


def end(*children: LocalChild) -> None:
    for child in children:
        child.kill()
    assert not LocalHost().await_ends(children, PATIENCE)


def test_who_is_told_more_than_a_pipe_takes_gets_all_of_it_and_nobody_waits() -> None:
    """The first of them is stopped all the while."""
    stopped, well = start("3"), start("3")
    os.kill(stopped.place.pid, signal.SIGSTOP)
    for message in BIG:
        stopped.tell(message)
        well.tell(message)
    digests = " ".join(hashlib.sha256(message).hexdigest() for message in BIG)
    wait_until("the one that is well has read", lambda: well.said == digests)
    assert stopped.stopped and not stopped.said and not stopped.ended
    os.kill(stopped.place.pid, signal.SIGCONT)
    wait_until("it goes on", lambda: stopped.said == digests)
    end(stopped, well)
    assert stopped.ended == "was killed by signal 9" and stopped.code == -9


def test_who_takes_nothing_of_what_it_is_told_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf, quiet = start("deaf"), start("deaf")
    wait_until("both are up", lambda: bool(deaf.said and quiet.said))
    monkeypatch.setattr(local, "TAKE_TIMEOUT", 0.2)
    monkeypatch.setattr(local, "LOOK", 0.05)
    for message in BIG:
        deaf.tell(message)
    assert not LocalHost().await_ends([deaf], PATIENCE)
    assert "took nothing of what it was told" in deaf.ended and deaf.code == -9
    assert not quiet.ended, "nobody told it anything"
    end(quiet)


def test_the_last_word_is_heard_before_the_end() -> None:
    heard: list[tuple[str, str]] = []
    done = threading.Event()

    def news(child: Any) -> None:
        heard.append((child.said, child.ended))
        if child.ended:
            done.set()

    LocalHost(devices=()).spawn((HERE, 0), Program("tests.proc.kept", ("ends",)), None, news)
    assert done.wait(PATIENCE)
    assert heard[0][0] == "last word" and heard[-1] == ("last word", "ended with exit code 0")


def test_it_lives_longer_than_the_thread_that_asked_for_it() -> None:
    started: list[LocalChild] = []
    thread = threading.Thread(target=lambda: started.append(start("1")))
    thread.start()
    thread.join(PATIENCE)
    started[0].tell(b"still there?")
    wait_until("it answers", lambda: bool(started[0].said))
    end(*started)


@pytest.mark.parametrize("lacking", ["pidfd_open", "set_blocking"])
def test_half_a_start_leaves_no_process_and_no_descriptor(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    end(start("1"))
    gc.collect()  # else what earlier tests left may be closed in between
    before, fds = psutil.Process().children(), len(os.listdir("/proc/self/fd"))

    def none_left(*args: int) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as short:
        short.setattr(os, lacking, none_left)
        with pytest.raises(OSError, match="Too many open files"):
            start("1")
    assert psutil.Process().children() == before and len(os.listdir("/proc/self/fd")) == fds
    end(start("1"))


def test_one_that_cannot_be_watched_is_ended_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its descriptor would be ready again and again."""
    well, ill = start("1"), start("1")
    hear = local.keeper().__class__._hear

    def fails(self: Any, child: LocalChild) -> None:
        if child is ill:
            raise RuntimeError("cannot be read")
        hear(self, child)

    monkeypatch.setattr(local.keeper().__class__, "_hear", fails)
    local.keeper()._selector.modify(ill.says, 1, (local.keeper()._hear, ill))
    ill.tell(b"say something")
    assert not LocalHost().await_ends([ill], PATIENCE)
    assert ill.ended == "could not be watched any more: killed" and ill.code == -9
    assert len([record for record in caplog.records if record.message == "a process could not be seen to"]) == 1
    well.tell(b"and you?")
    wait_until("it answers", lambda: bool(well.said))
    end(well)


def test_whose_end_was_seen_is_not_looked_at_again_in_that_round() -> None:
    """Its end and what it said may be there together, in any order. Its descriptors were closed with it, and have
    other meanings by then."""
    child, keeper = start("1"), local.keeper()

    def round() -> bytes:
        (reads, writes), number = os.pipe(), child.says
        child.kill()
        assert readable(child.process.exit, PATIENCE)
        keeper.see_to(keeper._exited, child)
        assert fcntl.fcntl(reads, fcntl.F_DUPFD_CLOEXEC, number) == number
        os.write(writes, b"somebody else's")
        os.set_blocking(number, False)  # else who reads it a second time would wait for ever
        keeper.see_to(keeper._hear, child)
        keeper.see_to(keeper._exited, child)
        try:
            return os.read(number, 100) if readable(reads) else b""
        finally:
            for each in (reads, writes, number):
                os.close(each)

    assert keeper.done(round) == b"somebody else's" and not child.said and child.code == -9


FORKS = {"tests.proc.kept": ["colorsys", "numpy"]}  # the second one starts threads where it may


@pytest.fixture
def forking() -> Iterator[LocalHost]:
    host = LocalHost(devices=(), forks=FORKS)
    yield host
    host.close()


def forked(host: LocalHost, how: str, boot: bytes | None = None, fds: Sequence[int] = ()) -> LocalChild:
    return host.spawn((HERE, 0), Program("tests.proc.kept", (how,)), boot, lambda child: None, fds)


def server_of(child: LocalChild) -> psutil.Process:
    parent = psutil.Process(child.place.pid).parent()
    assert parent is not None and parent.pid != os.getpid()
    return parent


def test_a_fork_is_as_a_process_that_began_by_itself_but_for_what_is_imported(
    forking: LocalHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEPT", "now")
    said = []
    for host in (forking, LocalHost(devices=())):
        ends = [os.pipe(), os.pipe()]
        for number, (_, writes) in enumerate(ends):
            os.write(writes, str(number).encode())
        child = forked(host, "what", b"boot", [reads for reads, _ in ends])
        for each in itertools.chain(*ends):
            os.close(each)
        assert not host.await_ends([child], PATIENCE)
        assert child.code == 3 and child.ended == "ended with exit code 3"
        said.append(json.loads(child.said))
    as_forked, as_begun = said
    assert as_forked == {**as_begun, "imported": True} and not as_begun["imported"]
    assert as_forked["cwd"] == str(tmp_path) and as_forked["env"] == "now" and as_forked["threads"] == 1
    assert as_forked["given"] == ["0", "1"] and as_forked["keeper"] == os.getpid()
    assert capfd.readouterr().out == "on standard output\n" * 2


def test_forks_begin_in_a_folder_that_was_removed(
    forking: LocalHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "release").mkdir()
    monkeypatch.chdir(tmp_path / "release")
    first = forked(forking, "deaf")
    (tmp_path / "release").rmdir()
    others = [forked(forking, "deaf") for _ in range(2)]
    assert len({server_of(other) for other in others}) == 1 and not caplog.records
    end(first, *others)


def test_forks_share_a_server_that_never_started_a_thread_and_is_made_anew_for_another_environment(
    forking: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = forked(forking, "deaf"), forked(forking, "deaf")
    assert server_of(one) == server_of(other) and server_of(one).num_threads() == 1
    monkeypatch.setenv("KEPT", "of no concern to what is imported")
    second = forked(forking, "deaf")
    assert server_of(second) == server_of(one)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    third = forked(forking, "deaf")
    assert server_of(third) != server_of(one)
    end(one, other, second, third)
    assert third.code == -9


def test_a_server_that_began_early_is_the_first_ones_if_it_imports_what_that_one_asks_for() -> None:
    def begin(modules: list[str]) -> None:
        """As `planaria serve`, of which it is a copy."""
        forkserver._early.append((forkserver._concerns(modules), forkserver._started(modules)))

    host, other = (LocalHost(devices=(), forks=FORKS) for _ in range(2))
    begin(FORKS["tests.proc.kept"])
    early = forkserver._early[0][1][0].pid
    one, second = forked(host, "deaf"), forked(other, "deaf")
    assert server_of(one).pid == early != server_of(second).pid
    end(one, second)
    for each in (host, other):
        each.close()
    begin(["json"])
    unfit = forkserver._early[0][1][0].pid
    host = LocalHost(devices=(), forks=FORKS)
    third = forked(host, "deaf")
    assert server_of(third).pid != unfit and not alive(unfit) and not forkserver._early
    end(third)
    host.close()


def test_forks_outlive_their_server_and_others_begin_with_another(forking: LocalHost) -> None:
    one = forked(forking, "deaf")
    wait_until("it is up", lambda: bool(one.said))
    before = server_of(one)
    before.kill()
    wait_until("it has ended", lambda: not alive(before.pid))
    other = forked(forking, "deaf")
    assert server_of(other) != before
    assert process_state(one.place.pid) == "S" and not one.ended and len(forking._servers) == 2
    end(one)
    server_of(other).kill()
    wait_until("it has ended, too", lambda: not forking._servers[-1].fits(FORKS["tests.proc.kept"]))
    last = forked(forking, "deaf")
    assert len(forking._servers) == 2, "the first one's, of which nothing was left, has gone"
    end(last)
    forking.close()
    assert not forking.await_ends([one, other], PATIENCE)


def test_forks_end_with_who_keeps_them_whatever_has_become_of_their_server_and_of_them() -> None:
    keeper = subprocess.Popen([sys.executable, "-m", "tests.proc.keeps"], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    fork, server = (psutil.Process(int(pid)) for pid in keeper.stdout.readline().split())
    server.kill()
    fork.suspend()
    keeper.kill()
    keeper.wait(PATIENCE)
    wait_until("it has ended", lambda: not alive(fork.pid))
    keeper.stdout.close()


def test_a_server_that_does_not_answer_keeps_nobody_waiting(
    forking: LocalHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forkserver, "ANSWER", 0.2)
    one = forked(forking, "deaf")
    stopped = server_of(one)
    stopped.suspend()
    other = forked(forking, "deaf")
    assert psutil.Process(other.place.pid).ppid() == os.getpid() and "begins without" in caplog.text
    monkeypatch.undo()
    third = forked(forking, "deaf")
    assert server_of(third) != stopped
    end(one, other, third)  # the first one's end is known although its server says nothing
    stopped.resume()  # what it was asked for too late finds nobody who keeps it
    wait_until("it has no child any more", lambda: not stopped.children())


def test_while_a_server_is_waited_for_others_are_seen_to(forking: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
    one = forked(forking, "deaf")
    server = server_of(one)
    server.suspend()
    monkeypatch.setattr(forkserver, "ANSWER", PATIENCE)
    found: list[LocalChild] = []
    waits = threading.Thread(target=lambda: found.append(forked(forking, "deaf")))
    waits.start()
    other = start("ends")
    assert not LocalHost().await_ends([other], PATIENCE) and waits.is_alive()
    server.resume()
    waits.join(PATIENCE)
    assert server_of(found[0]) == server
    end(one, *found)


@pytest.mark.parametrize("room", range(8))
def test_a_server_without_descriptors_says_so(forking: LocalHost, room: int, caplog: pytest.LogCaptureFixture) -> None:
    """However many it has room for: what can't be forked begins by itself."""
    one = forked(forking, "deaf")
    server = server_of(one)
    end(one)  # so that its server has nothing more to do
    have = server.rlimit(psutil.RLIMIT_NOFILE)
    server.rlimit(psutil.RLIMIT_NOFILE, (limit_for(server.pid, room), have[1]))
    other = forked(forking, "deaf")
    fits = psutil.Process(other.place.pid).ppid() == server.pid
    assert fits == (room >= 6), "five that come with it, and its own"
    assert fits or "Too many open files" in caplog.text
    server.rlimit(psutil.RLIMIT_NOFILE, have)
    end(other)
    wait_until("nothing that was forked is left", lambda: not server.children())


@pytest.mark.parametrize("room", range(4, 8))
def test_who_has_no_descriptor_left_for_a_fork_has_none_and_waits_for_none(forking: LocalHost, room: int) -> None:
    """Two pipes take four."""
    one = forked(forking, "deaf")
    server, (soft, hard) = server_of(one), resource.getrlimit(resource.RLIMIT_NOFILE)
    before = set(os.listdir("/proc/self/fd"))  # some of which others may let go meanwhile
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(os.getpid(), room), hard))
    try:
        with pytest.raises(OSError, match="Too many open files") if room < 5 else contextlib.nullcontext():
            end(forked(forking, "deaf"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert before.issuperset(os.listdir("/proc/self/fd"))
    wait_until("what nobody has is gone", lambda: server.children() == [psutil.Process(one.place.pid)])
    other = forked(forking, "deaf")
    end(one, other)


def test_a_server_that_is_closed_keeps_no_descriptor() -> None:
    end(start("1"))
    before = len(os.listdir("/proc/self/fd"))
    host = LocalHost(devices=(), forks=FORKS)
    one = forked(host, "deaf")
    host.close()
    assert not host.await_ends([one], PATIENCE)
    wait_until("all are closed", lambda: len(os.listdir("/proc/self/fd")) == before)


def test_imports_that_fail_are_not_tried_again_for_each_process(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    host = LocalHost(devices=(), forks={"tests.proc.kept": ["no_such_module"]})
    children = [forked(host, "deaf") for _ in range(3)]
    assert {psutil.Process(child.place.pid).ppid() for child in children} == {os.getpid()}
    end(*children)
    host.close()
    assert capfd.readouterr().err.count("No module named") == 1 and caplog.text.count("begins without") == 1


def test_forks_do_not_outlive_who_asked_for_them(forking: LocalHost) -> None:
    one = forked(forking, "deaf")
    server = server_of(one)
    forking.close()
    assert not forking.await_ends([one], PATIENCE) and not server.is_running()
