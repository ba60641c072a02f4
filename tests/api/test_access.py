"""ApiKeys, CORS, TLS, request ids, log lines."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import ssl
import subprocess

import httpx
import openai
import pytest

from planaria.errors import ConfigError
from planaria.server.app import create_app
from planaria.server.config import ServerConfig
from planaria.server.gate import ApiKeys
from tests.api.conftest import running
from tests.api.fake_engine import FakeEngine

C = "/v1/completions"
BODY = {"model": "smollm2", "prompt": "Hello", "max_tokens": 2}


async def test_api_keys(start):
    async with start(api_keys=("first-key", "second-key")) as server, server.http() as http:
        paths = [("GET", "/v1/models"), ("POST", C), ("POST", "/tokenize"), ("GET", "/openapi.json"), ("GET", "/x")]
        for method, path in paths:
            for header in (None, "Bearer", "Bearer wrong", "Bearer first-key2", "Basic first-key", "first-key"):
                headers = {"authorization": header} if header else {}
                answer = await http.request(method, path, headers=headers, json={})
                assert answer.status_code == 401, (path, header)
                error = answer.json()["error"]
                missing = "an API key is needed, and none was sent", "missing_api_key"
                wrong = "the key that was sent is not an API key of this server", "invalid_api_key"
                assert (error["message"].partition(":")[0], error["code"]) == (wrong if header else missing)
                assert error["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/metrics", "/version"):
            assert (await http.get(path)).status_code == 200
        for key in ("first-key", "second-key"):
            assert [m.id async for m in server.client(api_key=key).models.list()] == ["smollm2"]
        with pytest.raises(openai.AuthenticationError):
            await server.client(api_key="third").models.list()
        document = (await http.get("/openapi.json", headers={"authorization": "bearer first-key"})).json()
        page = await http.get("/docs", headers={"authorization": "bearer first-key"})
        assert page.status_code == 200 and "openapi.json" in page.text
        assert document["paths"][C]["post"]["security"] and "security" not in document["paths"]["/health"]["get"]


def test_keys_are_compared_whole():
    keys = ApiKeys(["abc", "def"])
    assert keys.accepts(b"Bearer abc") and keys.accepts(b"Bearer def") and keys.accepts(b"bearer  abc ")
    assert not any(keys.accepts(h) for h in (None, b"", b"Bearer ", b"Bearer ab", b"Bearer abcd", b"Bearer \xff"))
    assert not ApiKeys([]) and not ApiKeys([]).accepts(b"Bearer ")


async def test_admin_routes(tokenizer):
    async def status(key, address, header=None, host="127.0.0.1:8000", keys=(), **headers):
        app = create_app(FakeEngine(tokenizer), tokenizer, ServerConfig(admin_key=key, api_keys=keys))
        transport = httpx.ASGITransport(app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
            if header:
                headers["authorization"] = f"Bearer {header}"
            return (await http.get("/admin/processes", headers=headers)).status_code

    assert await status(None, "127.0.0.1") == 200
    assert await status(None, "127.0.0.1", host="localhost") == 200
    assert await status(None, "::1", host="[::1]:8000") == 200
    assert await status(None, "10.1.1.1") == 403
    assert await status(None, "10.1.1.1", "user") == 403
    assert await status(None, "127.0.0.1", host="rebound.example") == 403  # a page whose name was made to lead here
    assert await status(None, "127.0.0.1", host="localhost.example") == 403
    assert await status(None, "127.0.0.1", origin="https://a.example") == 403
    assert await status(None, "127.0.0.1", **{"x-forwarded-for": "10.1.1.1"}) == 403
    for site, code in (("same-origin", 200), ("none", 200), ("cross-site", 403), ("same-site", 403)):  # the dashboard
        assert await status(None, "127.0.0.1", **{"sec-fetch-site": site}) == code, site
    for name in ("x-forwarded-host", "x-forwarded-proto", "via", "x-real-ip", "forwarded", "cf-connecting-ip"):
        assert await status(None, "127.0.0.1", **{name: "x"}) == 403, name
    # Who gives out keys has users elsewhere, and a proxy on this machine may say nothing of them.
    assert await status(None, "127.0.0.1", keys=("user",)) == 403
    assert await status(None, "127.0.0.1", "user", keys=("user",)) == 403
    assert await status("root", "127.0.0.1", "root", keys=("user",)) == 200
    assert await status("root", "127.0.0.1") == 401
    assert await status("root", "127.0.0.1", "user", keys=("user",)) == 401
    assert await status("root", "10.1.1.1", "root") == 200


async def test_a_users_key_opens_nothing_of_the_admins(tokenizer):
    """Whatever loads, unloads, sleeps, updates or shows more than a user's own: what is documented to answer 403."""
    app = create_app(FakeEngine(tokenizer), tokenizer, ServerConfig(admin_key="root", api_keys=("user",)))
    admins = set()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        for route in app.router.routes:
            said = getattr(route, "documented", None)
            if said is not None:
                path = route.path.replace("{response_id}", "x").replace("{model:path}", "x")
                answer = await http.request(said.method, path, headers={"authorization": "Bearer user"})
                admins |= {path} if answer.status_code == 401 else set()
                assert (answer.status_code == 401) == (403 in said.errors), path
    assert {"/sleep", "/wake_up", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"} < admins


async def test_a_default_proxy_is_not_this_machine(server):
    """`proxy_pass http://127.0.0.1:PORT;` of nginx: its own Host, HTTP/1.0, and no header that tells of the client."""
    reader, writer = await asyncio.open_connection(*server.sock.getsockname())
    host = server.url.removeprefix("http://").encode()
    writer.write(b"GET /admin/processes HTTP/1.0\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
    writer.close()


async def test_the_list_of_processes(start):
    async with start() as server, server.http() as http:
        listed = (await http.get("/admin/processes")).json()["processes"]
        assert listed[0]["uptime"] > 0
        assert [entry["role"] for entry in listed] == ["server", "engine", "worker"]
        assert listed[0]["pid"] == os.getpid() and listed[0]["state"] == "ready" and listed[0]["resident"] > 1 << 20
        assert listed[2] == {
            "role": "worker", "rank": 0, "coordinates": {"tp": 0, "pp": 0}, "pid": 12, "node": "here", "epoch": 0,
            "state": "idle", "resident": 2 << 20, "uptime": None, "engine": None, "kind": "", "model": "",
        }  # fmt: skip


async def test_processes_are_listed_while_draining(start):
    """It is then that one wants to know what still runs."""
    async with start() as server, server.http() as http:
        server.engine.gate.clear()
        request = asyncio.create_task(http.post(C, json=BODY))
        await server.engine.until(lambda: server.engine.submitted)
        server.stop.set()
        async with asyncio.timeout(60):
            while (await http.get("/v1/models")).status_code != 503:
                await asyncio.sleep(0)
        answer = await http.get("/admin/processes")
        assert answer.status_code == 200 and answer.json()["processes"][0]["state"] == "draining"
        server.engine.gate.set()
        assert (await request).status_code == 200


async def test_cors(start):
    async with start(cors_origins=("https://a.example",), api_keys=("k",)) as server, server.http() as http:
        preflight = {"origin": "https://a.example", "access-control-request-method": "POST",
                     "access-control-request-headers": "authorization,content-type"}  # fmt: skip
        answer = await http.options(C, headers=preflight)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
        headers = {"origin": "https://a.example", "authorization": "Bearer k"}
        answer = await http.post(C, json=BODY, headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        refused = await http.post(C, json=BODY, headers={"origin": "https://a.example"})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
        other = await http.post(C, json=BODY, headers=headers | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_no_cors_by_default(server):
    async with server.http() as http:
        answer = await http.get("/v1/models", headers={"origin": "https://a.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (await http.options(C)).status_code == 405


def certificate(folder):
    """A certificate for 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=planaria test", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


async def test_tls(tokenizer, tmp_path):
    cert, key = certificate(tmp_path)
    async with running(FakeEngine(tokenizer), tokenizer, ssl_certfile=cert, ssl_keyfile=key) as server:
        assert server.url.startswith("https://127.0.0.1:") and server.url in await server.line
        trusting = ssl.create_default_context(cafile=cert)
        async with server.http(verify=trusting) as http:
            assert (await http.post(C, json=BODY)).status_code == 200
            async with http.stream("POST", C, json={**BODY, "stream": True}) as answer:
                assert [line async for line in answer.aiter_lines()][-2] == "data: [DONE]"
        async with server.http() as http:
            with pytest.raises(httpx.ConnectError):
                await http.get("/health")


async def test_client_certificates(tokenizer, tmp_path):
    cert, key = certificate(tmp_path)
    options = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": cert}
    async with running(FakeEngine(tokenizer), tokenizer, **options) as server:
        context = ssl.create_default_context(cafile=cert)
        async with server.http(verify=context) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get("/health")
        context.load_cert_chain(cert, key)
        async with server.http(verify=context) as http:
            assert (await http.get("/health")).status_code == 200


async def test_a_bad_certificate_is_refused(tokenizer, tmp_path):
    bad = tmp_path / "bad.pem"
    bad.write_text("not a certificate")
    async with running(FakeEngine(tokenizer), tokenizer, ssl_certfile=str(bad)) as server:
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            await server.exit_code()


async def test_request_ids_and_the_log(server, caplog):
    caplog.set_level(logging.INFO, logger="planaria.server")
    async with server.http() as http:
        answer = await http.post(C, json={**BODY, "ignore_eos": True}, headers={"x-request-id": "trace-7"})
        assert answer.headers["x-request-id"] == "trace-7"
        lines = [r.getMessage() for r in caplog.records if "trace-7" in r.getMessage()]
        assert len(lines) == 1
        assert lines[0].startswith("trace-7 POST /v1/completions 200: 1 tokens in, 2 out, ttft ")
        assert re.search(r" ms, length, \d\.\d{3} s$", lines[0])
        caplog.clear()
        answer = await http.get("/v1/models")
        first = answer.headers["x-request-id"]
        assert len(first) == 32 and first != (await http.get("/v1/models")).headers["x-request-id"]
        for bad in ("x" * 500, "a b", "\u00e9".encode()):
            assert len((await http.get("/health", headers={"x-request-id": bad})).headers["x-request-id"]) == 32
        assert not caplog.records  # what is well and doesn't generate isn't worth a line
        refused = await http.post(C, json={**BODY, "n": 0}, headers={"x-request-id": "bad-one"})
        (record,) = caplog.records
        error = refused.json()["error"]
        line = f"bad-one POST /v1/completions 400 {error['code']} (n): {error['message']}, "
        assert record.getMessage().startswith(line)
        fields = record.fields
        assert (fields["status"], fields["code"], fields["param"], fields["error"]) == (
            400, error["code"], "n", error["message"],
        )  # fmt: skip
        caplog.clear()
        await http.post(C, json={**BODY, "a\nb": 1, "model": "\x1b[31m\n"})
        assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
        assert "\x1b" not in caplog.records[0].getMessage()
        caplog.clear()
        await http.get("/v1/%0a%1b[31mevil")
        assert len(caplog.records) == 1 and "\n" not in caplog.text.strip() and "\x1b" not in caplog.text


async def test_the_same_id_twice_at_once(server):
    """A client's id names a log line, not a sequence."""
    async with server.http() as http:
        posts = [http.post(C, json=BODY, headers={"x-request-id": "same"}) for _ in range(5)]
        answers = await asyncio.gather(*posts)
    assert [a.status_code for a in answers] == [200] * 5 and len({a.json()["id"] for a in answers}) == 5


async def test_an_internal_error_is_answered(server, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("planaria.server.completions.submissions", broken)
    async with server.http() as http:
        answer = await http.post(C, json=BODY, headers={"x-request-id": "unlucky"})
        assert answer.status_code == 500 and answer.headers["x-request-id"] == "unlucky"
        assert answer.json()["error"]["code"] == "internal_error" and "a bug" not in answer.text
        assert "ZeroDivisionError" in caplog.text and "unlucky" in caplog.text
        assert (await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}],
                                                              "max_tokens": 1})).status_code == 200  # fmt: skip


async def test_a_bug_in_making_an_event_ends_its_request(server, monkeypatch):
    def broken(self, piece):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("planaria.server.completions.CompletionWriter.event", broken)
    async with server.http() as http:
        for tokens in (50, 1):
            answer = await http.post(C, json={**BODY, "max_tokens": tokens, "n": 2, "stream": True})
            assert answer.status_code == 500
    await server.engine.until(lambda: not server.engine.open)
    assert server.engine.cancelled


async def test_served_names(start):
    async with start(served_model_names=("a", "b/c"), model="/models/a") as server, server.http() as http:
        assert "Planaria serving a at" in await server.line
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(c["id"], c["root"]) for c in cards] == [("a", "a"), ("b/c", "a")]
        assert (await http.post(C, json={**BODY, "model": "/models/a"})).json()["model"] == "/models/a"
        assert (await http.get("/v1/models/b/c")).json()["id"] == "b/c"
        assert (await http.post(C, json={**BODY, "model": "b/c"})).json()["model"] == "b/c"
        assert (await http.post(C, json={"prompt": "x", "max_tokens": 1})).json()["model"] == "a"
        assert (await http.post(C, json=BODY)).status_code == 404
