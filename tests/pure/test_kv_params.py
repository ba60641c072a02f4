"""`kv_transfer_params`: what a server signs, and takes from a client only as it was signed."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.config.options import TransferConfig
from planaria.server.schema import CompletionRequest
from planaria.server.stream import Choices
from planaria.server.transfer import Transfers
from planaria.types import KVLayout, KVOffer, SamplingParams
from planaria.wire import Submit

LAYOUT = KVLayout(2, (3, 2), 32, 2, 3, 4)
SUBMIT = Submit("r", [*range(40)], SamplingParams(), 0, max_tokens=2)


def transfers(serves: bool) -> Transfers:
    layout = LAYOUT if serves else KVLayout(1, (5,), 16)
    return Transfers(TransferConfig("tcp", serves, not serves, "e", "10.0.0.1", 14579), b"k" * 32, layout)


def handed_over() -> dict[str, Any]:
    choices = Choices(SUBMIT.prompt, [SUBMIT], None)
    choices.sequences[0].engine = type("Third", (), {"index": 2})  # type: ignore[assignment]
    return transfers(True).answer(choices)


def offer_of(params: dict[str, Any]) -> Any:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "kv_transfer_params": params})
    (submit,) = transfers(False).asked(body, [SUBMIT])
    return submit.lease


@pytest.mark.row("D5")
def test_each_engine_has_an_id_of_its_own() -> None:
    assert handed_over()["remote_engine_id"] == "e_dp2"


def test_an_offer_comes_as_it_was_made() -> None:
    assert offer_of(handed_over() | {"remote_layers": [3, 2]}) == KVOffer("r", (0,), "10.0.0.1", 14603, LAYOUT)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": "10.0.0.2"}, {"remote_port": 14579}, {"remote_request_id": "s"}, {"tp_size": 1},
        {"remote_layers": [2, 3]}, {"remote_layers": None}, {"remote_block_size": 16}, {"remote_dcp_size": 1},
        {"remote_pcp_size": 2}, {"remote_interleave": 1}, {"remote_signature": "0" * 64}, {"remote_signature": None},
    ],
)  # fmt: skip
def test_nothing_of_it_can_be_changed(change: dict[str, Any]) -> None:
    assert offer_of(handed_over() | {"remote_layers": [3, 2]} | change) is None


def test_of_a_store_it_says_whose_layout_wrote() -> None:
    """Nobody has signed, and nobody is contacted."""

    def lease(params: dict[str, Any]) -> Any:
        shared = TransferConfig("LMCacheConnectorV1", False, True, "e", remote_url="fs://here:1/kv")
        body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "kv_transfer_params": params})
        return Transfers(shared, b"", KVLayout(1, (5,), 16)).asked(body, [SUBMIT])[0].lease

    told = handed_over() | {"remote_layers": [3, 2], "remote_host": None, "remote_port": None}
    assert lease(told) == KVOffer("r", (0,), "", 0, LAYOUT)
    assert lease(told | {"remote_layers": None}) == KVOffer("r", (0,), "", 0)
