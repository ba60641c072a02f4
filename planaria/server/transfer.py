"""`kv_transfer_params` of requests and answers, as vLLM's proxies pass them from a server that computes prompts to one
that goes on with them. What a client hands over names a host: nobody is contacted but who is configured, or has signed
for itself with the deployment's secret; else the prompt is computed here.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence

import msgspec

from planaria.config.options import TransferConfig
from planaria.errors import RequestError
from planaria.server.schema import GenerationRequest, KVTransferParams
from planaria.server.stream import Choices, Stream
from planaria.types import KVLayout, KVOffer
from planaria.wire import Submit

logger = logging.getLogger("planaria.server")

FIELD = "kv_transfer_params"


def signing_key(secret: bytes) -> bytes:
    return hashlib.blake2b(b"planaria kv_transfer_params", key=hashlib.blake2b(secret).digest()).digest()


class Transfers:
    """Of a server with this configuration. key: see signing_key; empty where nobody is contacted. layout: of an
    engine. refused: peers that were not contacted."""

    def __init__(self, config: TransferConfig | None, key: bytes, layout: KVLayout) -> None:
        self.config, self._key, self._layout = config, key, layout
        self.refused = 0

    def asked(self, body: GenerationRequest, submits: Sequence[Submit], prompts: int = 1) -> list[Submit]:
        """What engines are asked for, of a request with so many prompts. Raises RequestError."""
        params = body.kv_transfer_params
        if params is None or not (params.do_remote_decode or params.do_remote_prefill):
            return list(submits)
        self._check(params, body, prompts)
        assert self.config is not None
        if params.do_remote_decode:
            keeps = {"persist": True} if self.config.by_store else {"offers": True}
            return [msgspec.structs.replace(submits[0], **keeps), *submits[1:]]  # the prompt is the same
        offer = self._offer(params)
        return [msgspec.structs.replace(submit, lease=offer) for submit in submits]

    def _check(self, params: KVTransferParams, body: GenerationRequest, prompts: int) -> None:
        def refuse(why: str) -> RequestError:
            return RequestError(f"{FIELD}: {why}", param=FIELD, code="invalid_value")

        if self.config is None:
            raise refuse("this server exchanges no KV blocks; start it with --kv-transfer-config")
        if params.do_remote_decode and params.do_remote_prefill:
            raise refuse("do_remote_decode and do_remote_prefill exclude each other")
        if params.do_remote_decode and not self.config.serves:
            raise refuse("do_remote_decode is for a server with kv_role kv_producer or kv_both")
        if params.do_remote_prefill and not self.config.asks:
            raise refuse("do_remote_prefill is for a server with kv_role kv_consumer or kv_both")
        if params.do_remote_decode and (body.stream or prompts != 1):
            raise refuse("do_remote_decode is for one prompt, without stream")

    def _offer(self, params: KVTransferParams) -> KVOffer | None:
        """None: nobody may be contacted."""
        assert self.config is not None
        blocks = tuple(range(len(params.remote_block_ids or ())))
        if self.config.by_store:
            told = params.remote_layers is not None
            return KVOffer(params.remote_request_id or "", blocks, "", 0, self._layout_of(params) if told else None)
        host, port = params.remote_host, params.remote_port
        if not blocks or host is None or port is None or params.remote_request_id is None:
            return None
        offer = KVOffer(params.remote_request_id, blocks, host, port, self._layout_of(params))
        signed = params.remote_signature is not None and hmac.compare_digest(
            params.remote_signature.encode(), self._signature(offer).encode()
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not signed and address not in self.config.peers:
            self.refused += 1
            if not self.refused & (self.refused - 1):
                logger.warning(
                    "refused %d times to fetch KV blocks: from %s last, which is no peer", self.refused, address
                )
            return None
        return offer

    def _signature(self, offer: KVOffer) -> str:
        said = msgspec.json.encode([offer.id, offer.host, offer.port, offer.layout])
        return hmac.digest(self._key, said, "sha256").hex()

    def _layout_of(self, params: KVTransferParams) -> KVLayout | None:
        """None: it doesn't say, and is as this server's."""
        if params.tp_size is None:
            return None
        return KVLayout(
            params.tp_size, tuple(params.remote_layers or ()), params.remote_block_size or self._layout.block_size,
            params.remote_dcp_size, params.remote_pcp_size, params.remote_interleave,
        )  # fmt: skip

    def answer(self, prompt: Choices) -> dict[str, object]:
        """Of a request with do_remote_decode, what is handed to who goes on."""
        assert self.config is not None
        stream: Stream = prompt.sequences[0]
        layout = self._layout
        ranks = layout.tp * layout.pcp * len(layout.layers)
        port = self.config.port + stream.engine.index * ranks if self.config.port else None
        host = self.config.host or None
        found = {
            "do_remote_prefill": True, "do_remote_decode": False,
            "remote_engine_id": f"{self.config.engine_id}_dp{stream.engine.index}",
            "remote_block_ids": list(range(len(prompt.prompt) // layout.block_size)),
            "remote_block_size": layout.block_size, "remote_host": host, "remote_port": port,
            "remote_request_id": stream.name, "tp_size": layout.tp, "remote_layers": layout.layers,
            "remote_dcp_size": layout.dcp, "remote_pcp_size": layout.pcp, "remote_interleave": layout.interleave,
        }  # fmt: skip
        if host is not None and port is not None:
            offer = KVOffer(stream.name, (), host, port, layout)
            found["remote_signature"] = self._signature(offer)
        return found
