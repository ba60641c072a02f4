"""Traces: both formats are read, a bad line is named, and equal blocks become equal tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from planaria.cli.bench_serve import made_up, replayed
from planaria.cli.traces import Trace, TracedRequest, TracePrompts, read_trace
from planaria.errors import ConfigError

DATA = Path(os.environ.get("PLANARIA_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_csv(tmp_path: Path) -> None:
    text = HEAD + "2023-11-16 23:59:59.5000000,374,44\r\n2023-11-17 00:00:01.7500000,10,1\r\n\n"
    assert read_trace(written(tmp_path, text)).arrivals == [TracedRequest(0.0, 374, 44), TracedRequest(2.25, 10, 1)]


def test_csv_with_seconds_and_other_columns(tmp_path: Path) -> None:
    text = "generated tokens,user,Timestamp,context_tokens\n5,ann,12.5,100\n6,bob,10,200\n"
    assert read_trace(written(tmp_path, text)).arrivals == [TracedRequest(0.0, 200, 6), TracedRequest(2.5, 100, 5)]


def lines(*rows: tuple[float, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def test_json_lines(tmp_path: Path) -> None:
    text = lines((1000, 1500, 7, [3, 4, 5]), (2500, 513, 8, [3, 9]))
    trace = read_trace(written(tmp_path, text))
    assert trace == Trace([TracedRequest(0.0, 1500, 7, (3, 4, 5)), TracedRequest(1.5, 513, 8, (3, 9))], 512)
    assert read_trace(tmp_path / "trace", 1).arrivals == trace.arrivals[:1]


def test_json_lines_without_hashes(tmp_path: Path) -> None:
    text = '{"timestamp": 0, "input_length": 5, "output_length": 6}\n'
    assert read_trace(written(tmp_path, text)) == Trace([TracedRequest(0.0, 5, 6)], 1)


def test_a_block_length_that_is_no_power_of_two(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, lines((0, 200, 1, [1, 2]), (0, 301, 1, [1, 2, 3, 4])))).block_len == 100


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no requests"),
        (HEAD, "has no requests"),
        ("a,b\n1,2\n", "line 1: no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (HEAD + "1.0,5,6\n2.0,7\n", "line 3: 2 fields, the first line has 3"),
        (HEAD + "1.0,5,6\nyesterday,7,8\n", "line 3: 'yesterday' is neither a date and time nor seconds"),
        (HEAD + "nan,7,8\n", "line 2: 'nan' is neither"),
        (HEAD + "1.0,-5,6\n", "line 2: '-5' is no number of tokens"),
        (HEAD + "1.0,5,0\n", "line 2: '0' is no number of tokens"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 6}\n{"timestamp": 1,\n', "line 2: "),
        ('{"timestamp": 0, "input_length": 0, "output_length": 6}\n', "line 1: .*input_length"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1: .*output_length"),
        (lines((0, 1024, 1, [1, 2]), (0, 5, 1, [1]), (1, 1024, 1, [1, 2, 3])), "line 3: 3 hash_ids for 1024 tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as e:
        read_trace(written(tmp_path, text))
    assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read_trace(tmp_path / "binary")


def test_equal_blocks_are_equal_tokens() -> None:
    prompts = TracePrompts(8, 0, 100, 30_000)
    a, b, c = (prompts.tokens(TracedRequest(0.0, 20, 1, blocks)) for blocks in ((1, 2, 3), (1, 2, 4), (5, 2, 3)))
    assert len(a) == 20 and a[:16] == b[:16] and a[16:] != b[16:]
    assert a[:8] != c[:8] and a[8:] == c[8:]
    assert a == TracePrompts(8, 0, 100, 30_000).tokens(TracedRequest(0.0, 20, 1, (1, 2, 3)))
    assert a != TracePrompts(8, 1, 100, 30_000).tokens(TracedRequest(0.0, 20, 1, (1, 2, 3)))
    assert all(100 <= token < 30_000 for token in a + b + c)


def test_prompts_without_blocks_share_nothing() -> None:
    prompts = TracePrompts(1, 0, 100, 30_000)
    a, b = prompts.tokens(TracedRequest(0.0, 20, 1)), prompts.tokens(TracedRequest(0.0, 20, 1))
    assert len(a) == len(b) == 20 and a != b


def test_speed_length_and_end_of_a_replay() -> None:
    requests = [(0.0, 1000, 100, (1, 2)), (10.0, 900, 1, (1, 3)), (20.0, 5, 5)]
    trace = Trace([TracedRequest(*request) for request in requests], 512)
    fast = replayed(trace, 10.0, 0.1, 1.5)
    assert fast == Trace([TracedRequest(0.0, 100, 10, (1, 2)), TracedRequest(1.0, 90, 1, (1, 3))], 51)
    assert len(TracePrompts(51, 0, 1, 9).tokens(fast.arrivals[0])) == 100


def test_made_up_arrivals() -> None:
    assert [a.at for a in made_up(3, 0.0, 5, 6, 0).arrivals] == [0.0, 0.0, 0.0]
    arrivals = made_up(1000, 50.0, 5, 6, 0).arrivals
    assert 15 < arrivals[-1].at < 25 and arrivals == sorted(arrivals)


@pytest.mark.parametrize(
    ("name", "count", "block_len"),
    [("azure-llm-2023-conversation.csv", 19_366, 1), ("mooncake-conversation-head.jsonl", 3000, 512)],
)
def test_production_traces(name: str, count: int, block_len: int) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in {DATA}")
    trace = read_trace(DATA / name)
    assert (len(trace.arrivals), trace.block_len) == (count, block_len)
    assert trace.arrivals[0].at == 0.0 and 900 < trace.arrivals[-1].at < 3600
