"""What a client's program says of itself: a line of JSON for each thing that it did. Standard library alone, for it is
imported in the environment of each client."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

HOST, MODEL, KEY, TOKENIZER = sys.argv[1:5]  # TOKENIZER: a folder in Hugging Face's layout
URL = f"{HOST}/v1"


class Skip(Exception):
    """Not the server's fault: why this can't be done here."""


def client(distribution: str) -> None:
    say(version=version(distribution))


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def step(function: Callable[[], Any]) -> Callable[[], Any]:
    """Do it, now; its name is what was done. Others are done whatever becomes of it."""
    name, began = function.__name__.replace("_", " ").strip(), time.monotonic()
    try:
        if inspect.iscoroutinefunction(function):
            asyncio.run(function())
        else:
            function()
    except Skip as e:
        say(step=name, skipped=str(e))
    except BaseException:
        say(step=name, failed=traceback.format_exc())
    else:
        say(step=name, seconds=round(time.monotonic() - began, 2))
    return function


def get(path: str) -> Any:
    request = urllib.request.Request(HOST + path, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def needs(path: str) -> None:
    """Raise Skip where the server has no such route."""
    if path not in get("/openapi.json")["paths"]:
        raise Skip(f"the server has no {path}")
