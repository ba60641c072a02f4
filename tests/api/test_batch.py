"""A batch's files, and its requests through the server's routes with the fake engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from planaria.errors import CapacityError, ConfigError, EngineDead
from planaria.server import batch_file
from planaria.server.batch import answer_all, line_of, seed_of
from planaria.server.batch_file import VERSION, Answers, Header, Item, already_there, model_of, num_failed, read_input
from planaria.server.config import ServerConfig
from tests.api.fake_engine import FakeEngine

HEADER = Header(VERSION, "digest", "smollm2", 5)


def request(id: Any, **changes: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "prompt": f"Request {id}", "max_tokens": 6}
    return {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body} | changes


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def asked(count: int) -> list[Item]:
    return [Item(i, f"r{i}", "/v1/completions", request(f"r{i}")["body"], None) for i in range(1, count + 1)]


# -- files


def test_bad_lines_are_named_and_the_others_stand(tmp_path: Path) -> None:
    lines = [
        request("a"), "", "{torn", "[1]", request(""), request(7), request("b", method="GET"),
        request("c", url="/v1/files"), request("d", body=[1]), request("e", body={"stream": True}), request("f"),
    ]  # fmt: skip
    items, digest = read_input(write(tmp_path / "in", *lines))
    assert [item.line for item in items] == [1, *range(3, 12)] and len(digest) == 64
    assert [item.problem and item.problem[0] for item in items] == [
        None, "invalid_json", "invalid_json", "invalid_custom_id", "invalid_custom_id", "invalid_method",
        "invalid_url", "invalid_body", "unsupported_parameter", None,
    ]  # fmt: skip
    assert [item.custom_id for item in items if item.problem is None] == ["a", "f"]
    assert items[5].problem == ("invalid_method", "line 7: method must be POST, got 'GET'")
    assert model_of(items) == "smollm2"


def test_what_is_refused_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lines 1 and 3 have the same custom_id 'a'"):
        read_input(write(tmp_path / "in", request("a"), request("b"), request("a", method="GET")))
    with pytest.raises(ConfigError, match="can't be read"):
        read_input(tmp_path / "missing")
    items, _ = read_input(write(tmp_path / "in", request("a"), request("b", body={"model": "other"})))
    with pytest.raises(ConfigError, match="--model : the input names smollm2, other"):
        model_of(items)
    with pytest.raises(ConfigError, match="the input names none"):
        model_of([])
    with pytest.raises(ConfigError, match="can't be written there"):
        Answers.open(tmp_path / "no" / "out", HEADER, None)


def test_a_journal_goes_on_without_what_was_torn_off(tmp_path: Path) -> None:
    """Wherever a kill may have cut it."""
    out, items = tmp_path / "out", asked(3)
    answers = Answers.open(out, HEADER, None)
    results = [line_of(item, None, ("x", "y")) for item in items]
    for item, result in zip(items, results, strict=True):
        answers.add(item, result)
    answers.close()
    data = answers.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    around = (end + by for end in [1, *ends] for by in (-1, 0, 1))
    for cut in sorted({*range(0, len(data), 23), *around}):
        answers.path.write_bytes(data[:cut])
        again = Answers.open(out, Header(VERSION, "digest", "smollm2", 9), None)
        whole = sum(end <= cut for end in ends)
        assert again.done == {i + 1: results[i] for i in range(max(whole - 1, 0))}
        assert again.header.seed == (5 if whole else 9)  # the first one's, as far as it was written down
        for item in items[len(again.done) :]:
            again.add(item, results[item.line - 1])
        again.close()
        if whole:
            assert answers.path.read_bytes() == data
    again = Answers.open(out, HEADER, None)
    again.finish(out, items)
    assert out.read_bytes() == b"".join(result + b"\n" for result in results) and list(tmp_path.iterdir()) == [out]
    again.close()


def test_a_line_that_cannot_be_read_ends_what_is_known(tmp_path: Path) -> None:
    answers = Answers.open(tmp_path / "out", HEADER, None)
    for item in asked(3):
        answers.add(item, b'{"n":%d}' % item.line)
    answers.close()
    lines = answers.path.read_bytes().split(b"\n")
    lines[2] = b"\0" * len(lines[2])
    answers.path.write_bytes(b"\n".join(lines))
    again = Answers.open(tmp_path / "out", HEADER, None)
    assert again.done == {1: b'{"n":1}'}
    again.close()


def test_a_journal_belongs_to_one_batch_and_one_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    answers = Answers.open(out, HEADER, 5)
    with pytest.raises(ConfigError, match="another process is at work on it"):
        Answers.open(out, HEADER, None)
    answers.close()
    for what, header in (
        ("input", Header(VERSION, "other", "smollm2", 5)), ("model", Header(VERSION, "digest", "other", 5)),
        ("seed", Header(VERSION, "digest", "smollm2", 6)),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"was begun with another {what}"):
            Answers.open(out, header, 6 if what == "seed" else None)
    Answers.open(out, HEADER, 5).close()


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers.open(tmp_path / "out", HEADER, None)
    first, second = asked(2)
    answers.add(first, b'{"n":1}')

    def full(fd: int, data: memoryview, write: Any = batch_file.os.write) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) - 5])

    monkeypatch.setattr(batch_file.os, "write", full)
    with pytest.raises(CapacityError, match="No space left on device; the same command goes on"):
        answers.add(second, b'{"n":2}')
    monkeypatch.undo()
    answers.close()
    again = Answers.open(tmp_path / "out", HEADER, None)
    assert again.done == {1: b'{"n":1}'}
    again.close()


def test_another_file_is_never_written_over(tmp_path: Path) -> None:
    items, out = asked(2), tmp_path / "out"
    assert already_there(out, items) is None
    ok = {"status_code": 200, "request_id": "x", "body": {}}
    lines = [line_of(items[0], ok, None), line_of(items[1], None, ("a", "b"))]
    out.write_bytes(b"\n".join(lines) + b"\n")
    assert already_there(out, items) == lines and num_failed(lines) == 1
    for other in (b"text\n", lines[0] + b"\n", lines[1] + b"\n" + lines[0] + b"\n"):
        out.write_bytes(other)
        with pytest.raises(ConfigError, match="is there already, and not the output of this input"):
            already_there(out, items)


# -- requests


async def answer(engine: FakeEngine, tokenizer: Any, items: list[Item], answers: Answers, most_open: int = 4) -> None:
    config = ServerConfig(served_model_names=("smollm2",))
    await answer_all(
        engine, tokenizer, config, items, answers, most_open=most_open, on_done=lambda tokens: None
    )  # fmt: skip


def answered(answers: Answers) -> dict[str, Any]:
    return {value["custom_id"]: value for value in map(json.loads, answers.done.values())}


async def test_answers_have_the_batch_format(tokenizer: Any, tmp_path: Path) -> None:
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 3}
    items = [
        *asked(2), Item(3, "chat", "/v1/chat/completions", chat, None),
        Item(4, "refused", "/v1/completions", {"prompt": "x", "temperature": -1}, None),
        Item(5, "other", "/v1/completions", {"prompt": "x", "model": "gpt"}, None),
    ]  # fmt: skip
    answers = Answers.open(tmp_path / "out", HEADER, None)
    engine = FakeEngine(tokenizer)
    await answer(engine, tokenizer, items, answers)
    found = answered(answers)
    assert [found[item.custom_id]["response"]["status_code"] for item in items] == [200, 200, 200, 400, 404]
    for id, value in found.items():
        assert set(value) == {"id", "custom_id", "response", "error"} and value["error"] is None
        assert re.fullmatch("batch_req_[0-9a-f]{32}", value["id"]) and value["response"]["request_id"], id
    assert found["r1"]["response"]["body"]["object"] == "text_completion"
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert found["refused"]["response"]["body"]["error"]["param"] == "temperature"
    assert {submit.seed for submit in engine.submitted} == {seed_of(5, "r1"), seed_of(5, "r2"), 3}
    assert seed_of(5, "r1") != seed_of(5, "r2") != seed_of(6, "r2")
    answers.close()
    await engine.close()


async def test_few_are_open_at_a_time(tokenizer: Any, tmp_path: Path) -> None:
    engine = FakeEngine(tokenizer)
    most = 0
    step = engine.step

    def count() -> None:
        nonlocal most
        most = max(most, len(engine.open))
        step()

    engine.step = count  # type: ignore[method-assign]
    answers = Answers.open(tmp_path / "out", HEADER, None)
    await answer(engine, tokenizer, asked(12), answers, most_open=3)
    assert most == 3 and len(answers.done) == 12
    answers.close()
    await engine.close()


async def test_an_engine_that_gives_up_leaves_only_real_answers(tokenizer: Any, tmp_path: Path) -> None:
    engine = FakeEngine(tokenizer)
    step = engine.step

    def fatal_step() -> None:
        step()
        if engine.stats.step == 10:
            engine.die("rank 0 was killed")

    engine.step = fatal_step  # type: ignore[method-assign]
    answers = Answers.open(tmp_path / "out", HEADER, None)
    items = asked(9)
    with pytest.raises(EngineDead, match="rank 0 was killed"):
        await answer(engine, tokenizer, items, answers)
    known = answered(answers)
    assert 0 < len(known) < 9 and all(value["response"]["status_code"] == 200 for value in known.values())
    await engine.close()
    engine = FakeEngine(tokenizer)
    await answer(engine, tokenizer, [item for item in items if item.line not in answers.done], answers)
    assert len(answered(answers)) == 9 and num_failed(list(answers.done.values())) == 0
    answers.close()
    await engine.close()
