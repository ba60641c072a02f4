"""The secret that the nodes of one deployment share, from which the keys of their connections are derived."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import stat
from pathlib import Path

from planaria.config.options import ParallelConfig
from planaria.env import cache_dir, path_of, secret, secret_file
from planaria.errors import ConfigError

MIN_BYTES = 32
_MAKE = "make one with `openssl rand -base64 48 > FILE`, give every node the file"


def deployment_secret(
    config: ParallelConfig, host: str | None = None, asked: tuple[str, object] | None = None
) -> bytes:
    """--secret-file, else $PLANARIA_SECRET_FILE, else $PLANARIA_SECRET; on a loopback address one of this user's own.
    host: where connections come to, the master's where it is None; asked: the option that wants it, and its value.

    Raises ConfigError: there is none, it can't be read, it is too short.
    """
    named = config.secret_file or secret_file()
    if named is not None:
        option = "--secret-file" if config.secret_file else "$PLANARIA_SECRET_FILE"
        try:
            found = path_of(named).read_bytes().strip()
        except OSError as e:
            raise ConfigError(option, named, f"can't be read: {e.strerror}", f"{_MAKE} and name it here") from None
        return _long_enough(option, named, found)
    if (text := secret()) is not None:
        return _long_enough("$PLANARIA_SECRET", "***", text.encode().strip())
    host = host or config.master_addr
    if is_loopback(host):
        return _own(cache_dir() / "secret")
    flag, value = asked or ("--nnodes", config.nnodes)
    raise ConfigError(
        flag, value, f"over the network ({host}) needs a secret that all nodes share",
        f"{_MAKE} and name it with --secret-file or $PLANARIA_SECRET_FILE",
    )  # fmt: skip


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _long_enough(option: str, value: str, found: bytes) -> bytes:
    if len(found) < MIN_BYTES:
        raise ConfigError(option, value, f"holds {len(found)} bytes, and {MIN_BYTES} random ones are the least", _MAKE)
    return found


def _own(path: Path) -> bytes:
    """What only this user can read, made when it is first needed. Two processes may come at the same time.

    The cache's folder may be shared: what lies there under our names may be somebody else's, so no link is followed
    and nothing but this user's own file is written or believed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w") as f:
            f.write(secrets.token_hex(MIN_BYTES))
        try:
            os.link(made, path, follow_symlinks=False)  # whole, or not at all; the first stays
        except FileExistsError:
            pass
        finally:
            made.unlink()
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as f:
            about = os.fstat(f.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError("$PLANARIA_CACHE", path, "is no file", f"remove it, or {_MAKE}")
            if about.st_uid != os.getuid():
                raise ConfigError("$PLANARIA_CACHE", path, "belongs to another user", f"remove it, or {_MAKE}")
            if about.st_mode & 0o077:
                raise ConfigError("$PLANARIA_CACHE", path, "can be read by others", f"remove it, or {_MAKE}")
            return _long_enough("$PLANARIA_CACHE", str(path), f.read().strip())
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ConfigError("$PLANARIA_CACHE", path, "is a link", f"remove it, or {_MAKE}") from None
        raise ConfigError("$PLANARIA_CACHE", path, f"can't be made: {e.strerror}", f"or {_MAKE}") from None
