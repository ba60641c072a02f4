"""The composition root: the only module that may import everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from planaria import preload
from planaria.config.machine import accelerator_ids, load_class
from planaria.config.options import EngineConfig
from planaria.config.secret import deployment_secret
from planaria.env import ray_settings
from planaria.errors import ConfigError
from planaria.executor.boot import RankBoot
from planaria.executor.launcher.inline import InlineLauncher
from planaria.executor.launcher.process import ProcessLauncher
from planaria.executor.link.choose import make_link
from planaria.executor.link.direct import DirectLink
from planaria.executor.link.keys import Keys
from planaria.executor.loop import Emit, EngineLoop, Link
from planaria.hosts.device_keeper import OwnedKeepers, keepers_of_all
from planaria.hosts.device_memory import Keepers
from planaria.hosts.host import Place
from planaria.hosts.memory import KVMemory
from planaria.hosts.weights import WeightsMemory
from planaria.node import Memories, home
from planaria.topology.outer import OuterLauncher
from planaria.wire import Listens, Progress

WORKER, ENGINE, PART = "planaria.worker.main", preload.ENGINE, "planaria.node_part"  # what processes run
TELL_EVERY = 0.1  # seconds between two words on how loading goes


def build_loop(config: EngineConfig, emit: Emit, *, again: bool = False, given: Memories | None = None) -> EngineLoop:
    """An engine that isn't started yet; `emit` hears all it says. again: another served before it, with this
    configuration: it begins with fewer ranks where some of the devices are gone. given: memory, of somebody who lives
    longer; else its ranks share what is of this process, unless they are this process."""
    loop = _make_loop(config, emit, again=again)
    gang, given = loop.gang, given or Memories()
    if config.null_worker:
        return loop
    own: OwnedKeepers | None = None
    if gang.launcher.replaces and given.weights is None and not given.keepers:
        own = keepers_of_all(config.device.platform, _devices(config))
        keeping = tuple(own.keeping) if own is not None else ()
        given = msgspec.structs.replace(given, keepers=keeping)
    if not config.device.platform.on_host and not given.keepers:
        return loop
    gang.memories = msgspec.structs.replace(given, home=home(), kv=None)
    if gang.launcher.replaces:
        keepers = Keepers(given.keepers) if given.keepers else None
        ranks = config.parallel.layout.size
        gang.kv.memory = KVMemory.make(ranks, keepers) if given.kv is None else KVMemory.of(given.kv, keepers)
        if given.weights is None and (weights := WeightsMemory.make(keepers)) is not None:
            gang.owns, gang.memories = (weights, own), msgspec.structs.replace(gang.memories, weights=weights.origin)
    return loop


def _devices(config: EngineConfig) -> Sequence[int]:
    """Ids of accelerators of this node that its ranks may use."""
    return config.device.devices or accelerator_ids()


def _make_loop(config: EngineConfig, emit: Emit, *, again: bool) -> EngineLoop:
    parallel = config.parallel
    if parallel.distributed_executor_backend == "uni":
        return _inline(config, emit)
    if parallel.outer is not None:
        return _spmd(config, parallel.outer, emit)
    launcher = _launcher(config, again)
    if launcher.link == "direct":
        return EngineLoop(config, launcher, lambda places, epoch: _direct(config, launcher), emit)

    def link_for(places: list[Place], epoch: int) -> Link:
        link: Link = make_link(
            [place.home == home() for place in places],
            host=launcher.address,
            heartbeat=parallel.heartbeat_timeout,
            epoch=epoch,
            chunk=parallel.link_chunk_bytes,
        )
        if parallel.ray_link == "compiled-graph" and launcher.graph:
            from planaria.executor.link.ray_graph import RayGraphLink

            link = RayGraphLink(link, launcher.actors, launcher.layout, config.scheduler.depth)
            launcher.before_leaving.append(link.teardown)
        return link

    if hasattr(launcher, "on_placed"):
        launcher.on_placed = emit
    if hasattr(launcher, "tell_port") and not parallel.master_port:
        launcher.tell_port = lambda port: emit(Listens(port))
    loop = EngineLoop(config, launcher, link_for, emit)
    loop.gang.came_up = again
    return loop


def _launcher(config: EngineConfig, again: bool) -> Any:
    parallel = config.parallel
    if "." in parallel.distributed_executor_backend:
        return load_class("--distributed-executor-backend", parallel.distributed_executor_backend)(config)
    if parallel.distributed_executor_backend == "ray":
        from planaria.executor.ray.launcher import RayLauncher

        return RayLauncher(
            parallel, config.device.device, f"{WORKER}:Life", ray_settings(), spares=config.faults.spare_workers
        )
    if parallel.over_nodes:
        if parallel.node_rank:
            raise ConfigError(
                "--node-rank", parallel.node_rank, "an engine runs on node 0 only",
                "on this node run `planaria serve MODEL` with the same options",
            )  # fmt: skip
        from planaria.executor.launcher.nodes import nodes_launcher

        return nodes_launcher(config, WORKER, again=again, imports=preload.of_a_rank(config))
    return ProcessLauncher(
        WORKER, range(parallel.world_size), spares=config.faults.spare_workers, imports=preload.of_a_rank(config)
    )


def run_agent(config: EngineConfig) -> int:
    """Be a node's agent, for as long as there is an engine, or a server of several, on node 0. Returns an exit code."""
    from planaria.executor.agent import Agent
    from planaria.executor.launcher.nodes import what_must_agree

    def own(theirs: EngineConfig) -> EngineConfig:
        """The same model, and the same secret, where they are here."""
        parallel = msgspec.structs.replace(theirs.parallel, secret_file=config.parallel.secret_file)
        return msgspec.structs.replace(theirs, checkpoint=checkpoint(theirs), parallel=parallel)

    def checkpoint(theirs: EngineConfig) -> dict[str, Any]:
        """Other weights than those of the start are where the engine says; what they lack here, who reads them says."""
        return theirs.checkpoint if theirs.checkpoint.get("updated") else config.checkpoint

    kept: dict[int, KVMemory | None] = {}  # of engines, by number; it outlives all that is started here
    owned = keepers_of_all(config.device.platform, accelerator_ids())
    keepers = Keepers(owned.keeping) if owned is not None else None
    weights = WeightsMemory.make(keepers)  # of all

    def memories(theirs: EngineConfig) -> Memories:
        index = theirs.parallel.data_parallel_index
        if not theirs.device.platform.on_host and keepers is None:
            return Memories()
        if index not in kept:
            kept[index] = KVMemory.make(theirs.parallel.layout.size, keepers)
        return Memories.of(kept[index], weights)

    def rank(message: bytes) -> tuple[bytes, str]:
        boot = RankBoot.decode(message)
        theirs = msgspec.structs.replace(boot.config, checkpoint=checkpoint(boot.config))
        boot = msgspec.structs.replace(boot, config=theirs, memories=memories(boot.config))
        return boot.encode(), "" if boot.beside else f"rank {boot.rank}"

    def engine(message: bytes) -> tuple[bytes, str]:
        theirs, keys = msgspec.msgpack.decode(message, type=tuple[EngineConfig, Keys])
        return msgspec.msgpack.encode((own(theirs), keys, memories(theirs))), ""

    def part(message: bytes) -> tuple[bytes, str]:
        return msgspec.msgpack.encode(own(msgspec.msgpack.decode(message, type=EngineConfig))), ""

    imports = preload.of_an_engine(config) if preload.of_a_rank(config) else []
    return Agent(
        config.parallel, {WORKER: rank, ENGINE: engine, PART: part}, deployment_secret(config.parallel),
        what_must_agree(config), drains={ENGINE}, forks={WORKER: imports, ENGINE: imports},
    ).run()  # fmt: skip


def telling(emit: Emit, clock: Callable[[], float] = time.monotonic) -> Callable[[str, float], None]:
    """For who hears of each tensor how loading goes, while those it tells hear that now and then and at the end: what a
    front end has no room for would be behind it when the engine ends."""
    last = -TELL_EVERY

    def tell(part: str, fraction: float) -> None:
        nonlocal last
        if fraction >= 1 or clock() >= last + TELL_EVERY:
            last = clock()
            emit(Progress(part, fraction))

    return tell


def _inline(config: EngineConfig, emit: Emit) -> EngineLoop:
    """One rank in this process, called directly."""
    from planaria.worker.worker import make_rank

    launcher = InlineLauncher(lambda boot: make_rank(boot, telling(emit)), WORKER)
    return EngineLoop(config, launcher, lambda places, epoch: _direct(config, launcher), emit)


def _spmd(config: EngineConfig, outer: OuterLauncher, emit: Emit) -> EngineLoop:
    """This process's rank, called directly, and the same engine as in the outer launcher's other processes."""
    from planaria.executor.launcher.external import ExternalLauncher
    from planaria.executor.link.circle import Circle
    from planaria.executor.link.spmd import SpmdLink
    from planaria.mesh.meeting import OuterStore
    from planaria.worker.worker import make_rank

    def circle(address: str) -> Circle:
        size, heartbeat = outer.world_size, config.parallel.heartbeat_timeout
        return Circle.open(outer.rank, size, lambda: OuterStore(outer), address, heartbeat=heartbeat)

    def abort(why: str) -> None:
        for rank in launcher.ranks:
            if (mesh := getattr(rank, "mesh", None)) is not None:
                mesh.abort(why)

    def link_for(places: list[Place], epoch: int) -> Link:
        assert launcher.circle is not None
        link = SpmdLink(launcher.circle, launcher.ranks, abort)
        loop.clock, loop.agree, loop.share = link.clock, link.agree, link.share
        return link

    launcher = ExternalLauncher(outer, lambda boot: make_rank(boot, telling(emit)), circle)
    loop = EngineLoop(config, launcher, link_for, emit)
    return loop


def _direct(config: EngineConfig, launcher: Any) -> DirectLink:
    return DirectLink(launcher.ranks, threaded=config.scheduler.depth > 1)
