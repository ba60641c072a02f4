"""Which link carries what: shared memory to ranks of the driver's node, TCP to others, or both joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planaria.executor.link import futex


def make_link(
    here: Sequence[bool], *, host: str = "127.0.0.1", epoch: int = 0, heartbeat: float = 10.0, chunk: int | None = None
) -> Any:
    """A link to one rank for each of `here`, which says whether it is of this node.

    host: this node's address, where others come to; used when some rank isn't here. heartbeat: seconds of silence after
    which a connection between nodes is dead. chunk: bytes of a message's piece, None: each link's own. Raises
    LinkError.
    """
    near = [rank for rank, is_here in enumerate(here) if is_here]
    far = [rank for rank, is_here in enumerate(here) if not is_here]
    if futex.available():  # why they can't be used
        near, far = [], list(range(len(here)))
    parts: list[tuple[Any, list[int]]] = []
    if near:
        from planaria.executor.link.shm import SLOT_BYTES, ShmLink

        parts.append((ShmLink(len(near), epoch=epoch, chunk_bytes=chunk or SLOT_BYTES), near))
    if far:
        from planaria.executor.link.tcp import TcpLink
        from planaria.executor.link.tcp_socket import CHUNK_BYTES

        size = chunk or CHUNK_BYTES
        parts.append((TcpLink(len(far), host=host, epoch=epoch, heartbeat=heartbeat, chunk_bytes=size), far))
    if len(parts) == 1:
        return parts[0][0]
    from planaria.executor.link.joined import JoinedLink

    return JoinedLink(parts)
