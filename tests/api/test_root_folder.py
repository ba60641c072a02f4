"""The folder of a root that serves with several processes."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from planaria.server import root_serve


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_killed_roots_left_is_removed_and_living_ones_are_left_alone(temporary: Path) -> None:
    left = temporary / "planaria-root-left"
    left.mkdir()
    (left / "engine").touch()
    with root_serve.folder_of_names() as one, root_serve.folder_of_names() as two:
        assert one != two and os.stat(one).st_mode & 0o777 == 0o700
        assert sorted(os.listdir(temporary)) == sorted(map(os.path.basename, (one, two)))
    assert not os.listdir(temporary)


def test_a_pipe_or_a_link_where_a_folder_or_a_lock_is_expected_holds_nobody_up(temporary: Path) -> None:
    """Opening a pipe waits for who writes to it."""
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    os.mkfifo(temporary / "planaria-root-pipe")
    (temporary / "planaria-root-link").symlink_to(elsewhere)
    left = temporary / "planaria-root-left"
    left.mkdir()
    os.mkfifo(left / "lock")
    with root_serve.folder_of_names():
        assert elsewhere.is_dir() and not left.exists()


@pytest.mark.parametrize("when", ["made", "opened"])
def test_two_roots_that_start_at_once_both_have_a_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The other one looks just when the first has made its folder, or opened it, and has not locked it."""
    make, lock, others = tempfile.mkdtemp, fcntl.flock, list[str]()

    def another() -> None:
        if not others:
            others.extend(os.path.join(temporary, name) for name in os.listdir(temporary))
            with root_serve.folder_of_names() as other:
                assert other not in others and not os.path.exists(others[0])

    def mkdtemp(prefix: str) -> str:
        made = make(prefix=prefix)
        if when == "made":
            another()
        return made

    def flock(fd: int, how: int) -> None:
        another()
        lock(fd, how)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(fcntl, "flock", flock)
    with root_serve.folder_of_names() as folder:
        assert folder not in others and os.path.isdir(folder)
        with pytest.raises(BlockingIOError):
            root_serve._locked(folder, fcntl.LOCK_NB)
