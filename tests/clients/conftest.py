"""Collected where `-m clients` asks for it alone: it installs packages. A server for all, and the table at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.report import ROWS, table

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if "clients" in str(config.getoption("markexpr")).split() else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("clients")
        terminalreporter.write_line(table())


@pytest.fixture(scope="session")
def server():
    from tests.proc.servers import Server

    options = [
        "--chat-template", str(HERE / "common" / "tools.jinja"), "--api-key", "sesame",
        "--kv-cache-memory", "512MiB", "--max-model-len", "8192",
    ]  # fmt: skip
    with Server("smollm2", *options) as running:
        yield running
