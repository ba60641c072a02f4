"""docs/bounds.md says the numbers that the code has, and all of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from planaria import types
from planaria.parsers import json_calls, text_calls, values
from planaria.server import (
    body,
    embeddings,
    idempotency,
    inputs,
    journal_files,
    kept,
    messages,
    models,
    records,
    response_input,
    response_store,
    responses,
    schema,
    schema_responses,
    tools,
)
from planaria.server.config import ServerConfig
from planaria.structured import spec, vocabulary

PAGE = Path(__file__).parents[2] / "docs" / "bounds.md"
ROWS = re.findall(r"^\| .* \| (\S+) \| `([\w.]+)` \|$", PAGE.read_text(), re.M)


def value(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if module.endswith(".ServerConfig"):
        return getattr(ServerConfig(), name)
    return getattr(importlib.import_module(module), name)


def test_the_page_has_the_codes_numbers() -> None:
    assert len(ROWS) > 20
    assert {path: float(said) for said, path in ROWS} == {path: float(value(path)) for _, path in ROWS}


def test_no_bound_is_missing() -> None:
    there = {path for _, path in ROWS}
    for module in (
        types, body, embeddings, idempotency, inputs, journal_files, json_calls, kept, messages, models, records,
        response_input, response_store, responses, schema, schema_responses, spec, text_calls, tools,
        values, vocabulary,
    ):  # fmt: skip
        assert module.__file__ is not None
        own = re.findall(r"^(MAX_\w+) = ", Path(module.__file__).read_text(), re.M)
        assert own and not {f"{module.__name__}.{name}" for name in own} - there
