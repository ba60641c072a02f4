"""Two servers behind somebody else's proxy: one computes prompts, the other goes on with what it fetches from it.
Whatever goes wrong on the way costs time, and no token."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes import FOLDER
from tests.proc.proxy import NOBODY, Proxy
from tests.proc.servers import Server, wait_until
from tests.proc.sockets import free_port

PROMPT = [(7 + 131 * i) % 100 for i in range(600)]
BLOCKS = 37  # full ones of it that may be used again
Ends = tuple[Server, Server, Proxy]


def serve(
    model: Path, port: int, role: str, *, connector: str = "tcp", tp: int = 1, pcp: int = 1, dcp: int = 1, **more: Any
) -> Server:
    """With what stands for others' packages, where they aren't installed."""
    config = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": more}
    config |= {"kv_port": port} if port else {}
    return Server(
        str(model), "--served-model-name", "m", "--skip-tokenizer-init", "--dtype", "float32", "--threads", "1",
        "-tp", str(tp), "-pcp", str(pcp), "-dcp", str(dcp), "--max-model-len", "1024", "--kv-cache-memory", "16MiB",
        "--kv-transfer-config", json.dumps(config),
        env={"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(FOLDER)])},
    )  # fmt: skip


@pytest.fixture(scope="module")
def ends(small: Path) -> Iterator[Ends]:
    port = free_port()
    with (
        serve(small, port, "kv_producer", lease_seconds=3.0) as one,
        serve(small, port + 50 if port < 65000 else port - 50, "kv_consumer") as other,
        Proxy(one.url, other.url) as proxy,
    ):
        yield one, other, proxy


def ask(url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx2.post(url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]


def metric(server: Server, name: str, **labels: str) -> float:
    lines = httpx2.get(server.url + "/metrics").text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = (line for line in lines if line.startswith(f"planaria:kv_{name}") and all(each in line for each in wanted))
    return sum(float(line.split()[-1]) for line in found)


def held(server: Server, store: str = "tcp") -> float:
    """Blocks for other servers. Figures are told with steps, so one is made."""
    ask(server.url, [1, 2, 3], max_tokens=1)
    return metric(server, "tier_blocks", store=store)


def mixed(seed: int) -> list[int]:
    return [(seed + 17 * i + i // 7) % 97 for i in range(600)]


def test_a_proxy_of_vllms_kind_drives_two_servers(ends: Ends) -> None:
    one, _, proxy = ends
    expected = ask(one.url, mixed(1), cache_salt="alone")
    answer = ask(proxy.url, mixed(1))
    assert tokens(answer) == tokens(expected) and cached(answer) == BLOCKS * 16
    params = proxy.params[-1]
    assert params["do_remote_prefill"] and params["remote_port"] and len(params["remote_block_ids"]) == BLOCKS
    wait_until("nothing is held", lambda: held(one) == 0)
    again = ask(proxy.url, mixed(2), stream=False, n=2, logprobs=1)
    assert tokens(again) == tokens(ask(one.url, mixed(2), cache_salt="alone", logprobs=1))
    assert "kv_transfer_params" not in again and len(again["choices"]) == 2


def test_a_stream_and_a_salt(ends: Ends) -> None:
    one, _, proxy = ends
    expected = tokens(ask(one.url, mixed(3), cache_salt="alone"))
    found: list[int] = []
    body = {"model": "m", "prompt": mixed(3), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    more = {"cache_salt": "mine", "return_token_ids": True, "stream_options": {"include_usage": True}}
    with httpx2.stream("POST", proxy.url + "/v1/completions", json=body | more, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                found += event["choices"][0]["token_ids"] if event["choices"] else []
                usage = event["usage"] or {}
    assert found == expected and usage["prompt_tokens_details"]["cached_tokens"] == BLOCKS * 16


def test_a_salt_that_is_anothers_finds_nothing(ends: Ends) -> None:
    """The lease is right, the blocks are there: but who asks has other keys."""
    one, other, _ = ends
    params = ask(one.url, mixed(4), cache_salt="mine", max_tokens=1, kv_transfer_params=NOBODY)["kv_transfer_params"]
    for prompt, salt in ((mixed(4), "yours"), (mixed(5), "mine")):
        answer = ask(other.url, prompt, cache_salt=salt, kv_transfer_params=params)
        assert cached(answer) == 0
        assert tokens(answer) == tokens(ask(one.url, prompt, cache_salt="alone"))


@pytest.mark.parametrize("what", ["remote_host", "remote_port", "remote_signature", "remote_request_id"])
def test_nobody_is_contacted_who_has_not_signed(ends: Ends, what: str) -> None:
    one, _, proxy = ends
    with socket.create_server(("127.0.0.1", 0)) as victim:
        victim.settimeout(0.5)
        port = victim.getsockname()[1]
        changed = {
            "remote_host": "localhost", "remote_port": port, "remote_signature": "0" * 64, "remote_request_id": "x",
        }  # fmt: skip
        proxy.between = lambda params: params | {"remote_port": port, what: changed[what]}
        answer = ask(proxy.url, mixed(10), cache_salt=what)
        assert tokens(answer) == tokens(ask(one.url, mixed(10), cache_salt="alone")) and cached(answer) == 0
        with pytest.raises(TimeoutError):
            victim.accept()
    proxy.between = lambda params: params


def test_a_lease_that_is_over_gives_nothing(ends: Ends) -> None:
    one, other, _ = ends
    params = ask(one.url, mixed(20), max_tokens=1, kv_transfer_params=NOBODY)["kv_transfer_params"]
    wait_until("it is offered", lambda: held(one) >= BLOCKS)
    wait_until("it is over", lambda: held(one) == 0)
    answer = ask(other.url, mixed(20), kv_transfer_params=params)
    assert cached(answer) == 0 and tokens(answer) == tokens(ask(one.url, mixed(20), cache_salt="alone"))
    assert metric(other, "tier_errors_total", kind="gone") > 0


@pytest.mark.parametrize(
    ("params", "to", "why"),
    [
        ({"do_remote_decode": True}, 1, "kv_producer"), ({"do_remote_prefill": True}, 0, "kv_consumer"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, 0, "exclude each other"),
        ({"remote_block_ids": "all"}, 1, "remote_block_ids"), ({"remote_port": 70000}, 1, "remote_port"),
        ({"remote_host": "h" * 100}, 1, "remote_host"), ("none", 0, "kv_transfer_params"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(ends: Ends, params: Any, to: int, why: str) -> None:
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": params}
    answer = httpx2.post(ends[to].url + "/v1/completions", json=body, timeout=60)  # type: ignore[union-attr]
    assert answer.status_code == 400 and why in answer.text, answer.text


def test_a_producer_that_is_stopped_or_dead_costs_the_time_to_compute(ends: Ends) -> None:
    """The last one here: it ends one of them."""
    one, other, _ = ends
    prompts = {name: mixed(30 + i) for i, name in enumerate(("stopped", "again", "dead"))}
    expected = {name: tokens(ask(other.url, prompt, cache_salt="alone")) for name, prompt in prompts.items()}
    params = {
        name: ask(one.url, prompt, max_tokens=1, kv_transfer_params=NOBODY)["kv_transfer_params"]
        for name, prompt in prompts.items()
    }
    ranks, before = [*one.engine_pids(), *one.rank_pids()], metric(other, "tier_given_up_total")
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    for name in ("stopped", "again"):
        answer = ask(other.url, prompts[name], kv_transfer_params=params[name])
        assert tokens(answer) == expected[name] and cached(answer) == 0
    assert metric(other, "tier_given_up_total") <= before + 1  # then it is let be, until others come up in its place
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    answer = ask(other.url, prompts["dead"], kv_transfer_params=params["dead"])
    assert tokens(answer) == expected["dead"] and cached(answer) == 0


@pytest.mark.long
@pytest.mark.parametrize("pcp", [1, 2])
def test_a_directory_is_a_common_store(small: Path, tmp_path: Path, pcp: int) -> None:
    """What one server writes another finds, told by a proxy or not; and each goes on without the folder."""
    folder, size = tmp_path / "kv", 16 * pcp
    blocks = (len(mixed(0)) - 1) // size
    both = [serve(small, 0, "kv_both", connector="directory", pcp=pcp, path=str(folder), size="1GiB") for _ in range(2)]
    with both[0] as one, both[1] as other, Proxy(one.url, other.url) as proxy:
        expected = [tokens(ask(one.url, mixed(40 + i), cache_salt="alone")) for i in range(3)]
        answer = ask(proxy.url, mixed(40))
        assert tokens(answer) == expected[0] and cached(answer) == blocks * size
        assert proxy.params[-1]["remote_host"] is None
        ask(one.url, mixed(41))  # long, so it is kept, though nobody says for whom
        wait_until("it is written", lambda: metric(one, "tier_saved_blocks_total", store="directory") >= 5 * blocks)
        wait_until(
            "it is seen", lambda: metric(other, "tier_blocks", store="directory") >= 5 * blocks or held(other) < 0
        )
        answer = ask(other.url, mixed(41))
        assert tokens(answer) == expected[1] and cached(answer) == blocks * size
        folder.rename(tmp_path / "gone")
        folder.write_text("no folder any more")
        answer = ask(proxy.url, mixed(42))
        assert tokens(answer) == expected[2] and cached(answer) == 0
        health = lambda: httpx2.get(one.url + "/health").json()["engines"][0]["kv_tier"]["directory"]  # noqa: E731
        wait_until("it is said", lambda: ask(one.url, [1, 2, 3]) and health().startswith("nothing can be written"))


PCP, DCP, ONE = {"pcp": 2}, {"tp": 2, "dcp": 2}, dict[str, int]()
LMCACHE = "LMCacheConnectorV1"


@pytest.mark.parametrize(
    ("connector", "layouts", "there"),
    [
        (LMCACHE, (ONE, PCP), 18 * 32), pytest.param(LMCACHE, (ONE, ONE), BLOCKS * 16, marks=pytest.mark.long),
        pytest.param("directory", (PCP, DCP), 18 * 32, marks=pytest.mark.long),
        pytest.param("directory", ({"tp": 2}, ONE), BLOCKS * 16, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_what_one_layout_has_stored_another_goes_on_with(
    small: Path, tmp_path: Path, connector: str, layouts: tuple[dict[str, int], ...], there: int
) -> None:
    """Both ways, told by a proxy."""
    more = {"path": f"{tmp_path}/kv"} if connector == "directory" else {"remote_url": f"fs://here:1{tmp_path}/kv"}
    one, other = (serve(small, 0, "kv_both", connector=connector, **layout, **more) for layout in layouts)
    with one, other:
        for seed, (computes, goes_on) in enumerate(((one, other), (other, one)), 50):
            expected = tokens(ask(goes_on.url, mixed(seed), cache_salt="alone"))
            before = metric(computes, "tier_saved_blocks_total", store=connector)
            params = ask(computes.url, mixed(seed), max_tokens=1, kv_transfer_params=NOBODY)["kv_transfer_params"]
            least = before + len(params["remote_block_ids"])

            def written(server: Server = computes, least: float = least) -> bool:
                held(server)
                return metric(server, "tier_saved_blocks_total", store=connector) >= least

            wait_until("it is written", written)
            answer = ask(goes_on.url, mixed(seed), kv_transfer_params=params)
            assert tokens(answer) == expected and cached(answer) == there


def test_heads_go_where_another_layout_has_them(small: Path) -> None:
    """From two tensor ranks to one, and from one to two."""
    port = free_port()
    ports = (port, port + 50 if port < 65000 else port - 50)
    with serve(small, ports[0], "kv_both", tp=2) as two, serve(small, ports[1], "kv_both") as one:
        for seed, (computes, goes_on) in enumerate(((two, one), (one, two)), 60):
            expected = ask(goes_on.url, mixed(seed), cache_salt="alone")
            answer = ask(computes.url, mixed(seed), max_tokens=1, kv_transfer_params=NOBODY)
            answer = ask(goes_on.url, mixed(seed), kv_transfer_params=answer["kv_transfer_params"])
            assert tokens(answer) == tokens(expected) and cached(answer) == BLOCKS * 16
            wait_until("nothing is held", lambda server=computes: held(server) == 0)


@pytest.mark.parametrize(
    ("connector", "layouts"),
    [
        ("tcp", (PCP, ONE)), pytest.param("tcp", (DCP, PCP), marks=pytest.mark.long),
        pytest.param("NixlConnector", (PCP, DCP), marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_tokens_go_where_other_context_ranks_have_them(
    small: Path, connector: str, layouts: tuple[dict[str, int], ...]
) -> None:
    """Both ways; blocks of one have twice as many tokens as the other's, or as many."""
    port = free_port()
    ports = (port, port + 50 if port < 65000 else port - 50)
    given: dict[str, Any] = {"backends": ["UCX"]} if connector != "tcp" else {}
    one, other = (serve(small, at, "kv_both", connector=connector, **layout, **given)
                  for at, layout in zip(ports, layouts, strict=True))  # fmt: skip
    with one, other:
        for seed, (computes, goes_on) in enumerate(((one, other), (other, one)), 80):
            expected = ask(goes_on.url, mixed(seed), cache_salt="alone")
            params = ask(computes.url, mixed(seed), max_tokens=1, kv_transfer_params=NOBODY)["kv_transfer_params"]
            answer = ask(goes_on.url, mixed(seed), kv_transfer_params=params)
            assert tokens(answer) == tokens(expected) and cached(answer) == 18 * 32
            wait_until("nothing is held", lambda server=computes: held(server, connector) == 0)


@pytest.mark.parametrize("layout", [PCP, pytest.param(DCP, marks=pytest.mark.long)], ids=["pcp", "dcp"])
def test_a_context_rank_that_is_stopped_or_dies_in_the_midst_costs_time(small: Path, layout: dict[str, int]) -> None:
    """Its tokens never come, those of its neighbour do. A rank that fetches dies meanwhile, then a prefill engine."""
    port = free_port()
    with (
        serve(small, port, "kv_producer", **layout) as one,
        serve(small, port + 50 if port < 65000 else port - 50, "kv_consumer", **layout) as other,
        ThreadPoolExecutor() as pool,
    ):
        expected = [tokens(ask(other.url, mixed(90 + i), cache_salt="alone")) for i in range(4)]
        asked = [ask(one.url, mixed(90 + i), max_tokens=1, kv_transfer_params=NOBODY) for i in range(3)]
        params = [answer["kv_transfer_params"] for answer in asked]
        answer = ask(other.url, mixed(90), kv_transfer_params=params[0])
        assert tokens(answer) == expected[0] and cached(answer) == 18 * 32
        stopped = one.rank_pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        coming = pool.submit(ask, other.url, mixed(91), kv_transfer_params=params[1])
        os.kill(other.rank_pids()[1], signal.SIGKILL)
        assert tokens(coming.result(240)) == expected[1]
        answer = ask(other.url, mixed(92), kv_transfer_params=params[2])
        assert tokens(answer) == expected[2] and cached(answer) == 0
        os.kill(stopped, signal.SIGKILL)
        os.kill(one.engine_pids()[0], signal.SIGKILL)
        answer = ask(one.url, mixed(93), max_tokens=1, kv_transfer_params=NOBODY)
        answer = ask(other.url, mixed(93), kv_transfer_params=answer["kv_transfer_params"])
        assert tokens(answer) == expected[3]


def test_nixl_brings_heads_to_another_layout(small: Path) -> None:
    port = free_port()
    ports = (port, port + 50 if port < 65000 else port - 50)
    with (
        serve(small, ports[0], "kv_producer", connector="NixlConnector", tp=2, backends=["UCX"]) as two,
        serve(small, ports[1], "kv_consumer", connector="NixlConnector") as one,
    ):
        expected = ask(one.url, mixed(70), cache_salt="alone")
        params = ask(two.url, mixed(70), max_tokens=1, kv_transfer_params=NOBODY)["kv_transfer_params"]
        answer = ask(one.url, mixed(70), kv_transfer_params=params)
        assert tokens(answer) == tokens(expected) and cached(answer) == BLOCKS * 16
        wait_until("nothing is held", lambda: held(two, "NixlConnector") == 0)


@pytest.mark.long
@pytest.mark.parametrize("layout, blocks", [({"tp": 2}, BLOCKS * 16), (PCP, 18 * 32), (DCP, 18 * 32)])
def test_ranks_and_engines_that_die_on_either_side_are_replaced_and_blocks_come_again(
    small: Path, layout: dict[str, int], blocks: int
) -> None:
    port = free_port()
    with (
        serve(small, port, "kv_producer", **layout) as one, serve(small, port, "kv_consumer", **layout) as other,
        Proxy(one.url, other.url) as proxy,
    ):  # fmt: skip
        for number, dies in enumerate((None, one.rank_pids, other.rank_pids, one.engine_pids, other.engine_pids)):
            if dies is not None:
                os.kill(dies()[-1], signal.SIGKILL)
            for seed in (50 + 2 * number, 51 + 2 * number):
                answer = ask(proxy.url, mixed(seed))
                assert tokens(answer) == tokens(ask(other.url, mixed(seed), cache_salt="alone"))
            assert cached(answer) == blocks
