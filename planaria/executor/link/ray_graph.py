"""Steps through a Ray compiled graph; every other command by the queue link that this one wraps.

The graph is built at the first step and belongs to the epoch. Its input is the encoded plan, which every rank reads;
along its edges, rank by rank from stage to stage of each lane, go the hidden states; its outputs are the encoded
replies of all ranks. Nothing of ours is pickled. A plan with nothing in it passes every stage like any other.

Rule: only one thread submits and only one thread (the reader) takes results, in order. The reader ends with the graph.
Rule: a rank carries out commands in the order in which they were sent. Steps and other commands reach it in two
threads, so who goes one way waits until what went the other way is answered.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from planaria.executor.link.codec import encode_command, heard
from planaria.executor.link.faults import ConnectionLost, LinkError
from planaria.executor.ray.cluster import within
from planaria.executor.reply_ledger import RankReply
from planaria.protocol import Command, Exit, StepPlan
from planaria.topology import Layout

logger = logging.getLogger("planaria.ray")

WHO = 0.5  # seconds to find out which rank it was
BUILD = 40.0  # seconds; a raylet that hangs would make it take for ever
TEARDOWN = 2.0  # seconds; who is left is killed by the launcher
BUFFER = 1 << 20  # bytes of a channel at first; Ray makes it larger where a message is
WITHOUT_LIMIT = -1  # Ray's word for a wait that ends with the channel


class RayGraphLink:
    """queue_link: to the same ranks. actors: by rank of `layout`, whose `step` and `last_step` carry out a plan.
    in_flight: steps at a time at most."""

    def __init__(self, queue_link: Any, actors: Sequence[Any], layout: Layout, in_flight: int) -> None:
        self.queue = queue_link
        self.name = f"ray-graph+{queue_link.name}"
        self.actors, self.layout, self.in_flight = list(actors), layout, in_flight
        self._graph: Any = None
        self._fenced = False
        self._numbers: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._heard: deque[RankReply | LinkError] = deque()
        self._reader: threading.Thread | None = None
        self._held: deque[tuple[int, Command]] = deque()  # commands that wait
        self._owed = 0  # answers to what has gone out
        self._in_graph = False  # did that go through the graph?

    # -- the graph

    def _build(self) -> None:
        """Raises ConnectionLost."""
        from ray.dag import InputNode, MultiOutputNode

        layout = self.layout
        edges: dict[int, Any] = {}
        replies: list[Any] = []
        with InputNode() as plan:
            for rank, actor in enumerate(self.actors):
                stage = layout.group(rank, "pp").index(rank)
                before = edges[layout.group(rank, "pp")[stage - 1]] if stage else None
                if stage < layout.pp - 1:
                    reply, edge = actor.first_step.bind(plan) if before is None else actor.step.bind(plan, before)
                    edges[rank] = edge
                else:
                    reply = actor.only_step.bind(plan) if before is None else actor.last_step.bind(plan, before)
                replies.append(reply)
            graph = MultiOutputNode(replies)
        compile = functools.partial(
            graph.experimental_compile, _buffer_size_bytes=BUFFER, _max_inflight_executions=self.in_flight + 1,
            _max_buffered_results=self.in_flight + 1,
        )  # fmt: skip
        try:
            self._graph = within(compile, BUILD)
        except Exception as e:  # whatever Ray raises when an actor has gone meanwhile
            raise ConnectionLost(f"the graph of steps can't be set up: {_first_line(e)}") from None
        self._reader = threading.Thread(target=self._read, name="planaria-ray-graph", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while (item := self._numbers.get()) is not None:
            number, results = item
            try:
                for rank, result in enumerate(results):
                    self._heard.append((rank, number, heard(result.get(timeout=WITHOUT_LIMIT), rank)))
            except Exception as e:  # whatever Ray raises when an actor or the graph has gone
                self._heard.append(ConnectionLost(f"a rank left the graph of steps: {_first_line(e)}"))
                self._wake()
                return
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(LinkError, ValueError):  # closed meanwhile
            self.queue.wake()

    def teardown(self) -> None:
        """Within TEARDOWN seconds, or left to end with its actors. Idempotent."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        self._numbers.put(None)

        def end() -> None:
            talk = logging.getLogger("ray.dag.compiled_dag_node")  # tracebacks of actors that are gone, as we know
            before = talk.level
            talk.setLevel(logging.CRITICAL)
            with contextlib.suppress(Exception):
                graph.teardown()
            with contextlib.suppress(Exception):  # its stand-in for the driver, which would stay as long as the driver
                import ray

                ray.kill(graph._proxy_actor)
            talk.setLevel(before)

        thread = threading.Thread(target=end, name="planaria-ray-teardown", daemon=True)
        thread.start()
        thread.join(TEARDOWN)
        if thread.is_alive():
            logger.warning("the graph of steps was not torn down within %g s; its actors are killed", TEARDOWN)
        if self._reader is not None:
            self._reader.join(TEARDOWN)

    # -- as any link

    def send(self, number: int, command: Command) -> None:
        if isinstance(command, Exit):
            self.teardown()  # first: its loops keep the actors busy
            self._held.clear()
            self._owed, self._in_graph = self.layout.size, False
            self.queue.send(number, command)
            return
        self._held.append((number, command))
        self._hand_out()

    def _hand_out(self) -> None:
        """What is next, and all that may follow at once. Raises ConnectionLost."""
        while self._held:
            number, command = self._held[0]
            in_graph = isinstance(command, StepPlan)
            if self._owed and in_graph != self._in_graph:
                return
            self._held.popleft()
            self._owed, self._in_graph = self._owed + self.layout.size, in_graph
            if in_graph:
                self._execute(number, command)
            else:
                self.queue.send(number, command)

    def _execute(self, number: int, command: Command) -> None:
        if self._graph is None:
            self._build()
        data = encode_command(command)
        try:
            self._numbers.put((number, self._graph.execute(data)))
        except Exception as e:
            raise ConnectionLost(f"a rank left the graph of steps: {_first_line(e)}") from None

    def receive(self, timeout: float | None) -> RankReply | None:
        answer: RankReply | None = self._next() or self.queue.receive(timeout) or self._next()
        if answer is not None:
            self._owed -= 1
            if not self._owed:
                self._hand_out()
        return answer

    def _next(self) -> RankReply | None:
        if not self._heard:
            return None
        item = self._heard[0]
        if not isinstance(item, LinkError):
            self._heard.popleft()
            return item
        deadline = time.monotonic() + WHO  # Ray doesn't say who left; the queue link does, if it can
        while (left := deadline - time.monotonic()) > 0:
            if (answer := self.queue.receive(left)) is not None:
                return answer  # type: ignore[no-any-return]
        raise item

    def address_of(self, rank: int) -> Any:
        return self.queue.address_of(rank)

    def pulses(self) -> list[tuple[int, int]]:
        pulses: list[tuple[int, int]] = self.queue.pulses()
        return pulses

    def wake(self) -> None:
        self.queue.wake()

    def fence(self) -> None:
        """The epoch is over. Its graph is torn down by the launcher, once it has killed the ranks that are stopped."""
        self._fenced = True
        self.queue.fence()

    def close(self) -> None:
        if not self._fenced:
            self.teardown()
        self.queue.close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
