"""Who may use a TCP link: CurveZMQ keys of one deployment, one pair for the driver and one for each rank.

A connection is encrypted and both ends are known by their keys; a key that isn't on the list gets no further than the
handshake, and a rank's key speaks for that rank only. Secrets are handed to ranks through a pipe or a private file,
never on a command line or in the environment of another user's process. ZeroMQ asks at each handshake who may come.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from planaria.executor.link.codec import BAD_BYTES
from planaria.executor.link.faults import LinkError

MIN_SECRET = 32
_DOMAIN = b"planaria"
HEARTBEAT = 5.0  # seconds without a sign of life (ZeroMQ's own thread gives it) after which a connection is dead


class Pair(msgspec.Struct, frozen=True, array_like=True):
    """A key pair in Z85 text, 40 characters each."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"Pair(public={self.public!r})"


class Keys(msgspec.Struct, frozen=True, array_like=True):
    """All pairs of a deployment: the driver's side of it."""

    driver: Pair
    ranks: tuple[Pair, ...]

    @classmethod
    def generate(cls, num_ranks: int) -> Keys:
        """Fresh random keys."""
        pairs = [Pair(*(key.decode() for key in zmq.curve_keypair())) for _ in range(num_ranks + 1)]
        return cls(pairs[0], tuple(pairs[1:]))

    @classmethod
    def derive(cls, secret: bytes, num_ranks: int, purpose: str = "link") -> Keys:
        """The same keys on every node that knows `secret` (at least 32 random bytes); others for each purpose. Raises
        LinkError if it is shorter."""
        if len(secret) < MIN_SECRET:
            raise LinkError(f"the deployment's secret has {len(secret)} bytes; give at least {MIN_SECRET} random ones")
        pairs = [_derived(secret, f"planaria {purpose} {place}") for place in range(-1, num_ranks)]
        return cls(pairs[0], tuple(pairs[1:]))


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """What a rank needs to join: where, and as whom. Contains a secret. heartbeat: as TcpLink's, for the rank's end."""

    address: str
    driver_key: str
    pair: Pair
    rank: int
    epoch: int
    chunk_bytes: int
    heartbeat: float = HEARTBEAT

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Invitation:
        """Raises LinkError."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except BAD_BYTES as e:
            raise LinkError(f"not an invitation to a link: {e}") from None


def _derived(secret: bytes, label: str) -> Pair:
    # Any 32 bytes are a Curve25519 secret key; a keyed hash makes them unrelated for different labels.
    key = hashlib.blake2b(label.encode(), key=hashlib.blake2b(secret).digest(), digest_size=32).digest()
    own = z85.encode(key)
    return Pair(zmq.curve_public(own).decode(), own.decode())


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
