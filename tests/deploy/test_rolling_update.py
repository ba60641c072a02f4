"""A rolling update as an orchestrator does it, with processes for pods: the new one is ready, the old one gets no more
requests, then SIGTERM. Clients that ask all the while lose nothing."""

from __future__ import annotations

import concurrent.futures
import signal
import threading

import openai

from tests.proc.servers import PATIENCE, PATIENT, SMALL, Server, needs_smollm2

pytestmark = needs_smollm2

CLIENTS, UPDATES, TOKENS = 4, 1, 40


class Endpoints:
    """What a Service sends to: the pod of now."""

    def __init__(self, server: Server) -> None:
        self.server, self.done = server, threading.Event()
        self.answered: dict[int, int] = {}  # by pod
        self.lock = threading.Lock()
        self.first = threading.Barrier(CLIENTS + 1)  # every client has a token of the pod that is about to go

    def client(self, number: int) -> list[str]:
        """Ask one thing after the other, of whichever pod there is."""
        texts = []
        for _ in range(UPDATES):
            texts.append(self.ask(number, hold=True))
        while not self.done.is_set():
            texts.append(self.ask(number, hold=False))
        return texts

    def ask(self, number: int, hold: bool) -> str:
        server = self.server
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        stream = client.completions.create(
            model="smollm2", prompt=f"Story {number}:", max_tokens=TOKENS, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text, count = "", 0
        for chunk in stream:
            text, count = text + chunk.choices[0].text, count + 1
            if hold and count == 1:
                self.first.wait(PATIENCE)  # streams run while the pod is told to end
                self.first.wait(PATIENCE)
        assert chunk.choices[0].finish_reason == "length"
        with self.lock:
            self.answered[server.pid] = self.answered.get(server.pid, 0) + 1
        return text


def test_nothing_is_lost() -> None:
    servers = [Server("smollm2", *SMALL, *PATIENT)]
    try:
        servers[0].wait_ready()
        endpoints = Endpoints(servers[0])
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(endpoints.client, i) for i in range(CLIENTS)]
            for _ in range(UPDATES):
                old, new = servers[-1], Server("smollm2", *SMALL, *PATIENT)
                servers.append(new)
                new.wait_ready()
                endpoints.first.wait(PATIENCE)
                endpoints.server = new  # the old pod is no endpoint any more: preStop is over
                old.process.send_signal(signal.SIGTERM)
                endpoints.first.wait(PATIENCE)
                assert old.process.wait(PATIENCE) == 0
            endpoints.done.set()
            texts = [client.result(PATIENCE) for client in clients]
        assert all(len(set(of_one)) == 1 for of_one in texts)  # the same from every pod
        assert all(endpoints.answered.get(server.pid, 0) >= CLIENTS for server in servers[:UPDATES])
    finally:
        for server in servers:
            server.close()
