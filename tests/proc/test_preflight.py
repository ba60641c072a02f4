"""Ranks of nodes with networks of their own look whether they reach one another, before they make their groups."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.proc.servers import TINY
from tests.proc.test_nodes import SECRET, Command, two_networks

__all__ = ["two_networks"]  # a fixture


@pytest.mark.row("R12")
def test_a_rank_that_others_cannot_reach_is_named(
    small: Path, two_networks: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """Node 1 gives an address that only itself can reach."""
    (tmp_path / "secret").write_bytes(SECRET)
    args = ["generate", str(small), *TINY, "--prompt-token-ids", "5", "-tp", "2", "--nnodes", "2"]
    args += ["--master-addr", "10.93.0.1", "--secret-file", str(tmp_path / "secret")]
    wrong = {"PLANARIA_HOST_IP": "127.0.0.1"}
    with (
        Command(*args, "--node-rank", "1", prefix=two_networks[1], env=wrong) as other,
        Command(*args, prefix=two_networks[0]) as head,
    ):
        assert head.wait(240) == 1
        assert re.search(
            r"rank 0 on \S+ \(10\.93\.0\.1\) can't reach rank 1 on \S+ at 127\.0\.0\.1 port \d+: Connection refused; "
            r"no other node reaches a loopback address: set \$PLANARIA_HOST_IP there",
            re.sub(r"\s+", " ", head.text()),
        ), head.text()
        assert other.wait(20) == 0, other.text()
