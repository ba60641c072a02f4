"""The secret that the nodes of one deployment share, from which the keys of their connections are derived."""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path

from planaria.config.options import ParallelConfig
from planaria.env import cache_dir, secret, secret_file
from planaria.errors import ConfigError

MIN_BYTES = 32
_MAKE = "make one with `openssl rand -base64 48 > FILE`, give every node the file"


def deployment_secret(config: ParallelConfig) -> bytes:
    """--secret-file, else $PLANARIA_SECRET_FILE, else $PLANARIA_SECRET; on a loopback address one of this user's own.

    Raises ConfigError: there is none, it can't be read, it is too short.
    """
    named = config.secret_file or secret_file()
    if named is not None:
        option = "--secret-file" if config.secret_file else "$PLANARIA_SECRET_FILE"
        try:
            found = Path(named).expanduser().read_bytes().strip()
        except OSError as e:
            raise ConfigError(option, named, f"can't be read: {e.strerror}", f"{_MAKE} and name it here") from None
        return _long_enough(option, named, found)
    if (text := secret()) is not None:
        return _long_enough("$PLANARIA_SECRET", "***", text.encode().strip())
    if is_loopback(config.master_addr):
        return _own(cache_dir() / "secret")
    raise ConfigError(
        "--nnodes", config.nnodes, f"over the network ({config.master_addr}) needs a secret that all nodes share",
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
    """What only this user can read, made when it is first needed. Two processes may come at the same time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f"{path.name}.{os.getpid()}")
        made.touch(mode=0o600)
        made.write_text(secrets.token_hex(MIN_BYTES))
        try:
            os.link(made, path)  # whole, or not at all; the first stays
        except FileExistsError:
            pass
        finally:
            made.unlink()
        if path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o077:
            raise ConfigError("$PLANARIA_CACHE", path, "can be read by others", f"remove it, or {_MAKE}")
        return path.read_bytes()
    except OSError as e:
        raise ConfigError("$PLANARIA_CACHE", path, f"can't be made: {e.strerror}", f"or {_MAKE}") from None
