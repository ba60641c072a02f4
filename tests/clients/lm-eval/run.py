"""lm-evaluation-harness: log-likelihoods by `echo` and `logprobs`, and texts, of a task of five items that lies here;
its tokens come from the server's own /tokenize."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from steps import KEY, MODEL, URL, client, needs, step

client("lm_eval")
TASKS = Path("tasks").absolute()  # data_files are asked for by their whole path
TASKS.mkdir(exist_ok=True)
for file in (Path(__file__).parent / "tasks").iterdir():
    (TASKS / file.name).write_text(file.read_text().replace("FOLDER", str(TASKS)))
os.environ |= {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(Path("hf").absolute())}


REMOTE = {"tokenizer_backend": "remote", "tokenized_requests": "True", "auth_token": KEY}


def evaluate(kind: str, task: str, path: str = "/completions", more: dict[str, Any] | None = None, **args: str) -> Any:
    """What it measures of a task, alone among tasks: those it brings take half a minute to list."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    told = {"model": MODEL, "base_url": URL + path, "max_retries": "1", **args}
    return lm_eval.simple_evaluate(kind, model_args=told, tasks=[task], task_manager=tasks, **more or {})["results"][
        task
    ]


@step
def loglikelihoods_by_the_command() -> None:
    from lm_eval.__main__ import cli_evaluate

    needs("/tokenizer_info")
    told = {"model": MODEL, "base_url": f"{URL}/completions", "max_retries": "1", **REMOTE}
    sys.argv = [
        "lm-eval", "run", "--model", "local-completions", "--tasks", "capitals_choice", "--include_path", str(TASKS),
        "--output_path", "out", "--model_args", ",".join(f"{k}={v}" for k, v in told.items()),
    ]  # fmt: skip
    cli_evaluate()
    (written,) = Path("out").rglob("results_*.json")
    measured = json.loads(written.read_text())["results"]["capitals_choice"]
    assert 0.6 <= measured["acc,none"] <= 1, measured


@step
def four_at_a_time() -> None:
    more = {"batch_size": 4}
    measured = evaluate("local-completions", "capitals_choice", more=more, num_concurrent="2", **REMOTE)
    assert 0.6 <= measured["acc,none"] <= 1, measured


@step
def texts() -> None:
    measured = evaluate("local-completions", "capitals_text", tokenizer_backend="none")
    assert 0.4 <= measured["exact_match,first"] <= 1, measured


@step
def chats() -> None:
    templated = {"apply_chat_template": True}
    measured = evaluate("local-chat-completions", "capitals_text", "/chat/completions", templated)
    assert 0 <= measured["exact_match,first"] <= 1, measured
