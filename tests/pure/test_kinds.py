"""Engines of two kinds: what they can't be combined with, said before anything starts; how their KV gets across."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.config.kinds import of_two_kinds
from planaria.config.options import EngineOptions, ParallelConfig
from planaria.config.transfer import transfer_config
from planaria.errors import ConfigError

BOTH = {"prefill_engines": 1, "decode_engines": 2}


def kinds(**options: Any) -> EngineOptions:
    return of_two_kinds(EngineOptions(model="m", **options), options.get("device") or "cpu")


def test_engines_of_both_kinds_are_a_fleet() -> None:
    assert kinds(**BOTH).data_parallel_size == 3 and kinds().data_parallel_size == 1
    for backend in ("uni", "mp", "ray"):
        assert kinds(distributed_executor_backend=backend, **BOTH).data_parallel_size == 3
    assert kinds(nnodes=2, **BOTH).data_parallel_size == 3


@pytest.mark.parametrize(
    "options, why",
    [
        ({"prefill_engines": 1}, "--decode-engines"), ({"decode_engines": 1}, "--prefill-engines"),
        (BOTH | {"data_parallel_size": 2}, "--data-parallel-size 2 does"),
        (BOTH | {"enable_expert_parallel": True}, "lanes"),
        (BOTH | {"distributed_executor_backend": "external_launcher"}, "not for external_launcher"),
        (BOTH | {"data_parallel_external_lb": True}, "outside balancer"),
        (BOTH | {"data_parallel_hybrid_lb": True}, "outside balancer"),
        (BOTH | {"data_parallel_rank": 0}, "outside balancer"), (BOTH | {"data_parallel_start_rank": 1}, "outside"),
        (BOTH | {"enable_prefix_caching": False}, "finds KV by its prefix"),
        (BOTH | {"null_worker": True}, "memory of a CPU"), (BOTH | {"device": "cuda"}, "memory of a CPU"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        kinds(**options)


def transfer(monkeypatch: pytest.MonkeyPatch, **parallel: Any) -> Any:
    for name in ("PLANARIA_SECRET", "PLANARIA_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    found = ParallelConfig(prefill_engines=1, decode_engines=1, data_parallel_size=2, **parallel)
    return transfer_config(EngineOptions(model="m"), found)


def test_engines_on_one_node_read_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transfer(monkeypatch) is None


def test_engines_elsewhere_fetch_from_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = transfer(monkeypatch, nnodes=2)
    assert (found.connector, found.serves, found.asks, found.port, found.folder) == ("tcp", True, True, 0, None)
    with pytest.raises(ConfigError, match=r"--prefill-engines 1.*secret"):
        transfer(monkeypatch, data_parallel_backend="ray")
    (tmp_path / "secret").write_bytes(b"s" * 32)
    assert transfer(monkeypatch, data_parallel_backend="ray", secret_file=str(tmp_path / "secret")) == found
