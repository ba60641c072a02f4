"""Every process of a server is killed while responses run in the background: the next one goes on with them, and who
follows them gets every event once. The worker's tokens depend on the whole history."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import openai
import psutil

from tests.proc import custom
from tests.proc.servers import TLS, Server, alive, needs_smollm2, wait_until
from tests.proc.test_engine_death import HASH

pytestmark = needs_smollm2

STREAMS, TOKENS, READ = 4, 90, 20


def kill_all(server: Server) -> None:
    """As a machine's end would, but for what was written."""
    tree = [server.process.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
    for pid in tree:
        os.kill(pid, signal.SIGKILL)
    server.ended()
    wait_until("all have ended", lambda: not any(alive(pid) for pid in tree))


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_the_next_server_goes_on(tmp_path: Path) -> None:
    seen = Path(tempfile.gettempdir()) / f"planaria-test-journal-{os.getpid()}"
    seen.write_bytes(bytes(8))  # nobody counts tokens: workers slow down after the first 160
    args = ["smollm2", *HASH, "--journal", str(tmp_path / "journal")]
    asked: list[dict[str, Any]] = [
        {"model": "smollm2", "max_output_tokens": TOKENS, "input": f"Story number {i}", "temperature": 0.9 * (i % 2),
         "extra_body": {"ignore_eos": True, "seed": i}} for i in range(STREAMS)
    ]  # fmt: skip

    def client(server: Server) -> Any:
        http = openai.DefaultHttpxClient(verify=TLS)
        return openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120, max_retries=0, http_client=http)

    try:
        before: list[list[Any]] = []
        with Server(*args, env={custom.SEEN: str(seen)}) as server:
            done = client(server).responses.create(model="smollm2", input="Hello", max_output_tokens=3)
            streams = [client(server).responses.create(**body, background=True, stream=True) for body in asked]
            before = [[next(stream) for _ in range(READ)] for stream in streams]
            kill_all(server)
        ids = [events[0].response.id for events in before]
        seen.unlink()
        with Server(*args, env={custom.SEEN: str(seen)}) as server:
            again = client(server)
            assert again.responses.retrieve(done.id) == done
            for body, events, id in zip(asked, before, ids, strict=True):
                after = events[-1].sequence_number
                events += again.responses.retrieve(id, stream=True, starting_after=after)
                assert [event.sequence_number for event in events] == list(range(len(events)))
                assert events[-1].type == "response.incomplete"
                assert events[-1].response.usage.output_tokens == TOKENS
                assert text_of(events) == again.responses.retrieve(id).output_text
                assert text_of(events) == again.responses.create(**body, store=False).output_text  # without a death
            assert len(list((tmp_path / "journal").iterdir())) == STREAMS + 1
            server.wait_for(f"{STREAMS} responses go on")
    finally:
        seen.unlink(missing_ok=True)
