"""Ten thousand runs with faults, of engines and of fleets, and that the rules they are held to bite.

A seed that fails is replayed by `pytest tests/sim --seed N`, which prints its history.
"""

from __future__ import annotations

import ast
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.sim.deployment import Deployment
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.seeds import FLEETS, history, restart, simulate
from tests.sim.simulation import Simulation
from tests.sim.world import Violation

SEEDS, ALL_SEEDS = range(600, 800), range(10_000)  # by default, and in the long tier
PART = 100
PROCESSES = 2
NEAR, ENOUGH = 100, 2000  # seeds within which a mutation must be found: from where it soon was, else from 0

Found = tuple[list[tuple[int, str]], Counter[str]]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A hundred thousand recoveries are not for the log."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_part(first: int) -> Found:
    """Seeds first .. first + PART: those that failed, and how often what happened."""
    logging.disable(logging.CRITICAL)
    failed: list[tuple[int, str]] = []
    counts: Counter[str] = Counter()
    for seed in range(first, first + PART):
        try:
            sim, server = simulate(seed), restart(seed)
        except Exception as e:
            failed.append((seed, f"{type(e).__name__}: {e}"))
            continue
        counts += sim.counts + server.counts
        counts["requests"] += len(sim.client.answers)
        counts["tokens"] += sum(len(answer.tokens) for answer in sim.client.answers.values())
        counts["engines that gave up"] += isinstance(sim, Simulation) and sim.dead is not None
    return failed, counts


def test_a_seed_is_replayed(one_seed: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    """With --seed it is the only test that runs."""
    found: Violation | None = None
    for run in (simulate, restart):
        try:
            told = history(run(0 if one_seed is None else one_seed))  # type: ignore[operator]
        except Violation as e:
            found, told = e, "\n".join(e.__notes__)
        if one_seed is not None:
            with capsys.disabled():
                print(f"\n{told}")
    assert found is None, f"{found}"


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(ALL_SEEDS, marks=pytest.mark.long)], ids=len)
def test_no_fault_loses_repeats_or_changes_anything(seeds: range) -> None:
    began = time.monotonic()
    failed: list[tuple[int, str]] = []
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for more, what in pool.map(run_part, seeds[::PART]):
            failed += more
            counts += what
    seconds = time.monotonic() - began
    print(f"\n{seeds} in {seconds:.0f} s ({len(seeds) / seconds:.0f} per second): {dict(sorted(counts.items()))}")
    lines = [f"pytest tests/sim --seed {seed}    # {why}" for seed, why in failed[:10]]
    assert not failed, f"{len(failed)} of {len(seeds)} seeds fail:\n" + "\n".join(lines)
    kinds = (
        "kill", "stop", "cut", "hang", "slow", "exception", "reply lost", "ghosts", "launch dies", "convicted",
        "device leaves", "node leaves", "node will leave", "device is bad", "shrunk", "grown", "layouts",
        "engines lost", "moved", "resizes", "told to end", "said twice", "said too late", "said for nothing",
        "ranks lost", "several lanes", "pauses", "steps with an empty lane", "steps with a held lane",
        "steps with a lane that only reads", "steps prepared", "steps prepared aside", "steps committed",
        "rearrangements", "experts moved", "departures", "lost between prepare and commit", "lost in a commit",
        "context ranks", "prefill context ranks", "KV kept", "KV adopted", "KV cut anew", "KV cut anew by tokens",
        "blocks found scribbled over",
        "blocks saved", "blocks brought back", "blocks found damaged", "loads given up", "disk: slow",
        "fleets of two kinds", "prompts handed over", "blocks from another engine",
        "adapters put", "LoadLora", "UnloadLora", "responses", "responses refused", "server: kill", "server: shutdown",
        "server: kill in a call", "server: power", "server: power in a call", "journal: disk fails",
        "journal: disk hangs",
    )  # fmt: skip
    for kind in kinds:
        assert counts[kind] > len(seeds) // 1000, f"there was next to no {kind}"


def test_a_seed_runs_the_same_way_each_time() -> None:
    for seed in range(10):
        for run in (simulate, restart):
            first, second = run(seed), run(seed)  # type: ignore[operator]
            assert history(first) == history(second) and first.counts == second.counts


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mistakes_are_found(mutation: Mutation) -> None:
    with mutation.apply():
        for seed in [*range(mutation.soon, mutation.soon + NEAR), *range(ENOUGH)]:
            try:
                mutation.run(seed)
            except Violation as e:
                print(f"{mutation.name}: seed {seed}, {e}")
                assert e.rule in mutation.rules, f"seed {seed} breaks another rule: {e}"
                return
    pytest.fail(f"{mutation.name}: nothing noticed in {ENOUGH} seeds")


def test_what_is_simulated_is_the_shipping_code() -> None:
    """Nothing here decides anything: processes, links and time are simulated, and no more."""
    taken = {
        "EngineCore", "Lane", "BringUp", "ReplyLedger", "Gang", "EngineLoop", "Health", "Pace", "Quarantine", "Router",
        "Fleet", "Resizer", "Dispatcher", "EngineKeeper", "Engine", "Stream", "Service", "FaultLog",
        "Reformations", "ResponseStore", "ResponseRun", "Journal", "JournalFiles", "WriteQueue", "Kept", "Followed",
    }  # fmt: skip
    words = ("scheduler", "gang", "router", "quarantine", "replyledger", "bringup", "core", "health", "pace", "journal")
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & taken, f"{path.name}: {node.name} is a {bases & taken} of its own"
                assert not any(word in node.name.lower() for word in words), f"{path.name} defines {node.name}"
    one, fleet, server = simulate(0), simulate(FLEETS - 1), restart(0)
    assert isinstance(one, Simulation) and isinstance(fleet, Deployment)
    member = fleet.fleet.members[0]
    core = fleet.remotes[0].core
    parts = [
        one.loop, one.loop.gang, one.loop.gang.ledger, one.loop.gang.watch.health, one.loop.gang.watch.pace,
        one.loop.layout_change, one.loop.epochs, one.loop.epochs.limit,
        fleet.fleet, fleet.fleet.dispatcher.router, fleet.fleet.resizer, fleet.service, fleet.service.faults, member,
        fleet.fleet.dispatcher, member.engine, member.engine.quarantine, member.limit, core, server.service,
        server.store, server.store.journal, server.store.journal.files, server.store.journal.queue,
    ]  # fmt: skip
    for part in parts:
        assert type(part).__module__.startswith("planaria."), part
