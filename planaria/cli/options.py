"""The flags of every command that runs an engine, made from the options' own words (`planaria.config.declared`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from planaria.config.declared import options_of
from planaria.config.options import EngineOptions
from planaria.errors import ConfigError
from planaria.server.config import ServerConfig


@functools.cache
def parameters(kind: type[msgspec.Struct]) -> tuple[inspect.Parameter, ...]:
    """A command's parameters for the options of `kind`, by field name."""
    return tuple(
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=declared.default if declared.default != () else None,
            annotation=Annotated[
                declared.typed_kind,
                typer.Option(*declared.flags, help=declared.option.help, metavar=declared.metavar),
            ],
        )
        for name, declared in options_of(kind).items() if declared.option.typed
    )  # fmt: skip


def engine_command(function: Callable[..., None], *, agents: bool = True, serves: bool = False) -> Callable[..., None]:
    """Adds the engine's options to a command. `function` also gets `engine`: their values by field name. agents: on
    nodes but the first it runs their ranks. serves: it has the server's options as well, as `server`."""
    kinds: dict[str, type[msgspec.Struct]] = {"server": ServerConfig} if serves else {}
    added = {part: parameters(kind) for part, kind in (kinds | {"engine": EngineOptions}).items()}

    @functools.wraps(function)
    def command(**values: Any) -> None:
        parts = {part: {p.name: _listed(values.pop(p.name)) for p in found} for part, found in added.items()}
        engine = parts["engine"]
        pod = engine["data_parallel_rank"] or engine["data_parallel_start_rank"]
        if agents and (engine["headless"] or pod or (engine["nnodes"] > 1 and engine["node_rank"] > 0)):
            model = values["model"]
            if isinstance(model, list):
                if len(model) > 1:
                    raise ConfigError("MODEL", " ".join(model), "are several models, which one node serves", "give one")
                model = model[0]
            _be_agent(model, engine, values.get("log_level"), parts.get("server"))
        function(**values, **parts)

    own = inspect.signature(function, eval_str=True)
    shown = [*own.parameters.values(), *(p for found in added.values() for p in found)]
    command.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in shown}
    return command


def typed(engine: dict[str, Any]) -> list[str]:
    """The engine's options as they are typed: those that are not the default."""
    words = []
    for name, declared in options_of(EngineOptions).items():
        value = engine.get(name, declared.default)
        if not declared.option.typed or value == declared.default:
            continue
        on, _, off = declared.flags[0].partition("/")
        words += [on, str(value)] if not isinstance(value, bool) else [on if value else off]
    return words


def _listed(value: Any) -> Any:
    """What may be given more than once, as fields hold it."""
    return tuple(value) if isinstance(value, list) else value


def _be_agent(model: str, engine: dict[str, Any], log_level: str | None, server: dict[str, Any] | None = None) -> None:
    """On every node but the first, a command runs this node's ranks for the first one's, and where each has a front
    end, that. Returns where processes of an outer launcher are ranks themselves, all nodes are this one, or a server
    behind an outside balancer has engines of its own."""
    from planaria.config.data_parallel import behind_balancer
    from planaria.config.resolve import has_slices, resolve
    from planaria.logs import setup_logging, wait_for_no_reader

    wait_for_no_reader()
    if log_level is not None:
        setup_logging(log_level)
    if not model:
        raise ConfigError("--model", "", "is needed on every node but the first")
    options = engine_options(model, engine)
    if behind_balancer(options) and not (options.enable_expert_parallel or has_slices(options)):
        return
    config = resolve(options)
    if config.parallel.over_nodes:
        from planaria.build import run_agent

        if server is not None and behind_balancer(options):
            from planaria.server.relay import Relay

            Relay(ServerConfig(model=model, **server), config.parallel.master_addr).start()
        raise typer.Exit(run_agent(config))


def engine_options(model: str, engine: dict[str, Any], **more: Any) -> EngineOptions:
    return EngineOptions(model=model, **engine, **more)
