"""The commands as a shell sees them: output, exit codes, one line for a mistake."""

from __future__ import annotations

import atexit
import errno
import gc
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path

import psutil
import pytest

from planaria.cli import main
from planaria.cli.generate import read_prompts
from tests.forked import begin
from tests.proc.servers import TINY, needs_smollm2, planaria

pytestmark = needs_smollm2

SMALL = ["--kv-cache-memory", "128MiB", "--max-model-len", "1024"]


def one_line(text: str) -> str:
    """The error, which must be one line and no traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1 and "Traceback" not in text, text
    return lines[0]


@pytest.fixture
def in_process() -> Iterator[None]:
    """What a command sets for its process is as before at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        for logger in (logging.getLogger("planaria"), logging.getLogger("uvicorn")):
            for name in ("handlers", "propagate", "level"):
                patch.setattr(logger, name, copy(getattr(logger, name)))
        yield


Said = Callable[..., str]


@pytest.fixture
def said(in_process: None, capfd: pytest.CaptureFixture[str]) -> Said:
    """What a command that succeeds says on standard output, run in this process."""

    def run(*args: str) -> str:
        capfd.readouterr()
        code = main(list(args))
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

    return run


def test_version() -> None:
    result = planaria("--version")
    assert result.returncode == 0 and re.fullmatch(r"planaria \d+\.\d+\.\d+\n", result.stdout)


def test_commands_of_tests_are_forks_but_where_that_makes_a_difference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch sets a variable of its own where it is imported, as it is sooner or later where tests run."""

    def made(env: dict[str, str] | None = None) -> str:
        process = begin(["planaria", "--version"], env)
        assert process.communicate(60.0)[0].startswith("planaria ") and process.returncode == 0
        return type(process).__name__

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert made() == "Forked" and made({"OMP_NUM_THREADS": "1"}) == "Popen"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert made() == "Popen"


def test_nobody_looks_for_garbage_in_what_ends(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_end = list[Callable[[], None]]()
    monkeypatch.setattr(sys, "argv", ["planaria", "--version"])
    monkeypatch.setattr(atexit, "register", at_the_end.append)
    assert main() == 0 and gc.freeze in at_the_end


def test_generate_json() -> None:
    """One compact object for each prompt, on standard output only."""
    result = planaria(
        "generate", "smollm2", *SMALL, "--prompt", "The capital of France is", "--prompt-token-ids", "504,3575,282",
        "--max-tokens", "5", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 2
    assert lines[0]["text"].startswith(" Paris")
    assert [(line["index"], line["choice"], line["prompt"]) for line in lines] == [
        (0, 0, "The capital of France is"), (1, 0, None),
    ]  # fmt: skip
    for line in lines:
        assert set(line) == {
            "index", "choice", "prompt", "text", "token_ids", "finish_reason", "executor", "link", "layout", "ranks",
            "rearrangements",
        }  # fmt: skip
        assert len(line["token_ids"]) == 5 and line["finish_reason"] == "length"
        assert line["executor"] == "uni" and line["link"] == "direct" and len(line["ranks"]) == 1


def test_answers_are_told_apart(said: Said) -> None:
    prompts = ["The capital of France is", "-p", "Two and\ntwo are", "--n", "2", "--max-tokens", "2"]
    lines = said("generate", "smollm2", *SMALL, *prompts).splitlines()
    assert [line for line in lines if line.startswith("# ")] == [
        f"# {i + 1} of 2, choice {j} of 2: {prompt}"
        for i, prompt in enumerate(["The capital of France is", "Two and two are"]) for j in (1, 2)
    ]  # fmt: skip
    one = said("generate", "smollm2", "The capital of France is", *SMALL, "--max-tokens", "2")
    assert one == lines[1] + "\n"


def test_prompts_of_a_file_are_lines(tmp_path: Path) -> None:
    """What Unicode calls an end of a line besides is part of a text."""
    (tmp_path / "prompts").write_bytes("one\u2028two\x0cthree\r\n\nfour".encode())
    assert read_prompts(tmp_path / "prompts") == ["one\u2028two\x0cthree", "four"]


def test_generate_without_tokenizer(small: Path, said: Said) -> None:
    prompt = ["--prompt-token-ids", "1,2,3", "--max-tokens", "3", "--ignore-eos", "--json"]
    (line,) = [json.loads(line) for line in said("generate", str(small), *TINY, *prompt).splitlines()]
    assert line["text"] == "" and len(line["token_ids"]) == 3


@pytest.mark.parametrize(
    "args, says",
    [
        (["generate", "smollm2", "--dtype", "int3", "--prompt", "x"], "--dtype int3"),
        (["generate", "smollm2", "--block-size", "7", "--prompt", "x"], "--block-size 7"),
        (["generate", "smollm2", "--max-model-len", "100000", "--prompt", "x"], "--max-model-len 100000"),
        (["generate", "smollm2", "--kv-cache-memory", "lots", "--prompt", "x"], "--kv-cache-memory lots"),
        (["generate", "smollm2", "-tp", "0", "--prompt", "x"], "--tensor-parallel-size"),
        (["generate", "smollm2", *SMALL, "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "/no/such/model", "--prompt", "x"], "/no/such/model"),
        (["generate", "smollm2"], "--prompt"),
        (["serve", "smollm2", "--port", "99999"], "--port 99999"),
        (["serve", "smollm2", "--host", ""], "--host '': is empty"),
        (["serve", "smollm2", "--log-level", "loud"], "--log-level loud"),
        (["chat", "smollm2", "--max-tokens", "0"], "max_tokens"),
        (["generate", "nobody/such-a-model", "--prompt", "x"], "nobody/such-a-model"),
    ],
)
def test_mistakes_are_one_line(args: list[str], says: str, in_process: None, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(args)
    out, err = capfd.readouterr()
    assert (code, out) == (2, "") and says in one_line(err)


NAME = "9" * 5000  # which no file can have
PLAN = ["plan", "--distributed-executor-backend", "mp"]  # whatever Ray clusters there were here


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve", NAME], "File name too long"), ([*PLAN, NAME], "File name too long"),
        ([*PLAN, "smollm2", "--max-model-len", NAME], "is not a number of tokens"),
        (["serve", "smollm2", "--tokenizer", NAME], "maximum length"),
        (["serve", "smollm2", "--kv-cache-memory", NAME], "is not a size"),
        (["serve", "smollm2", "--speculative-config", "\udcff"], "can't be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)  # fmt: skip
def test_what_is_too_long_or_no_text_is_one_line(
    args: list[str], says: str, in_process: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2 and says in one_line(capfd.readouterr().err)


def test_a_mistake_is_one_line_of_a_process_too() -> None:
    result = planaria("generate", "smollm2", "--dtype", "int3", "--prompt", "x")
    assert (result.returncode, result.stdout) == (2, "") and "--dtype int3" in one_line(result.stderr)


@pytest.mark.parametrize("memory, says", [("1MiB", "--max-model-len 8192"), ("900TiB", "ask for less")])
def test_no_memory_for_kv(memory: str, says: str) -> None:
    result = planaria("serve", "smollm2", "--port", "0", "--kv-cache-memory", memory)
    assert result.returncode == 1
    assert says in one_line(result.stderr)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (OSError(errno.EMFILE, "Too many open files"), "[Errno 24] Too many open files"),
    ],
)
def test_what_the_system_has_no_more_of_is_one_line(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, in_process: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def lacks(**options: object) -> None:
        raise error

    monkeypatch.setattr("planaria.cli.models.run", lacks)
    assert main(["models"]) == 1
    assert one_line(capfd.readouterr().err).startswith(f"planaria: {says}: there ")


@pytest.mark.parametrize(
    ("mib", "command", "says"),
    [(20, "serve", "there is no more memory"), (100, "serve", "this process may have 100 MiB of addresses (ulimit -v)"),
     (300, "generate -p x", "this process may have 300 MiB of addresses (ulimit -v)")],
)  # fmt: skip
def test_few_addresses_are_one_line(mib: int, command: str, says: str) -> None:
    """Libraries that get none abort, or can't be imported."""
    limited = f"ulimit -v {mib << 10}; exec {sys.executable} -m planaria {command} smollm2"
    result = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1 and one_line(result.stderr).startswith(f"planaria: {says}")


@pytest.mark.parametrize(
    ("where", "code", "says"), [(">/dev/full", 1, "No space left on device"), (">&-", 0, ""), (">&- <&-", 0, "")]
)
def test_output_that_goes_nowhere(where: str, code: int, says: str) -> None:
    command = ["sh", "-c", f'"{sys.executable}" -m planaria models {where}']
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (code, "")
    assert says in one_line(result.stderr) if says else not result.stderr


def test_a_command_that_converts_nothing_imports_no_converters() -> None:
    """Typer makes one for each option, also for those that nobody typed, of pydantic's."""
    code = "import sys; from planaria.cli import main; main(['ps']); sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


BEGINS = """
import os, sys, time
from planaria import cli
from planaria.hosts import forkserver
def run(words):
    begun = [process.pid for _, (process, _) in forkserver._early]
    given, until = int(sys.argv[-1]), time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}/fd/{given}") for pid in begun) and time.monotonic() < until:
        time.sleep(0.01)
    print(*begun, os.path.exists(f"/proc/self/fd/{given}"), sum(time.monotonic() > until for _ in begun))
    return 0
cli._run = run
if sys.argv[1] == "darwin":
    sys.platform = sys.argv.pop(1)
sys.exit(cli.main())
"""


def test_what_serve_began_before_it_read_its_options_ends_with_it() -> None:
    """What the command was given is its own: who waits for the end of it need not wait for others."""

    def begun(*words: str) -> list[str]:
        reading, writing = os.pipe()
        command = [sys.executable, "-c", BEGINS, *words, str(writing)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, pass_fds=[writing])
        for end in (reading, writing):
            os.close(end)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    pid, *said = begun("serve", "smollm2")
    assert not psutil.pid_exists(int(pid)) and said == ["True", "0"]
    for others in (["serve", "--help"], ["models"], ["darwin", "serve", "smollm2"]):
        assert begun(*others) == ["True", "0"]


def test_port_in_use() -> None:
    """Said at once: the engine that has begun to load is not waited for."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = planaria("serve", "smollm2", "--port", str(port))
    assert result.returncode == 2
    assert f"--port {port}" in one_line(result.stderr)


def test_damaged_tokenizer(tmp_path: Path) -> None:
    """The server's own part of the model, found while the engine loads: one line too, and the engine ends."""
    from tests.model.checkpoints import write_checkpoint

    folder = write_checkpoint(tmp_path / "model", "llama")
    (folder / "tokenizer.json").write_text("{")
    result = planaria("serve", str(folder), "--port", "0")
    assert result.returncode == 2
    assert "tokenizer.json" in one_line(result.stderr)


def test_truncated_file(tmp_path: Path) -> None:
    from planaria.checkpoint import resolve_checkpoint

    data = Path(resolve_checkpoint("smollm2").path).read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data[: len(data) // 2])
    result = planaria("serve", str(broken), "--port", "0")
    assert result.returncode == 2
    assert str(broken) in one_line(result.stderr)


def test_models_lists_the_alias() -> None:
    result = planaria("models", "--json")
    listed = json.loads(result.stdout)
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(
        listed["architectures"]
    )
    assert any(row["model"] == "smollm2" and row["ready"] for row in listed["models"])


def test_chat_from_a_pipe() -> None:
    """In float32: the two likeliest first tokens are 0.08 apart in log-probability, which bfloat16 may round away."""
    command = [sys.executable, "-m", "planaria", "chat", "smollm2", *SMALL, "--dtype", "float32"]
    result = subprocess.run(
        [*command, "--temperature", "0", "--max-tokens", "12"],
        input="\nWhat is the capital of France?\n\n/reset\nWhat is it?\n", capture_output=True, text=True, timeout=120,
        env=os.environ,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()[0], result.stdout.splitlines()[-1]
    assert "Paris" in first and "Paris" not in second


def test_help_names_every_option() -> None:
    """Also on a narrow terminal: an option that is cut off can't be typed."""
    result = planaria("serve", "--help", env={"COLUMNS": "60"})
    for option in ("--max-num-batched-tokens", "--tensor-parallel-size", "--no-enable-prefix-caching", "--log-level"):
        assert option in result.stdout


def test_help_is_by_topic(said: Said) -> None:
    assert "--num-prompts NUMBER" in said("bench", "serve", "--help")
    commands = said("--help")
    assert re.search(r"─ Run a model ─.*\bserve\b.*─ Running servers ─.*\bps\b.*─ Measure ─.*\bbench\b", commands, re.S)
    serve, few, everything = said("serve", "--help"), said("generate", "--help"), said("generate", "--help-all")
    for topic, option in (("Model", "--dtype auto|float32|bfloat16"), ("Speed and memory", "--kv-cache-memory SIZE")):
        assert all(f"─ {topic} ─" in page and option in page for page in (serve, few, everything))
    for topic, option in (("Nodes and Ray", "--nnodes NUMBER"), ("Experts", "--enable-eplb"), ("Ranks", "-tp")):
        assert all(f"─ {topic} ─" in page and option in page for page in (serve, everything))
        assert topic not in few.replace("for many ranks", "") and option not in few
    assert "--help-all: " in few and "--help-all: " not in everything and "<" not in everything


def test_generate_logprobs_and_choices(said: Said) -> None:
    choices = ["--prompt", "The capital of France is", "--n", "2", "--logprobs", "2", "--max-tokens", "2", "--json"]
    lines = [json.loads(line) for line in said("generate", "smollm2", *SMALL, *choices).splitlines()]
    assert len(lines) == 2 and lines[0]["text"] == lines[1]["text"]  # greedy
    for position, token in zip(lines[0]["logprobs"], lines[0]["token_ids"], strict=True):
        assert position["token"] == token and position["rank"] == 1 and len(position["top"]) == 2
        assert position["top"][0] == {"token": token, "logprob": position["logprob"]}


def test_what_warms_a_bench_up_is_no_longer_than_what_is_measured(small: Path, said: Said) -> None:
    sizes = ["--kv-cache-memory", "4MiB", "--threads", "1", "--repeat", "1", "--json"]
    longest = ["--input-len", "4", "--output-len", "1", "--max-model-len", "5"]
    assert json.loads(said("bench", "latency", str(small), *sizes, *longest))["decode_tokens_per_s"] is None
    one = ["--num-prompts", "1"]
    assert json.loads(said("bench", "throughput", str(small), *sizes, *longest, *one))["output_tokens_per_s"]


def test_bench_json(said: Said) -> None:
    once = ["--input-len", "4", "--output-len", "3", "--repeat", "1", "--json"]
    figures = json.loads(said("bench", "latency", "smollm2", *SMALL, *once))
    assert figures["ttft_ms"]["median"] > 0 and figures["decode_tokens_per_s"]["median"] > 0
    result = planaria("bench", "latency", "smollm2", "--repeat", "0")
    assert result.returncode == 2 and "--repeat" in result.stderr and "Traceback" not in result.stderr
