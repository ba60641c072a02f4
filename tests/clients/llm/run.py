"""Simon Willison's `llm`: prompts and conversations in the terminal, streamed and whole, a schema, a tool, its log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from steps import KEY, MODEL, URL, client, step

client("llm")
home = Path("llm").absolute()
home.mkdir(exist_ok=True)
kinds = {"smol": "", "smol-completion": "  completion: true\n", "smol-responses": "  responses: true\n"}
(home / "extra-openai-models.yaml").write_text("".join(
    f"- model_id: {name}\n  model_name: {MODEL}\n  api_base: {URL}\n  api_key_name: planaria\n"
    f"  supports_schema: true\n  supports_tools: true\n{more}" for name, more in kinds.items()
))  # fmt: skip
ADDS = "def add(a: int, b: int) -> int:\n    'The sum of two numbers.'\n    return a + b\n"


def llm(*words: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "llm"), *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env={**os.environ, "LLM_USER_PATH": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


SHORT = ("-o", "temperature", "0", "-o", "max_tokens", "24")


@step
def key() -> None:
    llm("keys", "set", "planaria", "--value", KEY)
    assert "smol" in llm("models")


@step
def prompt() -> None:
    streamed = llm("-m", "smol", "What is the capital of France?", *SHORT)
    assert "Paris" in streamed
    assert llm("-m", "smol", "--no-stream", "What is the capital of France?", *SHORT) == streamed


@step
def conversation() -> None:
    assert llm("-c", "And of Italy?", *SHORT)
    logged = json.loads(llm("logs", "--json", "-n", "1"))
    assert logged[0]["prompt"] == "And of Italy?" and logged[0]["output_tokens"] > 0


@step
def completion() -> None:
    assert "three" in llm("-m", "smol-completion", "One, two,", *SHORT)


@step
def schema() -> None:
    form = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"],
            "additionalProperties": False}  # fmt: skip
    said = llm("-m", "smol", "--schema", json.dumps(form), "Invent a dog", "-o", "max_tokens", "100")
    assert isinstance(json.loads(said)["name"], str)


@step
def tool() -> None:
    """Offered; whether it is called is the model's choice, and a small one seldom does."""
    assert llm("-m", "smol", "--functions", ADDS, "--td", "Add 2 and 3.", *SHORT).strip()


@step
def responses() -> None:
    assert "Paris" in llm("-m", "smol-responses", "What is the capital of France?", "-o", "temperature", "0")
