"""The secret that a node makes for itself: this user's own file, whoever else writes to the cache's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planaria.config.options import ParallelConfig
from planaria.config.secret import deployment_secret
from planaria.errors import ConfigError


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PLANARIA_SECRET", "PLANARIA_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PLANARIA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "secret"


def secret() -> bytes:
    return deployment_secret(ParallelConfig(nnodes=2, master_addr="127.0.0.1"))


def test_it_is_made_once_and_for_this_user(own: Path) -> None:
    first = secret()
    assert len(first) == 64 and secret() == first and own.stat().st_mode & 0o777 == 0o600
    assert os.listdir(own.parent) == ["secret"]


def test_no_link_is_followed(own: Path, tmp_path: Path) -> None:
    """Somebody who may write to the folder names a file of ours, or where ours would go."""
    target = tmp_path / "target"
    target.write_text("a" * 64)
    target.chmod(0o600)
    own.symlink_to(target)
    with pytest.raises(ConfigError, match="is a link"):
        secret()
    own.unlink()
    own.with_name(f"secret.{os.getpid()}").symlink_to(target)
    assert secret() != b"a" * 64 and target.read_text() == "a" * 64


def test_what_others_can_read_or_own_is_no_secret(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret()
    own.chmod(0o640)
    with pytest.raises(ConfigError, match="read by others"):
        secret()
    own.chmod(0o600)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        secret()


def test_nothing_but_a_whole_file_will_do(own: Path) -> None:
    own.write_bytes(b"short")
    own.chmod(0o600)
    with pytest.raises(ConfigError, match="holds 5 bytes"):
        secret()
    own.unlink()
    os.mkfifo(own, 0o600)
    with pytest.raises(ConfigError, match="is no file"):
        secret()
