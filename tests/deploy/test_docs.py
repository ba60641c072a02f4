"""What users read is true: every block of a command runs or says why not, options are there, links lead somewhere, the
site builds."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.main import get_command

from planaria.cli.app import app
from planaria.models import model_config
from planaria.models.memory import mib, rank_memory
from planaria.models.shard import Shard
from tests.proc.servers import needs_smollm2
from tests.tiers import representatives

ROOT = Path(__file__).parents[2]
README, START = ROOT / "README.md", ROOT / "docs" / "index.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Why it isn't run, if so; the language; the text. `console` has prompts, and what they print.
BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS, OTHERS = {"sh", "python", "console"}, {"text", "json", "diff"}
LIMIT = 300.0  # seconds for all blocks of a page, where four others are busy


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_outside_the_site_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), f"{page} links to {target}"


NAMED = re.compile(
    r"\b(tests/[\w/.-]*\w)|-m ((?:benchmarks|tests)\.[\w.]+)|python (benchmarks/[\w/]+\.py)|`(planaria/[\w/.]+)`"
)


def test_what_pages_name_is_there() -> None:
    """Files of tests, benchmarks and the package; a claim's command must at least be one."""
    pages = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for found in NAMED.findall(page.read_text()):
            file, module, script, source = found
            path = ROOT / (file or module.replace(".", "/") or script or source)
            assert path.exists() or path.with_suffix(".py").exists(), f"{page.name} names {path.relative_to(ROOT)}"


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """Every page is in the navigation, every link and anchor is there, nothing is loaded from elsewhere."""
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr  # `--quiet` would count no warnings
    page = (tmp_path / "site/recovery.html").read_text()
    assert "death.svg" in page and (tmp_path / "site/death.svg").exists()
    assert "0001-tape.html" in page
    assert not re.search(r'<(?:link|script|img)[^>]*(?:href|src)="https?://', page)


def to_run(page: Path) -> list[tuple[str, str]]:
    """Language and text of what a page has for users to run, and doesn't except."""
    found = BLOCK.findall(page.read_text())
    return [(kind, block) for why, kind, block in found if not why and kind in ("sh", "python")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    """A language that is run, or none of commands; whoever adds a block says which, or why it isn't run."""
    text = page.read_text()
    found = BLOCK.findall(text)
    assert text.count("\n```") == 2 * len(found) and text.count("<!-- not run") == sum(1 for why, *_ in found if why)
    assert {kind for _, kind, _ in found} <= COMMANDS | OTHERS
    assert not [kind for why, kind, _ in found if why and kind not in COMMANDS]


INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
TYPED = re.compile(r"^    (?:\S*\$ +)?(?:planaria|curl|pip|python|podman|kubectl|helm|ray)\b", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_of_commands_is_overlooked(page: Path) -> None:
    """What is only indented is run by nobody: tests, benchmarks and what belongs to them check something themselves."""
    blocks = INDENTED.findall(BLOCK.sub("", page.read_text()))
    assert not [b for b in blocks if TYPED.search(b) and not re.search("pytest|-m (?:benchmarks|tests)", b)]


def session(page: Path) -> str:
    """A page's blocks as one script: those of the shell as they stand, Python's given to Python."""
    script = ["set -m -e -o pipefail", "trap 'kill $(jobs -p) 2> /dev/null && wait || true' EXIT"]  # what a page starts
    for kind, block in to_run(page):
        script.append(block if kind == "sh" else f"{sys.executable} - <<'END'\n{block}END\n")
    return "\n".join(script)


def run(page: Path, folder: Path, **substitutes: str) -> str:
    """What a page's blocks write. They run in a folder that looks like a checkout, on a port of
    their own; `pgrep` sees their own processes alone."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    script = session(page).replace("8000", port)
    for old, new in substitutes.items():
        script = script.replace(old.replace("_", " "), new)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "planaria"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    pgrep = folder / "bin" / "pgrep"
    pgrep.parent.mkdir()
    pgrep.write_text(
        f"#!{sys.executable}\nimport psutil, re, sys\n"
        "for process in psutil.Process().parent().parent().children(recursive=True):\n"
        "    if re.search(sys.argv[2], ' '.join(process.cmdline())):\n        print(process.pid)\n"
    )
    pgrep.chmod(0o755)
    paths = [str(pgrep.parent), str(Path(sys.prefix) / "bin"), os.environ["PATH"]]
    said = folder / "said.txt"
    with said.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env={**os.environ, "PATH": os.pathsep.join(paths)},
        )  # fmt: skip
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            shell.wait(LIMIT)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(shell.pid).children(recursive=True):
                process.kill()
        shell.kill()
    assert shell.returncode == 0, f"{script}\n\n{said.read_text()}"
    return said.read_text()


@needs_smollm2
def test_every_block_of_the_readme_runs(tmp_path: Path) -> None:
    said = run(README, tmp_path, make_demo="make -o .venv/.setup demo")
    story = (tmp_path / "story.txt").read_text()
    events = [json.loads(line[6:]) for line in story.splitlines() if line.startswith("data: {")]
    assert len(events) == 300 and story.endswith("data: [DONE]\n\n")
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert "its process was killed by signal 9" in said
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(a["custom_id"], a["response"]["status_code"]) for a in answers] == [("a", 200), ("b", 200)]
    assert said.count("Paris") >= 2  # by `make demo` and by the Python API
    assert "worker" in said


SAID = {  # among other things
    "index.md": (
        "The capital of France is Paris", "One, two, three,", "temprature", "id you mean",
    ),
    "embeddings.md": (
        "576 True", "In bamboo forests of China.", "(576,)",
        "dimensions 64: the model wasn't trained for shorter vectors",
    ),
    "anthropic.md": ("message ",),
    "fleet.md": ("committed",),
    "kv-tier.md": ("--kv-tier", "--kv-offloading-size"),
    "kv-transfer.md": ('"prefill"', '"decode"'),
    "operate.md": ('"is_sleeping":true', "idempotent-replayed: true"),
    "parallel.md": ("[",),
    "responses.md": ("response.",),
    "several-models.md": ('"A"', '"B"'),
    "speculation.md": ("three",),
    "structured-output.md": ('"name"', '"age"'),
}  # fmt: skip


def test_every_page_with_commands_is_run() -> None:
    assert {page.name for page in PAGES if to_run(page)} == {README.name, *SAID}


@needs_smollm2
@pytest.mark.parametrize("name", representatives(SAID, "structured-output.md"))
def test_every_block_of_a_page_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    said = run(ROOT / "docs" / name, tmp_path)
    assert not [words for words in SAID[name] if words not in said], said
    assert name != "embeddings.md" or "Steel" not in said


COMMAND = re.compile(r"(?:^|\$|[ /(])planaria +([a-z]+)\b([^#|&;]*)")


@functools.cache
def commands() -> dict[str, Any]:
    return get_command(app).commands  # type: ignore[attr-defined, no-any-return]


@functools.cache
def options(command: str) -> set[str]:
    found = commands()[command]
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return known | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_commands_are_there(page: Path) -> None:
    """Also of those that aren't run, and in blocks that are indented."""
    text = page.read_text()
    lines = "".join(block for *_, block in BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    lines += [line for line in text.splitlines() if line.startswith("    ")]
    for line in lines:
        for command, rest in COMMAND.findall(line):
            if command in commands() and (command, *rest.split()[:1]) != ("bench", "serve"):
                given = re.findall(r"(?<= )--?[a-zA-Z][\w-]*", re.sub(r"'[^']*'|\"[^\"]*\"", "", rest))
                assert set(given) <= options(command), line


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936}
SHAPES = {  # hidden, intermediate, query heads, KV heads, layers
    "SmolLM2-135M": ((576, 1536, 9, 3, 30), {**LLAMA, "vocab_size": 49152, "tie_word_embeddings": True}),
    "Qwen3-0.6B": ((1024, 3072, 16, 8, 28), {**QWEN, "tie_word_embeddings": True}),
    "Qwen3-8B": ((4096, 12288, 32, 8, 36), {**QWEN, "tie_word_embeddings": False}),
    "Llama-3.1-8B": ((4096, 14336, 32, 8, 32), {**LLAMA, "vocab_size": 128256, "tie_word_embeddings": False}),
    "Qwen3-30B-A3B": ((2048, 6144, 32, 4, 48), {
        **QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    }),
}  # fmt: skip
FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")


def test_the_memory_table_is_arithmetic() -> None:
    rows = re.findall(r"^\| (\S+) \| ([\d,]+ MiB) \| ([\d.]+) KiB \| ([\d,]+ MiB) \|$",
                      (ROOT / "docs/models.md").read_text(), re.MULTILINE)  # fmt: skip
    assert [row[0] for row in rows] == list(SHAPES)
    for name, weights, token, kv in rows:
        sizes, rest = SHAPES[name]
        config = model_config({
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu", **rest,
            **dict(zip(FIELDS, sizes, strict=True)),
        }, {})  # fmt: skip
        memory = rank_memory(
            config, Shard.full(config), parameter=2, element=2, kv=None, max_model_len=8192, step_tokens=512,
            logit_rows=256,
        )  # fmt: skip
        assert (weights, kv) == (mib(memory.weights), mib(memory.kv)), name
        assert float(token) == memory.kv / 8192 / 1024, name
    assert "1,137 MiB" in README.read_text() and "896 MiB" in README.read_text()


def transcripts(page: str) -> list[tuple[str, str]]:
    """Commands after "$ " and what a page says they print."""
    text = (ROOT / "docs" / page).read_text()
    blocks = [block for why, kind, block in BLOCK.findall(text) if not why and kind == "console"]
    return [
        (command, output)
        for block in blocks
        for command, output in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


@needs_smollm2
@pytest.mark.parametrize("page", ["models.md", "placement.md", "parallel.md"])
def test_what_commands_print_is_what_pages_say(page: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PLANARIA_RAY_ADDRESS": "local"}
    for command, output in transcripts(page):
        if command.startswith("cat "):
            (tmp_path / command.removeprefix("cat ")).write_text(output)
        elif command == "planaria ps":  # of a server that runs; its columns are looked at in tests/proc/test_ps.py
            continue
        else:
            done = subprocess.run(
                ["bash", "-c", f"exec 2>&1; {command}"], cwd=tmp_path, env=environment, capture_output=True, text=True,
            )  # fmt: skip
            assert [line.rstrip() for line in done.stdout.splitlines()] == [
                line.rstrip() for line in output.splitlines()
            ], command
