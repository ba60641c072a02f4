"""Lanes of one engine with a placement group each: they come and go, a rank, the engine or a node is lost, the tokens
are the same. Experts are balanced all the time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine, texts
from tests.proc.asking import ask_all
from tests.proc.servers import Server, alive, wait_until
from tests.ray.clusters import live_actors, live_groups, reservations

MODEL = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
ASKED = texts(131, [(5, 30), (70, 24), (1, 40), (33, 30), (20, 10), (9, 30)])
OPTIONS = [
    "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "32",
    "--kv-cache-memory", "8MiB", "--skip-tokenizer-init", "--enable-expert-parallel", "--data-parallel-backend", "ray",
    "--data-parallel-size-local", "1", "--heartbeat-timeout", "30", "--enable-eplb",
    "--eplb-config", '{"window_size": 4, "step_interval": 4, "num_redundant_experts": 2}',
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(three: Any) -> Any:
    """Three nodes with room for a rank and for one more."""
    return three


class Lanes:
    """A server with one engine, whose lanes are on Ray, and what Ray says of them."""

    def __init__(self, server: Server, model: str, expected: list[list[int]]) -> None:
        self.server, self.model, self.expected = server, model, expected

    def run(self, harm: Callable[[], object] | None = None) -> None:
        """Requests give the same tokens, whatever happens when 40 have come."""
        assert ask_all(self.server.url, self.model, ASKED * 2, at=40, harm=harm) == self.expected * 2

    def engine(self) -> dict[str, Any]:
        (engine,) = httpx2.get(self.server.url + "/admin/fleet").json()["engines"]
        return dict(engine)

    def scale(self, size: int) -> dict[str, Any]:
        body = {"new_data_parallel_size": size}
        return dict(httpx2.post(self.server.url + "/scale_elastic_ep", json=body, timeout=300).json())

    def scaled(self, size: int) -> None:
        done = self.scale(size)
        assert done.get("state") == "committed", (done, "".join(self.server.log[-40:]))

    def check(self, lanes: int) -> None:
        """Each in a group of its own on a node of its own, the engine in the first one's spare bundle."""
        groups, actors, engine = live_groups(), reservations(), self.engine()
        assert len(groups) == lanes == len(engine["ranks"]) and engine["layout"] == (
            "tp=1 pp=1" if lanes == 1 else f"dp={lanes} tp=1 pp=1"
        )
        places = [actors[pid] for pid in engine["ranks"]]
        assert [bundle for _, _, bundle in places] == [0] * lanes
        assert len({node for node, _, _ in places}) == len({group for _, group, _ in places}) == lanes
        assert actors[engine["pid"]] == (*places[0][:2], 1) and engine["misplaced"] == []


@pytest.fixture(scope="module")
def lanes(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    model = str(write_checkpoint(tmp_path_factory.mktemp("lanes"), "qwen2_moe", **MODEL))
    with Engine(model, distributed_executor_backend="uni") as one:
        expected = one.run(ASKED)
    with Server(model, *OPTIONS, "-dp", "2") as server:
        yield Lanes(server, model, expected)


@pytest.mark.row("D1")
def test_each_lane_has_a_group_and_the_engine_sits_in_the_first(lanes: Lanes) -> None:
    lanes.check(2)
    assert any("dp=2: 2 ranks on 2 nodes, strict, 1 engine on each" in line for line in lanes.server.log)
    lanes.run()
    (engine,) = httpx2.get(lanes.server.url + "/admin/experts").json()["engines"]
    assert engine["ranks"] == 2 and engine["rearrangements"] > 0 and engine["bytes_moved"] > 0


@pytest.mark.parametrize("sizes", [(3, 2), pytest.param((3, 1, 2), marks=pytest.mark.long)])
@pytest.mark.row("D8")
def test_lanes_come_and_go_with_their_groups_while_requests_stream(lanes: Lanes, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        lanes.run(lambda size=size: lanes.scaled(size))
        lanes.check(size)
        travel = httpx2.get(lanes.server.url + "/health").json()["last_layout_change"]["experts"]
        assert travel["read"] == 0 < travel["needed"] <= travel["moved"]
    refused = lanes.scale(4)["error"]["message"]
    assert "1 of 4" in refused and "dp=3 would fit" in refused
    lanes.check(2)


@pytest.mark.long
def test_a_lost_rank_and_a_lost_engine_come_up_in_their_groups(lanes: Lanes) -> None:
    before = lanes.engine()
    lanes.run(lambda: os.kill(before["ranks"][1], signal.SIGKILL))
    assert lanes.engine()["ranks"][0] == before["ranks"][0]
    lanes.check(2)
    lanes.run(lambda: os.kill(before["pid"], signal.SIGKILL))
    wait_until("it is back", lambda: lanes.engine()["state"] == "ready", 240)
    lanes.check(2)


@pytest.mark.long
@pytest.mark.parametrize("which", [1, 0])
def test_a_lost_node_is_replaced_by_another(lanes: Lanes, cluster: Any, which: int) -> None:
    """Its lane gets a device elsewhere, at once; its group goes with the engine's process."""
    engine = lanes.engine()
    place = reservations()[engine["ranks"][which]][0]
    node = next((node for node in cluster.worker_nodes if node.node_id == place), None)
    if node is None:
        pytest.skip("it is the server's own node")
    lanes.run(lambda: cluster.remove_node(node, allow_graceful=False))
    wait_until("both lanes are there", lambda: len(lanes.engine()["ranks"]) == 2, 240)
    lanes.run()
    cluster.add_node(num_cpus=1, resources={"planaria_slot": 2}, include_dashboard=False)


def test_nothing_of_them_is_left(lanes: Lanes) -> None:
    import ray

    pids = [lanes.engine()["pid"], *lanes.engine()["ranks"]]
    lanes.server.process.send_signal(signal.SIGTERM)
    assert lanes.server.process.wait(120) == 0
    wait_until("processes, actors and groups are gone", lambda: not (
        any(alive(pid) for pid in pids) or live_actors(ray) or live_groups()
    ), 120)  # fmt: skip
