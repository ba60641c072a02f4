"""Who may come to a listening socket: CurveZMQ with a list of keys, asked for by ZeroMQ at each handshake."""

from __future__ import annotations

import threading
from typing import Any

import zmq
from zmq.utils import z85

from planaria.executor.link.keys import Keys, Pair

_DOMAIN = b"planaria"


def guard(context: zmq.Context[Any], socket: zmq.Socket[Any], keys: Keys) -> None:
    """Before it is bound: only who has one of `keys.ranks` gets past the handshake. One socket for each context."""
    allowed = {z85.decode(pair.public): rank for rank, pair in enumerate(keys.ranks)}
    _Gatekeeper(context, allowed).start()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.driver.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


def introduce(socket: zmq.Socket[Any], driver_key: str, pair: Pair) -> None:
    """Before it connects to a guarded one."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, driver_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())


def keep_alive(socket: zmq.Socket[Any], seconds: float) -> None:
    """A connection without a sign of life for so long is dead; ZeroMQ's own thread gives and looks for it."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(seconds * 200)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(seconds * 800)))


class _Gatekeeper(threading.Thread):
    """Answers ZeroMQ's question whether a key may connect, and as which rank. Ends with the context."""

    def __init__(self, context: zmq.Context[Any], allowed: dict[bytes, int]) -> None:
        super().__init__(name="link keys", daemon=True)
        self.allowed = allowed
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def run(self) -> None:
        while True:
            try:
                version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
                rank = self.allowed.get(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else None
                verdict = (b"400", b"key not on the list", b"") if rank is None else (b"200", b"", b"%d" % rank)
                self.socket.send_multipart([version, request, *verdict, b""])
            except zmq.ContextTerminated:
                self.socket.close()
                return
