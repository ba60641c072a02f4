"""The commands and their options. Each body lives in a module of its own, imported when the command runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from planaria import __version__
from planaria.cli.help import ModelsGroup, PlainCommand, PlainGroup
from planaria.cli.options import engine_command
from planaria.cli.words import EngineCommand
from planaria.preload import importing

app = typer.Typer(
    name="planaria", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None, cls=PlainGroup,
    help="Serve large language models, and keep serving when parts die.",
)  # fmt: skip
bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    cls=PlainGroup,
    help="Measure: one stream, many at once, or a running server.",
)
app.add_typer(bench_app, name="bench")
models_app = typer.Typer(rich_markup_mode=None, cls=ModelsGroup)
app.add_typer(models_app, name="models")

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, a hub id, or the alias smollm2.")
]
Json = Annotated[bool, typer.Option("--json", help="For machines: JSON on standard output.")]
LogLevel = Annotated[
    str | None, typer.Option(help="debug, info, warning or error; default: $PLANARIA_LOG_LEVEL, else info.")
]
LogFormat = Annotated[
    str | None, typer.Option(help="text, or json: a line of JSON for each; default: $PLANARIA_LOG_FORMAT, else text.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more: --log-level debug.")]
NoTokenizer = Annotated[
    bool,
    typer.Option("--skip-tokenizer-init", help="Token ids in and out, no text; of the server /v1/completions only."),
]
Url = Annotated[str | None, typer.Option(help="Of the server; default: the one of yours that runs on this machine.")]
AdminKey = Annotated[str | None, typer.Option(help="The server's admin key. Also $PLANARIA_ADMIN_KEY.")]


def body(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What a command does: `run` of this module of `planaria.cli`, or the function named after a colon, which is given
    the command's parameters by name."""
    module, _, function = name.partition(":")

    def of(declared: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(declared)
        def command(**values: Any) -> None:
            with importing():
                found = import_module(f"planaria.cli.{module}")
            getattr(found, function or "run")(**values)

        return command

    return of


def _version(value: bool) -> None:
    if value:
        typer.echo(f"planaria {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=EngineCommand)
@functools.partial(engine_command, serves=True)
@body("serve")
def serve(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face folder, a .gguf file, a hub id, or the alias smollm2; several behind one port.",
        ),
    ],
    skip_tokenizer_init: NoTokenizer = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    verbose: Verbose = False,
) -> None:
    """Serve MODEL, or several, through the OpenAI API."""


@app.command(cls=EngineCommand)
@engine_command
@body("generate")
def generate(
    model: ModelArgument,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Text to complete.")] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="The same; may be repeated.")] = None,
    prompt_token_ids: Annotated[
        list[str] | None, typer.Option(help="Token ids to complete, e.g. 1,2,3; may be repeated.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file, one prompt a line; - for standard input.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens to generate.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option()] = 0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    presence_penalty: Annotated[float, typer.Option()] = 0.0,
    frequency_penalty: Annotated[float, typer.Option()] = 0.0,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this string; may be repeated.")] = None,
    n: Annotated[int, typer.Option(help="Continuations of each prompt.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and so many of the likeliest tokens.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
    skip_tokenizer_init: NoTokenizer = False,
    as_json: Json = False,
) -> None:
    """Complete prompts and print the text (raw completion, no chat template)."""


@app.command(cls=EngineCommand)
@engine_command
@body("batch")
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one a line, in OpenAI's batch format.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Their answers in the same order, once all are there.")],
    model: Annotated[str | None, typer.Option(help="Model that answers; default: the one the requests name.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name(s) by which requests may call it; default: MODEL as typed.")
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Answer a file of requests.

    Killed at any moment, the same command goes on where it stopped; each request is answered once. What is answered so
    far is in OUT.journal. Exit code 1 if any request failed.
    """


@app.command(cls=EngineCommand)
@engine_command
@body("chat")
def chat(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for serve; with --url a name that server has.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Talk to the server that runs there, and load nothing.")] = None,
    api_key: Annotated[str | None, typer.Option(help="With --url: that server's key. Also $PLANARIA_API_KEY.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's, else 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: the model's, else 1.")] = None,
) -> None:
    """Talk to MODEL in the terminal, or to a running server (--url).

    /reset forgets the conversation, /system TEXT changes the system message, /exit or Ctrl-D ends it; Ctrl-C stops an
    answer.
    """


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: Json = False) -> None:
    """List what can be named as MODEL here: aliases, models in the hub's cache, supported architectures; with MODEL,
    say what that is."""
    from planaria.cli import models as command

    if context.invoked_subcommand is None:
        command.run(as_json=as_json)


@models_app.command("show", cls=PlainCommand)
@body("model_report")
def models_show(model: ModelArgument, as_json: Json = False) -> None:
    """What MODEL is, what becomes of its weights, what it takes and what won't work; `planaria models MODEL` is short
    for it. Nothing is loaded."""


@models_app.command("fetch", cls=PlainCommand)
@body("models:fetch")
def models_fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The alias smollm2 (92 MiB), or a hub id.")],
) -> None:
    """Get MODEL before it is needed."""


@app.command(cls=EngineCommand)
@functools.partial(engine_command, agents=False)
@body("plan")
def plan(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Where given, its layers and heads are dealt, too.")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="A cluster as JSON; default: the Ray cluster that runs, else this machine."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print where every rank would go, before anything is started.

    Takes the options of `serve`. What doesn't fit is said with the numbers and the nearest layout that does; exit code
    2.
    """


@app.command(cls=PlainCommand)
@body("ps")
def ps(
    port: Annotated[
        int | None, typer.Option(help="Of one server on this machine; default: all of yours that run on it.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Of a server elsewhere.")] = None,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """List the processes of running servers.

    Server, engine and workers: where each is, what it does, the memory it holds.
    """


@app.command(cls=PlainCommand)
@body("scale")
def scale(
    dp: Annotated[int | None, typer.Option("--dp", "--data-parallel-size", help="Engines, or lanes, to have.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", "--tensor-parallel-size", help="Of each engine.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", "--pipeline-parallel-size", help="Of each engine.")] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Engines for prompts to have, of two kinds.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Engines that go on from there to have.")] = None,
    url: Url = None,
    model: Annotated[str | None, typer.Option(help="Whose engines, of a server of several models.")] = None,
    id: Annotated[
        str | None, typer.Option("--id", help="Of the change: given again, it is not done twice; default: drawn.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that requests may stay in engines that leave, before they are moved.")
    ] = 120.0,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Change the number of engines behind a running server (--dp; of two kinds: --prefill and --decode), or the layout
    of each (--tp, --pp).

    With --enable-expert-parallel there is one engine, and --dp is the number of its lanes.

    No request fails: an engine that leaves gets no new ones, and what it has finishes or goes on in another; engines
    that change their layout go on with what they have.
    """


@app.command(cls=PlainCommand)
@body("experts")
def experts(
    url: Url = None,
    saved: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="What --json printed, in place of a server.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: a .png, .svg or .pdf file.")] = None,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Show where a server's experts are and how even their load is, by layer."""


@app.command(cls=EngineCommand)
@engine_command
@body("demo")
def demo(model: ModelArgument = "smollm2") -> None:
    """Start a server, ask it a question through the OpenAI API, print the answer and its speed, stop the server."""


InputLen = Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens to generate for a request.")]
Repeat = Annotated[int, typer.Option(min=1, help="Repetitions; medians are printed.")]


@bench_app.command("latency", cls=EngineCommand)
@engine_command
@body("bench:latency")
def bench_latency(
    model: ModelArgument,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    repeat: Repeat = 3,
    as_json: Json = False,
) -> None:
    """One stream: time to first token and tokens per second."""


@bench_app.command("throughput", cls=EngineCommand)
@engine_command
@body("bench:throughput")
def bench_throughput(
    model: ModelArgument,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests, all at once.")] = 32,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    repeat: Repeat = 3,
    as_json: Json = False,
) -> None:
    """Many requests at once, in process: output tokens per second."""


@bench_app.command("serve", cls=PlainCommand)
@body("bench_serve")
def bench_serve(
    base_url: Annotated[str, typer.Option(help="A running server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; default: the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all, without --trace.")] = 32,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests open at a time; default: 32, and no limit with --trace.")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(min=0, help="Arrivals per second (Poisson); 0: as fast as allowed.")
    ] = 0.0,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay arrivals and lengths of this file: CSV or lines of JSON, see docs/benchmarks.md."),
    ] = None,
    speed_up: Annotated[float, typer.Option(min=1e-6, help="So many times as fast.")] = 1.0,
    length_scale: Annotated[float, typer.Option(min=1e-6, help="Factor on all lengths.")] = 1.0,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many of the trace.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1e-6, help="Send for so long at most.")] = None,
    details: Annotated[Path | None, typer.Option(help="Write a line of JSON for each request here.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    as_json: Json = False,
) -> None:
    """A running OpenAI server: request rate, token rate, time to first token, time between tokens."""


def only(app: typer.Typer, name: str) -> typer.Typer:
    """With this command, or group of commands, alone, where there is one: making the options of all others takes as
    long as many a command."""
    commands = [c for c in app.registered_commands if c.callback is not None and name in (c.name, _typed(c.callback))]
    groups = [group for group in app.registered_groups if group.name == name]
    if not commands and not groups:
        return app
    one = copy.copy(app)
    one.registered_commands, one.registered_groups = commands, groups
    return one


def _typed(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", "-")
