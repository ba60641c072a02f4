"""Several models behind one port: which is meant, which are loaded, who waits and who makes room. Engines are fake."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from planaria import SharedWeights
from planaria.errors import CapacityError, ModelError
from planaria.server import models
from planaria.server.config import ServerConfig
from planaria.server.front import Front, front_app
from planaria.server.models import ModelTable, ServedModel
from planaria.server.residence import Residence
from planaria.server.serve import run
from planaria.server.service import Service
from planaria.wire import Dead
from tests.api.conftest import Running
from tests.api.fake_engine import FakeEngine

C = "/v1/completions"


class FakeResidence:
    """loads: how often; memory: bytes that it keeps, also unloaded; goes: cleared, loading takes until it is set."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.there, self.busy = engine, False, False
        self.loads, self.memory = 0, 0
        self.fails: Exception | None = None
        self.goes = asyncio.Event()
        self.goes.set()
        scheduler = SimpleNamespace(max_model_len=512)
        config = SimpleNamespace(scheduler=scheduler)
        self.fleet = SimpleNamespace(members={0: None}, share_out=lambda size: None, config=config, report=self._report)

    async def _report(self):
        return []

    async def load(self) -> None:
        assert not self.there
        await self.goes.wait()
        if self.fails is not None:
            raise self.fails
        self.engine.dead, self.engine.facts = None, self.engine._facts
        self.there, self.loads, self.memory = True, self.loads + 1, 100

    async def unload(self) -> None:
        assert self.there and not self.engine.open
        self.there = False

    @property
    def num_bytes(self) -> int:
        return self.memory

    async def drop(self, *, weights: bool) -> None:
        self.memory = 0 if weights else self.memory // 2


class Several:
    """A running server of models a, b and c."""

    def __init__(self, tokenizer, most: int, host_memory: int, idle_limit: float | None, **options) -> None:
        self.engines = {name: FakeEngine(tokenizer) for name in "abc"}
        self.homes = {name: FakeResidence(engine) for name, engine in self.engines.items()}
        found = []
        for name, engine in self.engines.items():
            engine.facts = None
            service = Service(engine, tokenizer, ServerConfig(port=0, served_model_names=(name,), **options))
            found.append(ServedModel(service, self.homes[name]))
        self.table = ModelTable(found, most, host_memory, idle_limit)
        self.models = dict(zip("abc", found, strict=True))
        self.front = Front(found[0].service.config, self.table)

    @property
    def loaded(self) -> list[str]:
        return [name for name, home in self.homes.items() if home.there]

    def open(self, *names: str) -> bool:
        """Is something computed in each?"""
        return all(self.engines[name].open for name in names)


@contextlib.asynccontextmanager
async def serving(tokenizer, most: int = 1, host_memory: int = 0, idle_limit: float | None = None, **options):
    several = Several(tokenizer, most, host_memory, idle_limit, **options)
    config = several.front.config
    server = Running(None, config)
    server.task = asyncio.create_task(
        run(front_app(several.front), several.front, sock=server.sock, signals=False, stop=server.stop,
            announce=lambda line: server.line.set_result(line))
    )  # fmt: skip
    try:
        async with asyncio.timeout(60), server.http() as http:
            await asyncio.wait({server.line, server.task}, return_when=asyncio.FIRST_COMPLETED)
            yield several, http, server
    finally:
        for home in several.homes.values():
            home.goes.set()
        for engine in several.engines.values():
            engine.gate.set()
        server.stop.set()
        with contextlib.suppress(Exception):
            await server.exit_code()
        await several.front.shut()
        for engine in several.engines.values():
            await engine.close()


def asked(model, **more):
    return {"model": model, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True, **more}


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def test_the_model_that_is_named_answers_and_is_loaded_for_it(tokenizer):
    async with serving(tokenizer) as (several, http, server):
        assert (await server.line).startswith("Planaria serving a,b,c at ") and several.loaded == ["a"]
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("a", 512), ("b", 512), ("c", 512)]
        assert (await http.get("/v1/models/b")).json()["id"] == "b"
        for name in "bcab":
            answer = await http.post(C, json=asked(name))
            assert answer.status_code == 200 and answer.json()["model"] == name
            assert several.loaded == [name] and several.engines[name].submitted
        assert (await http.post(C, json=asked(None))).json()["model"] == "a"  # the first
        assert {name: home.loads for name, home in several.homes.items()} == {"a": 3, "b": 2, "c": 1}
        unknown = await http.post(C, json=asked("d"))
        assert unknown.status_code == 404 and "there is: a, b, c" in unknown.text
        text = (await http.get("/metrics")).text
        assert text.count("# TYPE vllm:generation_tokens_total") == 1
        for name, count in (("a", 8), ("b", 8), ("c", 4)):
            assert f'vllm:generation_tokens_total{{model_name="{name}"}} {count}.0' in text
        assert 'planaria:model_loaded{model_name="a"} 1.0' in text


async def test_what_is_refused_loads_nothing_and_makes_nobody_leave(tokenizer):
    async with serving(tokenizer) as (several, http, _):
        assert (await http.post(C, json=asked("b"))).status_code == 200
        assert (await http.post(C, json=asked("a"))).status_code == 200
        before = {name: home.loads for name, home in several.homes.items()}
        for body in (asked("b", temperature=-1), asked("b", max_tokens=9999), asked("b", nonsense=1), asked(5)):
            assert (await http.post(C, json=body)).status_code == 400
        assert (await http.post(C, content=b'{"model": "b"')).status_code == 400
        assert (await http.post("/tokenize", json={"model": "b", "prompt": "x"})).status_code == 200
        assert {name: home.loads for name, home in several.homes.items()} == before and several.loaded == ["a"]


async def test_what_was_used_longest_ago_makes_room(tokenizer):
    async with serving(tokenizer, most=2) as (several, http, _):
        assert several.loaded == ["a", "b"]
        await http.post(C, json=asked("a"))
        await http.post(C, json=asked("c"))
        assert several.loaded == ["a", "c"]
        await http.post(C, json=asked("b"))
        assert several.loaded == ["b", "c"]


async def test_what_is_busy_stays_until_it_has_ended(tokenizer, monkeypatch):
    """Once somebody has waited for long it gets no new requests: they wait, too, and all are answered."""
    monkeypatch.setattr(models, "TURN", 0.0)
    async with serving(tokenizer) as (several, http, _):
        several.engines["a"].gate.clear()
        first = asyncio.create_task(http.post(C, json=asked("a")))
        await until(lambda: several.open("a"))
        other = asyncio.create_task(http.post(C, json=asked("b")))
        await until(lambda: several.table.closing is several.models["a"])
        late = asyncio.create_task(http.post(C, json=asked("a")))
        await until(lambda: several.models["a"].waiting)
        assert several.loaded == ["a"] and len(several.engines["a"].open) == 1 and not first.done()
        refused = await http.post("/admin/models/unload", params={"model": "a"})
        assert refused.status_code == 409 and "it has 1 requests" in refused.text
        several.engines["a"].gate.set()
        answers = await asyncio.gather(first, other, late)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert (several.homes["a"].loads, several.homes["b"].loads) == (2, 1)


async def test_a_busy_model_keeps_its_turn(tokenizer):
    """For a while after it was loaded it gets new requests, though others wait."""
    async with serving(tokenizer) as (several, http, _):
        several.engines["a"].gate.clear()
        first = asyncio.create_task(http.post(C, json=asked("a")))
        await until(lambda: several.open("a"))
        other = asyncio.create_task(http.post(C, json=asked("b")))
        await until(lambda: several.models["b"].waiting)
        second = asyncio.create_task(http.post(C, json=asked("a")))
        await until(lambda: len(several.engines["a"].open) == 2)
        several.engines["a"].gate.set()
        assert [a.status_code for a in await asyncio.gather(first, second, other)] == [200] * 3


async def test_who_waits_in_vain_hears_why(tokenizer, monkeypatch):
    async with serving(tokenizer) as (several, http, _):
        several.engines["a"].gate.clear()
        first = asyncio.create_task(http.post(C, json=asked("a")))
        await until(lambda: several.open("a"))
        monkeypatch.setattr(models, "PATIENCE", 0.05)
        answer = await http.post(C, json=asked("b", stream=True))
        assert answer.status_code == 503 and "there is: a (loaded, 1 requests)" in answer.text
        monkeypatch.setattr(models, "MAX_WAITING", 0)
        answer = await http.post(C, json=asked("b"))
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "overloaded"
        several.engines["a"].gate.set()
        assert (await first).status_code == 200 and not several.homes["b"].loads


async def test_a_client_that_leaves_waits_no_more(tokenizer):
    async with serving(tokenizer) as (several, http, _):
        await http.post(C, json=asked("b"))
        several.engines["b"].gate.clear()
        first = asyncio.create_task(http.post(C, json=asked("b")))
        await until(lambda: several.open("b"))
        for name in "ac":  # one whose requests can be checked, and one that was never loaded
            other = asyncio.create_task(http.post(C, json=asked(name)))
            await until(lambda name=name: several.models[name].waiting)
            other.cancel()
            await until(lambda name=name: not several.models[name].waiting and not several.models[name].service.open)
        several.engines["b"].gate.set()
        assert (await first).status_code == 200
        assert several.loaded == ["b"] and several.homes["a"].loads == 1 and not several.homes["c"].loads


async def test_a_model_that_cant_be_loaded_is_nobody_elses_matter(tokenizer, monkeypatch):
    async with serving(tokenizer) as (several, http, _):
        several.homes["b"].fails = CapacityError("no room for its KV")
        answer = await http.post(C, json=asked("b"))
        assert answer.status_code == 503 and "model 'b' can't be loaded: no room for its KV" in answer.text
        several.homes["b"].fails = None
        assert (await http.post(C, json=asked("b"))).status_code == 503  # it is tried again after a pause
        assert (await http.post(C, json=asked("a"))).status_code == 200
        health = await http.get("/health")
        states = [model["state"] for model in health.json()["models"]]
        assert health.status_code == 200 and states == ["loaded", "failed", "unloaded"]
        several.models["b"].pause.at = 0.0
        assert (await http.post(C, json=asked("b"))).status_code == 200


async def test_clients_hear_no_paths_of_a_model_that_cant_be_loaded(tokenizer, caplog):
    async with serving(tokenizer) as (several, http, _):
        several.homes["b"].fails = ModelError("/secret/b: no weights")
        for _ in range(2):  # who waits for it, and who comes after
            answer = await http.post(C, json=asked("b"))
            assert answer.status_code == 503 and "model 'b' can't be loaded" in answer.text
            assert "/secret" not in answer.text
        assert "/secret" not in (await http.get("/health")).text
        assert "/secret" in (await http.get("/admin/models")).text and "/secret" in caplog.text


async def test_a_model_whose_engines_die_is_loaded_anew(tokenizer):
    async with serving(tokenizer, most=2) as (several, http, server):
        for name in "ab":
            several.engines[name].gate.clear()
        tasks = [asyncio.create_task(http.post(C, json=asked(name))) for name in "ab"]
        await until(lambda: several.open("a", "b"))
        several.engines["a"].dead, several.homes["a"].there = Dead("error", "it broke"), False
        answer = await tasks[0]
        assert answer.status_code == 500 and "the engine of model 'a' has ended: it broke" in answer.text
        several.engines["b"].gate.set()
        assert (await tasks[1]).status_code == 200 and not server.task.done()
        assert (await http.post(C, json=asked("a"))).status_code == 503
        several.models["a"].pause.at = 0.0
        several.engines["a"].gate.set()
        assert (await http.post(C, json=asked("a"))).status_code == 200


async def test_who_waits_for_a_long_load_hears_that_it_is_on(tokenizer, monkeypatch):
    monkeypatch.setattr(models, "PATIENCE", 0.05)
    async with serving(tokenizer) as (several, http, _):
        several.homes["b"].goes.clear()
        answer = await http.post(C, json=asked("b"))
        assert answer.status_code == 503 and "is still being loaded" in answer.text
        several.homes["b"].goes.set()
        await until(lambda: several.models["b"].state == models.LOADED)


async def test_a_first_model_that_cant_be_loaded_ends_the_server(tokenizer, monkeypatch, caplog):
    async def fails(self) -> None:
        raise CapacityError("no room")

    monkeypatch.setattr(FakeResidence, "load", fails)
    async with serving(tokenizer) as (_, _, server):
        with pytest.raises(CapacityError, match="no room"):
            await server.task
        assert "model 'a' can't be loaded: no room" in caplog.text


async def test_what_unloaded_models_keep_is_bounded(tokenizer):
    """KV goes first, and of what was used longest ago; what is about to be loaded doesn't count."""
    async with serving(tokenizer, host_memory=160) as (several, http, _):
        for name in "bc":
            await http.post(C, json=asked(name))
        assert [several.homes[name].memory for name in "abc"] == [50, 100, 100]
        await http.post(C, json=asked("a"))
        assert [several.homes[name].memory for name in "bc"] == [50, 100]


async def test_what_a_failed_model_keeps_is_bounded_too(tokenizer):
    async with serving(tokenizer, host_memory=100) as (several, http, _):
        await http.post(C, json=asked("b"))
        assert [several.homes[name].memory for name in "ab"] == [100, 100]
        several.homes["a"].fails = CapacityError("no room")
        assert (await http.post(C, json=asked("a"))).status_code == 503
        assert [several.homes[name].memory for name in "ab"] == [50, 50]


async def test_what_is_idle_for_long_is_unloaded_and_comes_back(tokenizer):
    async with serving(tokenizer, most=2, idle_limit=0.0) as (several, http, _):
        several.engines["a"].gate.clear()
        first = asyncio.create_task(http.post(C, json=asked("a")))
        await until(lambda: several.open("a") and several.loaded == ["a"])  # not what computes
        several.engines["a"].gate.set()
        assert (await first).status_code == 200
        await until(lambda: several.loaded == [])
        assert (await http.get("/health")).status_code == 200
        assert (await http.post(C, json=asked("b"))).status_code == 200


async def test_who_has_waited_longest_is_loaded_first(tokenizer):
    async with serving(tokenizer) as (several, http, _):
        for name in "bca":
            await http.post(C, json=asked(name))
        several.engines["a"].gate.clear()
        tasks = [asyncio.create_task(http.post(C, json=asked("a")))]
        await until(lambda: several.open("a"))
        for name in "cb":
            tasks.append(asyncio.create_task(http.post(C, json=asked(name))))
            await until(lambda name=name: several.models[name].waiting)
        several.engines["a"].gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
        assert several.loaded == ["b"]


async def test_neither_of_two_that_are_always_wanted_starves(tokenizer, monkeypatch):
    monkeypatch.setattr(models, "TURN", 0.0)

    async def client(http, name: str) -> None:
        for _ in range(4):
            assert (await http.post(C, json=asked(name))).status_code == 200

    async with serving(tokenizer) as (several, http, _):
        async with asyncio.TaskGroup() as group:
            for name in "aaabbb":
                group.create_task(client(http, name))
        assert [len(several.engines[name].submitted) for name in "ab"] == [12, 12]


async def test_an_operator_needs_no_patience_with_a_model_that_failed(tokenizer):
    async with serving(tokenizer) as (several, http, _):
        several.homes["b"].fails = CapacityError("no room")
        assert (await http.post(C, json=asked("b"))).status_code == 503
        several.homes["b"].fails = None
        assert (await http.post("/admin/models/load?model=b")).json()["state"] == "loaded"


async def test_the_dashboard_shows_one_model_and_how_all_are(tokenizer):
    async with serving(tokenizer) as (_, http, _server):
        await http.post(C, json=asked("b"))
        for query, name in (("", "a"), ("?model=b", "b")):
            shown = (await http.get("/admin/dashboard" + query)).json()
            assert shown["models"] == [name] and shown["requests"] == 1
            assert [model["state"] for model in shown["served"]] == ["unloaded", "loaded", "unloaded"]
        assert (await http.get("/admin/dashboard?model=d")).status_code == 404
        listing = (await http.get("/admin/processes")).json()
        assert listing["model"] == "a (unloaded), b (loaded), c (unloaded)"


async def test_what_names_no_model_is_the_firsts_to_refuse(tokenizer):
    async with serving(tokenizer) as (_, http, _server):
        assert (await http.post("/nope")).status_code == 404
        for method, path in (("PUT", C), ("DELETE", "/v1/models/a")):
            assert (await http.request(method, path, content=b"{")).status_code == 405
        answer = await http.post("/v1/messages", json={"model": "d", "max_tokens": 1, "messages": []})
        assert answer.status_code == 404 and answer.json()["type"] == "error"  # in Anthropic's form


async def test_admin_routes_say_which_model(tokenizer):
    async with serving(tokenizer, admin_key="secret") as (several, http, _):
        key = {"Authorization": "Bearer secret"}
        for path in ("/admin/models/load?model=b", "/sleep?model=b", "/admin/models/unload?model=b"):
            assert (await http.post(path)).status_code == 401
        assert (await http.post("/sleep", headers=key)).status_code == 400
        answer = await http.post("/scale_elastic_ep?model=b", headers=key, json={"new_data_parallel_size": 2})
        assert answer.status_code == 409 and "is unloaded" in answer.text
        for path in ("/sleep?model=b", "/wake_up?model=c", "/v1/load_lora_adapter?model=c"):
            answer = await http.post(path, headers=key, json={"lora_name": "x", "lora_path": "/x"})
            assert answer.status_code == 409 and "/admin/models/load" in answer.text
        answer = await http.post("/admin/models/load?model=b", headers=key)
        assert answer.status_code == 200 and several.loaded == ["b"]
        assert (await http.post("/admin/models/unload?model=b", headers=key)).json()["state"] == "unloaded"
        assert several.loaded == [] and (await http.get("/health")).status_code == 200
        states = (await http.get("/admin/models", headers=key)).json()["models"]
        assert [(model["model"], model["state"], model["loads"]) for model in states] == [
            ("a", "unloaded", 1), ("b", "unloaded", 1), ("c", "unloaded", 0),
        ]  # fmt: skip


async def test_a_stop_answers_who_waits(tokenizer):
    async with serving(tokenizer, shutdown_timeout=0.0) as (several, http, server):
        several.homes["b"].goes.clear()
        waiting = asyncio.create_task(http.post(C, json=asked("b")))
        await until(lambda: several.models["b"].waiting)
        server.stop.set()
        answer = await waiting
        assert answer.status_code == 503
        several.homes["b"].goes.set()
        assert await server.exit_code() == 0


async def test_stored_responses_are_their_models(tokenizer):
    async with serving(tokenizer) as (several, http, _):
        body = {"model": "b", "input": "Hello", "max_output_tokens": 8, "background": True, "store": True}
        answer = (await http.post("/v1/responses", json=body)).json()
        await until(lambda: not several.models["b"].service.runs)
        assert (await http.get(f"/v1/responses/{answer['id']}")).json()["model"] == "b"
        assert (await http.get("/v1/responses/resp_" + "0" * 32)).status_code == 404
        more = {"input": "More", "max_output_tokens": 4, "previous_response_id": answer["id"]}
        assert (await http.post("/v1/responses", json=more)).json()["model"] == "b"
        assert several.front.idle.is_set()


def test_tensors_that_a_model_was_given_are_memory_that_it_keeps():
    fleet = SimpleNamespace(weights=None, members={}, shared_weights=None)
    residence = Residence(fleet)
    assert residence.num_bytes == 0
    with SharedWeights({"w": np.zeros(1 << 20, np.uint8)}) as fleet.shared_weights:
        assert 1 << 20 <= residence.num_bytes < 16 << 20
