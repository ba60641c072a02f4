"""`planaria batch`: killed at any moment, the same command goes on where it stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import typer

from planaria.checkpoint import Checkpoint
from planaria.checkpoint.generation import sampling_defaults
from planaria.cli.look import console, generating, loading, summary
from planaria.cli.options import engine_options
from planaria.config.options import EngineConfig
from planaria.config.parallel import refuse_api_servers, refuse_outer_launcher
from planaria.config.resolve import resolve
from planaria.logs import setup_logging
from planaria.server.batch_file import VERSION, Answers, Header, Item, already_there, model_of, num_failed, read_input
from planaria.server.config import ServerConfig
from planaria.server.inputs import draw_seed
from planaria.server.tools import Parsers


def run(
    source: Path, output: Path, model: str | None, engine: dict[str, Any], served_model_name: list[str] | None,
    log_level: str | None,
) -> None:  # fmt: skip
    """Exit code: 0 when every request was answered with 200, 1 if any failed or the engine gave up, 2 for a refused
    option, file or model."""
    if log_level is not None:
        setup_logging(log_level)
    began = time.monotonic()
    items, digest = read_input(source)
    if not output.with_name(output.name + ".journal").exists():
        lines = already_there(output, items)
        if lines is not None:
            _tell(lines, output, "was complete already")
            return
    good = [item for item in items if item.problem is None]
    name = model or (model_of(items) if good else "")
    seed = engine["seed"]
    answers = Answers.open(output, Header(VERSION, digest, name, draw_seed() if seed is None else seed), seed)
    try:
        left = [item for item in good if item.line not in answers.done]
        if left:
            config = resolve(engine_options(name, engine, served_model_name=(served_model_name or [name])[0]))
            refuse_outer_launcher(config.parallel, "planaria batch")
            refuse_api_servers(config.parallel, "planaria batch")
            settings = ServerConfig(
                served_model_names=tuple(served_model_name or [name]), model=name,
                eos_ids=config.model.eos_ids,
                sampling_defaults=sampling_defaults(config.checkpoint["generation_config"]), pooling=config.pooling,
                parsers=Parsers(**{name: engine[name] for name in Parsers.__struct_fields__}),
            )  # fmt: skip
            asyncio.run(_answer(config, settings, left, len(items), answers, began))
        from planaria.server.batch import line_of

        for item in items:
            if item.problem is not None and item.line not in answers.done:
                answers.add(item, line_of(item, None, item.problem))
        answers.finish(output, items)
        lines = [answers.done[item.line] for item in items]
    finally:
        answers.close()
    _tell(lines, output, f"{time.monotonic() - began:.1f} s")


def _tell(lines: list[bytes], output: Path, words: str) -> None:
    failed = num_failed(lines)
    console.print(f"{output}: {len(lines) - failed} answered, {failed} failed; {words}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


async def _answer(
    config: EngineConfig, settings: ServerConfig, left: list[Item], total: int, answers: Answers, began: float
) -> None:
    from planaria.cli.serve import engines
    from planaria.server.fleet import Fleet

    known = len(answers.done)
    if known:
        console.print(f"going on: {known} of {total} are answered")
    quiet = logging.getLogger("planaria.server")
    if quiet.getEffectiveLevel() == logging.INFO:  # a line for each request
        quiet.setLevel(logging.WARNING)
    with contextlib.ExitStack() as bar:
        fleet = Fleet(config, bar.enter_context(loading()), *engines(config))
        try:
            await fleet.start()
            from planaria.server.batch import answer_all
            from planaria.server.tokenise import load_tokenizer

            tokenizer = load_tokenizer(msgspec.convert(config.checkpoint, Checkpoint))
            facts = await fleet.dispatcher.ready()
            bar.close()
            console.print(summary(facts, {"total": time.monotonic() - began}))
            update = bar.enter_context(generating(total))
            update(known, 0)
            await answer_all(
                fleet.dispatcher,
                tokenizer,
                settings,
                left,
                answers,
                most_open=2 * config.scheduler.max_num_seqs,
                on_done=lambda tokens: update(len(answers.done), tokens),
            )
        finally:
            await fleet.close()
