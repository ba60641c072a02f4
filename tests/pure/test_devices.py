"""Each rank of a node gets an accelerator of its own, by the number it has for the node and for the process."""

from __future__ import annotations

import pytest

from planaria.config import machine
from planaria.worker.device import own_device


@pytest.mark.parametrize(
    ("mask", "ids"),
    [(None, [0, 1, 2, 3]), ("2,3", [2, 3]), ("3,1", [3, 1]), ("GPU-aa,GPU-bb", [0, 1]), ("", []), ("-1", [])],
)
def test_what_a_node_has_and_which_is_the_ranks(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, ids: list[int]
) -> None:
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(4)])
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert machine.accelerator_ids() == ids
    # a rank's process sees what its launcher sees: local rank i uses the i-th of them
    assert [own_device((id,), machine.visible_cuda_devices()) for id in ids] == list(range(len(ids)))


def test_a_rank_to_which_none_was_dealt_uses_the_first() -> None:
    assert own_device((), ["3"]) == 0 and own_device((3,), ["3"]) == 0
