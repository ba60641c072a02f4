"""A node that is lost while requests run, and comes again; an engine's process that ends, and another that gets the
nodes. Agents of nodes on this machine, and of two networks whose link is cut."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from planaria.errors import CapacityError
from planaria.executor.agent import Agent
from planaria.executor.launcher.nodes import placement_of
from planaria.hosts.host import Place
from planaria.hosts.pool import placed
from planaria.topology import Infeasible, Layout, Placement
from tests.faults.streams import enter_network
from tests.proc import networks
from tests.proc.networks import Networks
from tests.proc.servers import PATIENCE, SOON, Server, alive, needs_smollm2, titled, wait_until
from tests.proc.sockets import free_port
from tests.proc.test_engine_death import HASH, Outcome, health
from tests.proc.test_engine_death import run as run_streams
from tests.proc.test_nodes import EQUAL, NULL, SECRET, Command, launcher, parallel_of
from tests.proc.test_recovery import Watched

pytestmark = needs_smollm2

REAL = ["--kv-cache-memory", "128MiB", "--max-model-len", "1024", "--dtype", "float32"]
STREAMS = 6
HEARTBEAT = 2.0
GROWS = 180.0  # seconds, of which a model takes most to load where many share the cores


def agent(port: int, *options: str, pp: int = 2) -> Command:
    """Node 1 of two, on this machine."""
    where = ["-pp", str(pp), "--nnodes", "2", "--master-port", str(port), "--node-rank", "1"]
    return Command("serve", "smollm2", *options, *where, "--log-level", "info")


def spares_of(command: Command) -> list[int]:
    return titled(command.process.pid, "spare")


class TwoNodes:
    """An LLM of two stages, and the agent of the second. Its worker is a function of the history, or the model."""

    def __init__(self, *, real: bool = False, **options: Any) -> None:
        self.port = free_port()
        self.args = [*(REAL if real else HASH), "--dtype", "float32"]
        self.args += (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
        if not real:
            options |= {"worker_cls": HASH[1], "max_model_len": int(HASH[3]), "kv_cache_memory": None}
        self.agents = [agent(self.port, *self.args)]
        self.watched = Watched(pipeline_parallel_size=2, nnodes=2, master_port=self.port, **options)

    def come_again(self) -> None:
        self.agents.append(agent(self.port, *self.args))

    @property
    def other(self) -> Command:
        return self.agents[-1]

    def look(self) -> None:
        """As an engine does about once a second."""
        self.watched.llm._loop.check()

    def close(self) -> None:
        self.watched.llm.close()
        for each in self.agents:
            each.__exit__()


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["hash", "model"])
def two(request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    nodes = TwoNodes(real=request.param, heartbeat_timeout=3)
    yield nodes
    nodes.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_node_that_is_lost_costs_a_smaller_layout_until_it_is_back(
    two: TwoNodes, how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    watched, before, heard = two.watched, two.watched.pids, len(two.watched.done)
    assert watched.run(60, lambda: two.other.process.send_signal(how)) == watched.expected
    (shrunk,) = watched.done[heard:]
    assert (shrunk.layout, shrunk.kind, shrunk.ranks) == ("tp=1 pp=1", "fault", [1])
    assert "is out of reach: node 1" in shrunk.cause and "going on with tp=1" in caplog.text
    assert watched.pids == before[:1]
    wait_until("its rank has ended", lambda: not alive(before[1]))
    assert two.other.process.wait(PATIENCE) == (-9 if how == signal.SIGKILL else 0)

    two.come_again()
    wait_until("the layout is back", lambda: two.look() or len(watched.pids) == 2, limit=GROWS)
    grown = watched.done[-1]
    assert (grown.layout, grown.kind, grown.ranks) == ("tp=1 pp=2", "layout", [])
    assert watched.pids[0] == before[0]
    assert watched.run() == watched.expected


def test_a_stopped_rank_elsewhere_is_ended_there_and_replaced(two: TwoNodes) -> None:
    watched, before, heard = two.watched, two.watched.pids, len(two.watched.done)
    assert watched.run(60, lambda: os.kill(before[1], signal.SIGSTOP)) == watched.expected
    (done,) = watched.done[heard:]
    assert (done.layout, done.kind, done.ranks) == ("tp=1 pp=2", "fault", [1])
    assert watched.pids[0] == before[0] and watched.pids[1] != before[1]
    assert not alive(before[1]) and two.other.ranks() == watched.pids[1:]


@pytest.mark.long
def test_a_stopped_agent_is_a_lost_node_and_joins_again_when_it_goes_on(two: TwoNodes) -> None:
    watched, (first, rank) = two.watched, two.watched.pids
    os.kill(two.other.process.pid, signal.SIGSTOP)
    try:
        wait_until("it is noticed", lambda: two.look() or len(watched.pids) == 1)
    finally:
        os.kill(two.other.process.pid, signal.SIGCONT)
    assert watched.run() == watched.expected
    wait_until("the layout is back", lambda: two.look() or len(watched.pids) == 2, limit=GROWS)
    assert not alive(rank) and watched.pids[0] == first
    assert watched.run() == watched.expected


def test_spares_take_ranks_on_their_own_node_and_then_on_another() -> None:
    nodes = TwoNodes(spare_workers=1)
    watched = nodes.watched
    try:
        wait_until("both have a spare", lambda: len(watched.llm._loop.gang.launcher.spare_pids()) == 2)
        (theirs,) = spares_of(nodes.other)
        (ours,) = (pid for pid in watched.llm._loop.gang.launcher.spare_pids() if pid != theirs)  # one machine: both
        wait_until("theirs is ready", lambda: watched.llm._loop.gang.launcher.pool.rooms()["1"].ready == 2)
        assert watched.run(60, lambda: os.kill(watched.pids[1], signal.SIGKILL)) == watched.expected
        assert watched.pids[1] == theirs
        assert watched.run(60, nodes.other.process.kill) == watched.expected
        assert watched.pids[1] == ours, "nobody needs a smaller layout"
        assert [done.layout for done in watched.done] == ["tp=1 pp=2"] * 2
    finally:
        nodes.close()


# -- the engine's process


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Server, list[Command], int]]:
    """A server of two stages over two nodes; the agents that there were; their port."""
    port = free_port()
    agents = [agent(port, *HASH)]
    args = [*HASH, "-pp", "2", "--nnodes", "2", "--master-port", str(port), "--heartbeat-timeout", str(HEARTBEAT)]
    with Server("smollm2", *args) as server:
        yield server, agents, port
    assert agents[-1].wait(PATIENCE) == 0, agents[-1].text()  # SIGTERM to the server is their end
    for each in agents:
        each.__exit__()


def test_another_engine_gets_the_nodes(served: tuple[Server, list[Command], int]) -> None:
    """Agents stay, also where other weights are in force than their own command names. Where a node is gone as well,
    the engine begins without it."""
    server, agents, port = served
    done = httpx2.post(server.url + "/update_weights", json={"path": "smollm2"}, timeout=PATIENCE)
    assert done.status_code == 200, done.text
    expected = run_streams(server)
    ranks = agents[0].ranks()

    def harm(tokens: int) -> None:
        if tokens == 150:
            os.kill(server.engine_pid(), signal.SIGKILL)

    assert run_streams(server, harm) == expected
    agents[0].wait_for("the ranks of node 1 have ended; it waits")
    assert not any(alive(rank) for rank in ranks) and len(agents[0].ranks()) == 1
    assert health(server)["engine_restarts"] == 1

    def more_harm(tokens: int) -> None:
        if tokens == 150:
            agents[0].process.kill()
            os.kill(server.engine_pid(), signal.SIGKILL)

    assert run_streams(server, more_harm) == expected
    server.wait_for("beginning with tp=1")
    agents.append(agent(port, *HASH))
    server.wait_for("there are devices for it again", GROWS)
    assert run_streams(server) == expected and len(agents[1].ranks()) == 1


def test_a_servers_end_is_its_ranks_end_and_its_agents_get_another_one() -> None:
    """Killed, it can't say that it has ended: agents wait for the next."""
    port = free_port()
    nodes = ["-pp", "2", "--nnodes", "2", "--master-port", str(port)]
    with agent(port, *NULL[1:]) as other:
        with Command("serve", *NULL, *nodes, "--port", "0") as head:
            head.wait_for("Planaria serving")
            ranks = [*other.ranks(), *head.ranks()]
            assert len(ranks) >= 2
            head.process.kill()
            wait_until("all ranks end", lambda: not any(alive(rank) for rank in ranks), limit=SOON)
        other.wait_for("it waits")
        with Command("serve", *NULL, *nodes, "--port", "0") as head:
            head.wait_for("Planaria serving")
            head.process.terminate()
            assert head.wait(PATIENCE) == 0, head.text()
        assert other.wait(PATIENCE) == 0, other.text()


def test_an_agent_that_no_driver_comes_back_to_ends() -> None:
    """After the time that it waits for one; told that another follows, it waits as long."""
    port = free_port()
    nodes = launcher(port, EQUAL)
    started: list[Place] = []

    def start() -> None:
        started.extend(nodes.start())
        nodes.followed = True
        nodes.kill()

    starting = threading.Thread(target=start)
    starting.start()
    parallel = msgspec.structs.replace(parallel_of(port), node_rank=1)
    fits = {"planaria.worker.main": lambda boot: (boot, "rank")}
    node = Agent(parallel, fits, SECRET, EQUAL, join_timeout=1.0)
    with pytest.raises(CapacityError, match=r"no node 0 at 127\.0\.0\.1 port"):
        node.run()
    starting.join(60)
    assert started and not node.kept and not any(alive(place.pid) for place in started)


# -- two networks


@pytest.fixture
def two_networks() -> Iterator[Networks]:
    try:
        with networks.two_networks() as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces can't be made here: {getattr(e, 'stderr', '') or e}")


def streams(server: Server, space: str, harm: Callable[[int], None] = lambda tokens: None) -> list[Outcome]:
    """From clients in that network."""
    return run_streams(server, harm, STREAMS, functools.partial(enter_network, space))


@pytest.mark.parametrize(
    ("layout", "worker"),
    [("-pp", HASH), *(pytest.param(layout, REAL, marks=pytest.mark.long) for layout in ("-pp", "-tp"))],
    ids=["hash", "pp", "tp"],
)
def test_a_cut_network_costs_a_smaller_layout_until_it_is_whole_again(
    layout: str, worker: list[str], two_networks: Networks, tmp_path: Path
) -> None:
    """Nobody hears of a cable that was pulled: heartbeats do."""
    (tmp_path / "secret").write_bytes(SECRET)
    space = two_networks.spaces[0]
    args = ["smollm2", *worker, layout, "2", "--nnodes", "2", "--master-addr", "10.93.0.1", "--heartbeat-timeout", "2"]
    args += ["--secret-file", str(tmp_path / "secret")]
    with (
        Command("serve", *args, "--node-rank", "1", prefix=two_networks.prefixes[1]) as other,
        Server(*args, prefix=two_networks.prefixes[0]) as server,
    ):
        expected = streams(server, space)
        (far,), (own,) = other.ranks(), titled(server.pid, "worker")

        def harm(tokens: int) -> None:
            if tokens == 60:
                two_networks.cut()

        assert streams(server, space, harm) == expected
        server.wait_for("is out of reach: node 1")
        server.wait_for("going on with tp=1")
        wait_until("its ranks end", lambda: not alive(far))
        assert titled(server.pid, "worker") == [own]
        two_networks.mend()
        server.wait_for("there are devices for it again", GROWS)
        assert streams(server, space) == expected
        assert titled(server.pid, "worker") == [own] and len(other.ranks()) == 1


# -- where ranks go


def nodes_of(layout: Layout, counts: dict[str, int], before: Placement) -> list[str]:
    return [slot.node for slot in placed(layout, counts, before).slots]


def test_ranks_go_where_there_is_room_and_nobody_moves_for_nothing() -> None:
    four = placement_of(msgspec.structs.replace(parallel_of(1), pipeline_parallel_size=4, nnodes=4))
    pp4, tp2pp2 = four.layout, Layout(tp=2, pp=2)
    assert nodes_of(pp4, {"0": 1, "1": 1, "2": 1, "3": 1}, four) == ["0", "1", "2", "3"]
    assert nodes_of(pp4, {"0": 2, "2": 2, "3": 2}, four) == ["0", "0", "2", "3"]  # to a place on another node
    with pytest.raises(Infeasible) as e:
        placed(pp4, {"0": 1, "2": 1, "3": 1}, four)
    assert e.value.nearest == Layout(pp=3)
    # one node of two was lost, and is back: tensor groups are whole, though a kept rank must move
    shrunk = placed(Layout(pp=2), {"0": 2}, placed(tp2pp2, {"0": 2, "1": 2}, four))
    assert nodes_of(tp2pp2, {"0": 2, "1": 2}, shrunk) == ["0", "0", "1", "1"]
    assert nodes_of(Layout(tp=2), {"0": 1, "1": 1}, four) == ["0", "1"]  # better slow than not at all


@pytest.mark.parametrize("tp", [1, 2])
def test_lanes_that_stay_do_so_where_they_are(tp: int) -> None:
    """What they have in memory stays with them; a lane that comes goes where there are fewer."""
    parallel = msgspec.structs.replace(parallel_of(1), tensor_parallel_size=tp, pipeline_parallel_size=1, lanes=4)
    four, counts = placement_of(parallel), {"0": 2 * tp, "1": 2 * tp}
    two = placed(Layout(tp=tp, dp=2), counts, four)
    assert [slot.node for slot in two.slots] == ["0"] * 2 * tp
    assert placed(two.layout, counts, two) == two, "with a rank that is lost as well"
    one = placed(Layout(tp=tp), counts, four)
    assert [slot.node for slot in one.slots] == ["0"] * tp
    assert nodes_of(two.layout, counts, one) == ["0"] * tp + ["1"] * tp
