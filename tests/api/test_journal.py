"""`--journal`: what a server writes, and what another makes of it. A death is a copy of the folder at some moment: what
is written outlives every process."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import openai
import pytest

from planaria.errors import ConfigError
from planaria.server import journal as files
from planaria.server import kept, response_passing
from planaria.server.journal import Journal
from planaria.server.journal_files import JournalFiles
from planaria.server.journal_queue import Op
from planaria.server.records import Again, PieceRecord, frame, scan
from tests.api.fake_engine import FakeEngine
from tests.api.test_responses import GREEDY, R, follow, said, strict

MORE: dict[str, Any] = {"max_output_tokens": 20, "extra_body": {"ignore_eos": True}}


async def begin(server: Any, text: str = "Hello", **more: Any) -> str:
    answer = await server.client().responses.create(
        **{"model": "smollm2", "input": text, "background": True, **MORE, **more}
    )
    found: str = answer.id
    return found


def timeless(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without when it ended, and what the engine of then had in its prefix cache."""
    found = []
    for event in events:
        if "response" in event:
            event = event | {"response": {**event["response"], "completed_at": None}}
            if event["response"]["usage"] is not None:
                event["response"]["usage"] = {**event["response"]["usage"], "input_tokens_details": None}
        found.append(event)
    return found


async def at_death(server: Any, copy: Path, count: int) -> Path:
    """What a death leaves when each of what is open has had so many more tokens."""
    await server.engine.until(lambda: server.engine.open)
    for _ in range(count):
        server.engine.step()
    store = server.engine.store
    async with asyncio.timeout(60):
        while any(entry.kept.told < entry.kept.count for entry in store.known.values()):
            await asyncio.sleep(0.002)
    return Path(shutil.copytree(server.config.journal, copy))


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine knows the store of the server that uses it."""
    from planaria.server.response_store import ResponseStore

    init = ResponseStore.__init__

    def made(self: Any, service: Any, *given: Any, **more: Any) -> None:
        init(self, service, *given, **more)
        service.client.store = self

    monkeypatch.setattr(ResponseStore, "__init__", made)


@pytest.fixture
def engine(tokenizer: Any, stores: None) -> Any:
    """engine(): one that waits."""

    def make(**facts: Any) -> FakeEngine:
        one = FakeEngine(tokenizer, **facts)
        one.gate.clear()
        return one

    return make


@pytest.mark.parametrize("steps", [0, 7])
async def test_what_runs_goes_on_in_another_server(start, engine, tmp_path, steps):
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        ids = [await begin(server, temperature=0), await begin(server, temperature=0.9), await begin(server, "World")]
        await server.engine.until(lambda: len(server.engine.open) == 3)
        copy = await at_death(server, tmp_path / "b", steps)
        server.engine.gate.set()
        expected = [await follow(server.client(), id) for id in ids]
    async with start(engine(), journal=str(copy)) as server:
        found = []
        for number, id in enumerate(ids):
            before = expected[number][: 3 + steps]  # what its client had when the server died
            server.engine.gate.set()
            found.append(before + await follow(server.client(), id, before[-1]["sequence_number"]))
        assert [timeless(events) for events in found] == [timeless(events) for events in expected]
        outputs = sorted(len(sent.output) for sent in server.engine.submitted)
        assert outputs == [steps] * 3  # nothing is drawn anew
        for id, events in zip(ids, expected, strict=True):
            assert (await server.client().responses.retrieve(id)).output_text == said(events)


async def test_what_is_over_can_still_be_asked_for(start, engine, tmp_path):
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        server.engine.gate.set()
        client = server.client()
        plain = await client.responses.create(**GREEDY, input="Hello", **MORE)
        quiet = await client.responses.create(**GREEDY, input="Hello", store=False, **MORE)
        background = await begin(server)
        events = await follow(client, background)
        gone = await begin(server)
        await follow(client, gone)
        await client.responses.delete(gone)
    names = sorted(os.listdir(tmp_path / "a"))
    assert names == sorted(f"{id}.v1" for id in (plain.id, background))  # nothing of what was deleted, or not stored
    assert {stat.S_IMODE((tmp_path / "a" / name).stat().st_mode) for name in names} == {0o600}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        client = server.client()
        assert strict(await client.responses.retrieve(plain.id)) == strict(plain)
        assert await follow(client, background) == events
        server.engine.gate.set()
        more = await client.responses.create(**GREEDY, input="And?", previous_response_id=plain.id, **MORE)
        assert more.status == "incomplete" and len(server.engine.submitted) == 1
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(quiet.id)


async def test_one_that_has_ended_keeps_no_tokens_on_disk(start, engine, tmp_path):
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        id = await begin(server)
        await at_death(server, tmp_path / "b", 5)
        long = (tmp_path / "b" / f"{id}.v1").read_bytes()
        server.engine.gate.set()
        await follow(server.client(), id)
    records, _ = scan((tmp_path / "a" / f"{id}.v1").read_bytes())
    assert [type(record).__name__ for record in records] == ["Head", "Whole"] and records[0].submit is None
    found, _ = scan(long)
    assert [type(record).__name__ for record in found] == ["Head"] + ["PieceRecord"] * 5
    found.append(PieceRecord([1], "", records[1].end))  # it ends, and then the server dies
    (tmp_path / "b" / f"{id}.v1").write_bytes(b"".join(map(frame, found)))
    async with start(engine(), journal=str(tmp_path / "b")):
        pass
    records, _ = scan((tmp_path / "b" / f"{id}.v1").read_bytes())
    assert [type(record).__name__ for record in records] == ["Head", "Whole"] and records[0].submit is None


async def test_torn_tails_and_strange_files(start, engine, tmp_path, caplog):
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        ids = [await begin(server, temperature=0) for _ in range(3)]
        await server.engine.until(lambda: len(server.engine.open) == 3)
        copy = await at_death(server, tmp_path / "b", 6)
        server.engine.gate.set()
        expected = [await follow(server.client(), id) for id in ids]
    torn, whole, headless = (copy / f"{id}.v1" for id in ids)
    torn.write_bytes(torn.read_bytes()[:-3])
    headless.write_bytes(headless.read_bytes()[:40])
    (copy / "notes").write_text("mine")
    (copy / f"{ids[0]}.v2").write_text("of another version")
    (copy / f"{ids[1]}.v1.new").write_text("half")
    async with start(engine(), journal=str(copy)) as server:
        await server.engine.until(lambda: len(server.engine.open) == 2)
        assert {len(sent.output) for sent in server.engine.submitted} == {5, 6}
        assert not headless.exists() and not (copy / f"{ids[1]}.v1.new").exists()
        assert (copy / "notes").exists() and (copy / f"{ids[0]}.v2").exists()
        server.engine.gate.set()
        for id, events in list(zip(ids, expected, strict=True))[:2]:
            assert timeless(await follow(server.client(), id)) == timeless(events)
        with pytest.raises(openai.NotFoundError):
            await server.client().responses.retrieve(ids[2])
    assert "no whole record" in caplog.text and whole.exists()


async def test_what_another_server_can_not_go_on_with(start, engine, tmp_path, monkeypatch):
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        id = await begin(server)
        await at_death(server, tmp_path / "b", 3)
    for changes, words in (({"model": "other"}, "another model"), ({"max_model_len": 30}, "has room for 30 tokens")):
        copy = str(shutil.copytree(tmp_path / "b", tmp_path / words[:4]))
        async with start(engine(**changes), journal=copy) as server:
            await follow(server.client(), id)
            answer = await server.client().responses.retrieve(id)
            assert answer.status == "failed" and words in answer.error.message and not server.engine.submitted
    monkeypatch.setattr(kept, "MAX_AGAIN", 2)
    for number in range(3):
        async with start(engine(), journal=str(tmp_path / "b")) as server:
            if number == 2:
                await follow(server.client(), id)
                assert not server.engine.submitted
            else:
                await server.engine.until(lambda: server.engine.open)
            answer = await server.client().responses.retrieve(id)
    assert answer.status == "failed" and "again and again" in answer.error.message


async def test_a_shutdown_sets_aside_what_runs(start, engine, tmp_path):
    async with start(engine(), journal=str(tmp_path / "a"), shutdown_timeout=60) as server:
        id = await begin(server)
        await server.engine.until(lambda: server.engine.open)
        server.engine.step()
        server.stop.set()
        assert await server.exit_code() == 0  # though it has not ended
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        server.engine.gate.set()
        assert (await follow(server.client(), id))[-1]["type"] == "response.incomplete"
        assert [len(sent.output) for sent in server.engine.submitted] == [1]


async def test_what_came_while_another_server_had_the_journal_is_in_it_when_it_is_back(start, engine, tmp_path):
    """One that was to take this server's place ended; then this one does."""
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        store, client = server.engine.store, server.client()
        before = await begin(server)
        await server.engine.until(lambda: server.engine.open)
        deleted = await client.responses.create(**GREEDY, input="Hello", **MORE, background=True)
        told: list[str] = []
        assert await response_passing.lend(store, lambda entry: None, told.append)
        await client.responses.delete(deleted.id)
        assert told == [deleted.id]
        await server.engine.until(lambda: len(server.engine.open) == 1)
        later = await begin(server)
        await server.engine.until(lambda: len(server.engine.open) == 2)
        server.engine.gate.set()
        ended = await client.responses.create(**GREEDY, input="Hello", **MORE)
        for id in (before, later):
            await follow(client, id)
        server.engine.gate.clear()
        running = await begin(server)
        await server.engine.until(lambda: server.engine.open)
        assert response_passing.take_back(store)
        async with asyncio.timeout(60):
            while not store.journal._settled():
                await asyncio.sleep(0.002)
        copy = await at_death(server, tmp_path / "b", 1)
        server.engine.gate.set()
    async with start(engine(), journal=str(copy)) as server:
        client = server.client()
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(deleted.id)
        for id in (before, later, ended.id):
            assert (await client.responses.retrieve(id)).status == "incomplete"
        server.engine.gate.set()
        assert (await follow(client, running))[-1]["type"] == "response.incomplete"
        assert [len(sent.output) for sent in server.engine.submitted] == [1]


async def test_what_is_deleted_in_one_server_is_gone_in_the_other(start, engine):
    """While one takes the other's place, whichever is asked."""
    async with start(engine()) as first, start(engine()) as second:
        stores = [server.engine.store for server in (first, second)]

        def withdraw(id: str, why: str) -> None:
            response_passing.withdraw(stores[0], id, why)

        def bring(entry: Any) -> None:
            response_passing.bring(stores[1], scan(entry.kept.file())[0], withdraw)

        assert await response_passing.lend(stores[0], bring, lambda id: response_passing.forget(stores[1], id))
        for asked, number in ((first, 1), (second, 2)):
            id = await begin(first)
            await first.engine.until(lambda: first.engine.open)
            assert all(id in store.known for store in stores)
            await asked.client().responses.delete(id)
            await first.engine.until(lambda: not first.engine.open)
            async with asyncio.timeout(60):
                while stores[0].service.requests:  # until it has ended where it ran
                    await asyncio.sleep(0.002)
            assert len(first.engine.cancelled) == number
            for server in (first, second):
                with pytest.raises(openai.NotFoundError):
                    await server.client().responses.retrieve(id)


async def test_without_a_journal_a_shutdown_waits(start, engine):
    async with start(engine(), shutdown_timeout=60) as server:
        await begin(server)
        await server.engine.until(lambda: server.engine.open)
        server.stop.set()
        server.engine.gate.set()
        assert await server.exit_code() == 0 and not server.engine.cancelled


async def test_the_death_of_all_engines_sets_it_aside(start, engine, tmp_path):
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        id = await begin(server)
        await server.engine.until(lambda: server.engine.open)
        server.engine.step()
        server.engine.die()
        assert await server.exit_code() == 1
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        assert (await server.client().responses.retrieve(id)).status == "in_progress"


async def test_an_idempotency_key_outlives_the_server(start, engine, tmp_path):
    body = {"model": "smollm2", "input": "Hello", "background": True, "max_output_tokens": 4, "ignore_eos": True}
    key = {"Idempotency-Key": "k"}
    async with start(engine(), journal=str(tmp_path / "a")) as server, server.http() as http:
        first = await http.post(R, json=body, headers=key)
        await at_death(server, tmp_path / "b", 1)
    async with start(engine(), journal=str(tmp_path / "b")) as server, server.http() as http:
        other = await http.post(R, json={**body, "input": "x"}, headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        again = await http.post(R, json=body, headers=key)
        assert again.json()["id"] == first.json()["id"] and again.headers["idempotent-replayed"] == "true"
        server.engine.gate.set()
        await follow(server.client(), first.json()["id"])
        assert len(server.engine.submitted) == 1


@pytest.mark.parametrize("call", ["write", "fsync"])
async def test_a_disk_that_fails(start, engine, tmp_path, monkeypatch, call):
    monkeypatch.setattr(files, "RETRY", 0.01)
    full = False
    inner = getattr(os, call)

    def fails(*args: Any) -> Any:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return inner(*args)

    monkeypatch.setattr(os, call, fails)
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        client = server.client()
        id = await begin(server)
        await at_death(server, tmp_path / "b", 2)
        full = True
        server.engine.gate.set()
        with pytest.raises(openai.InternalServerError, match="No space left") as e:
            await begin(server)
        assert e.value.code == "journal_failed"
        events = await follow(client, id)  # what runs goes on
        assert events[-1]["type"] == "response.incomplete"
        plain = await client.responses.create(**GREEDY, input="x", max_output_tokens=2)  # and all else
        await client.completions.create(model="smollm2", prompt="x", max_tokens=1)
        async with server.http() as http:
            metrics = (await http.get("/metrics")).text
        assert 'planaria:responses{model_name="smollm2",state="over"} 2.0' in metrics
        if call == "write":  # what a sync has lost may be written again by now
            assert 'planaria:journal_unwritten{model_name="smollm2"} 2.0' in metrics
        assert (await client.responses.retrieve(plain.id)).status == "incomplete"
        full = False
        async with asyncio.timeout(60):
            while server.engine.store.failing:
                await asyncio.sleep(0.005)
        await begin(server)
        shutil.copytree(tmp_path / "a", tmp_path / "c")
    async with start(engine(), journal=str(tmp_path / "c")) as server:
        assert await follow(server.client(), id) == events
        assert strict(await server.client().responses.retrieve(plain.id)) == strict(plain)


def test_what_was_half_written_is_undone(tmp_path, monkeypatch):
    one = JournalFiles(str(tmp_path / "a"))
    id = "resp_" + "0" * 32
    one.carry_out(Op("create", id, frame(Again())))
    inner, calls = os.write, []

    def half(fd: int, data: Any) -> int:
        if calls:
            raise OSError(errno.ENOSPC, "full")
        calls.append(1)
        return inner(fd, data[:3])

    monkeypatch.setattr(os, "write", half)
    record = frame(PieceRecord([1], "x"))
    with pytest.raises(OSError, match="full"):
        one.carry_out(Op("append", id, record, 1))
    monkeypatch.setattr(os, "write", inner)
    one.carry_out(Op("append", id, record, 1))
    assert (tmp_path / "a" / f"{id}.v1").read_bytes() == frame(Again()) + record


async def test_a_disk_that_does_not_answer(start, engine, tmp_path, monkeypatch):
    import threading

    hangs, inner = threading.Event(), os.write
    hangs.set()

    def write(fd: int, data: Any) -> int:
        hangs.wait(60)
        return inner(fd, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(files, "STUCK", 0.05)
    monkeypatch.setattr("planaria.server.response_store.WATCH", 0.02)
    async with start(engine(), journal=str(tmp_path / "a")) as server:
        try:
            id = await begin(server)
            await server.engine.until(lambda: server.engine.open)
            hangs.clear()
            server.engine.gate.set()
            assert (await follow(server.client(), id))[-1]["type"] == "response.incomplete"
            monkeypatch.setattr("planaria.server.response_store.ACCEPTED", 0.1)
            with pytest.raises(openai.InternalServerError, match="doesn't answer"):
                await begin(server)
        finally:
            hangs.set()


def test_a_disk_that_takes_nothing_is_no_place_for_a_journal(tmp_path, monkeypatch):
    """Else what is there could not be asked for, nor anything new be taken."""
    asyncio.run(Journal(str(tmp_path / "a")).close())
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # as of one that is mounted read-only
    with pytest.raises(ConfigError, match="can't be written"):
        Journal(str(tmp_path / "a"))


def test_one_server_has_a_journal_at_a_time(tmp_path):
    folder = tmp_path / "a"
    first = Journal(str(folder))
    with pytest.raises(ConfigError, match="used by a server that runs"):
        Journal(str(folder))
    asyncio.run(first.close())
    asyncio.run(Journal(str(folder)).close())
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="0700"):
        Journal(str(folder))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be used"):
        Journal(str(tmp_path / "file"))
