"""`--help` for people: options by topic, in boxes; a name is never cut, for what is cut can't be typed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

# Of an option's field; the first that fits.
TOPICS = (
    ("Model", r"dtype|quantization|revision|tokenizer\w*|download_dir|chat_template|generation_config"
     r"|skip_tokenizer_init|\w+_parser|enable_auto_tool_choice"),
    ("Speed and memory", r"device|threads|kernels|max_(model|num)_\w+|policy|block_size|\w*memory\w*|seed"
     r"|enable_prefix_caching|async_scheduling|batch_invariant|null_worker"),
    ("Adapters", r"enable_lora|max_loras|max_lora_rank|max_cpu_loras|lora_modules"),
    ("When parts die", r"spare_workers|recovery_\w+|journal|step_timeout|heartbeat_timeout"),
    ("Server", r"host|port|served_model_names?|api_keys|admin_key|cors_\w+|ssl_\w+|trust_\w+|max_body_\w+|\w+_timeout"),
    ("Ranks", r"tensor_\w+|pipeline_\w+|pp_\w+|distributed_\w+|worker_\w+|disable_custom_all_reduce|max_parallel_\w+"),
    ("Experts", r"\w*expert\w*|\w*eplb\w*|all2all_backend|\w*dbo\w*|ubatch_size"),
    ("Engines", r"\w*data_parallel\w*|\w+_dp_\w+|api_server_count|headless"),
    ("Nodes and Ray", r".*"),
)  # fmt: skip
CLUSTER = ("When parts die", "Experts", "Engines", "Nodes and Ray", "Ranks")
FOR_ONE = ("chat", "generate", "batch", "demo")  # commands for which those are behind --help-all
COMMANDS = {
    "Run a model": ("serve", "chat", "generate", "batch", "demo"), "Before": ("models", "plan"),
    "Running servers": ("ps", "scale", "experts"), "Measure": ("bench",),
}  # fmt: skip
TYPES = {
    "<int>": "NUMBER", "<float>": "NUMBER", "<str>": "TEXT", "<path>": "FILE", "<list[str]>": "TEXT",
    "<int range>": "NUMBER", "<float range>": "NUMBER",
    "INTEGER": "NUMBER", "FLOAT": "NUMBER", "PATH": "FILE",
}  # fmt: skip
NAMES = 30  # characters before a help text


def rows(records: Iterable[tuple[str, str]], width: int) -> Text:
    """Names, and beside or below them what they are."""
    text = Text()
    for names, said in records:
        for word, readable in TYPES.items():
            names = names.replace(word, readable)
        parts = [names] if len(names) <= width else names.replace(" / ", " /\n").split("\n")
        lines = textwrap.wrap(re.sub(r"  +", " ", said), max(20, width - NAMES), break_on_hyphens=False) or [""]
        text.append("\n".join(parts), style="bold")
        if len(names) >= NAMES and lines[0]:
            text.append("\n" + " " * NAMES)
        else:
            text.append(" " * (NAMES - len(names)))
        text.append(("\n" + " " * NAMES).join(lines) + "\n")
    text.rstrip()
    return text


def show(ctx: Any, about: str, panels: dict[str, list[tuple[str, str]]], last: str = "") -> str:
    console = Console(width=min(Console().width, 110), highlight=False, markup=False)
    with console.capture() as said:
        console.print("\n" + re.sub("[{}]", "", ctx.command.get_usage(ctx)), style="bold")
        console.print("\n" + re.sub(r"(?<!\n)\n(?!\n)", " ", textwrap.dedent(about).strip()) + "\n")
        for title, records in panels.items():
            if records:
                console.print(Panel(rows(records, console.width - 4), title=title, title_align="left"))
        if last:
            console.print(last)
    return said.get().rstrip("\n")


def declared_off(option: Any) -> Any:
    """`--help`, with a value that needs no converter where it was not typed."""
    if option is not None:
        option.default = False
    return option


class PlainCommand(TyperCommand):
    """topics: of the options that are not its own, by field."""

    def get_help_option(self, ctx: Any) -> Any:
        return declared_off(super().get_help_option(ctx))

    def topics(self) -> frozenset[str]:
        return frozenset()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An option that nobody typed has the value that it was declared with: the library would make a converter for
        each of a hundred, and import what they are made of."""
        typed, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        if typed.get("help"):  # of all of them
            return super().parse_args(ctx, args)
        declared, values = self.params, dict[str, Any]()
        for each in declared:
            if each.param_type_name == "option" and each.name not in typed and not each.required:
                values[each.name or ""] = () if each.multiple and each.default is None else each.default
        self.params = [each for each in declared if each.name not in values]
        try:
            rest = super().parse_args(ctx, args)
        finally:
            self.params = declared
        ctx.params = {**values, **ctx.params}
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shared = self.topics()
        panels: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            "Options": [],
            **{topic: [] for topic, _ in TOPICS},
        }
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            topic = "Options"
            if parameter.param_type_name == "argument":
                topic, record = "Arguments", (record[0].split()[0], record[1])
            elif parameter.name in shared:
                topic = next(topic for topic, names in TOPICS if re.fullmatch(names, parameter.name))
            panels[topic].append(record)
        few = ctx.command.name in FOR_ONE and not ctx.meta.get("planaria.all")
        hidden = sum(len(panels.pop(topic)) for topic in CLUSTER) if few else 0
        last = f"--help-all: {hidden} more, for many ranks, engines and nodes." if hidden else ""
        formatter.write(show(ctx, self.help or "", panels, last) + "\n")


class PlainGroup(TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        return declared_off(super().get_help_option(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        known = {name: (name, self.get_command(ctx, name).get_short_help_str(200)) for name in self.list_commands(ctx)}  # type: ignore[union-attr]
        panels = {topic: [known.pop(name) for name in names if name in known] for topic, names in COMMANDS.items()}
        options = [r for p in self.get_params(ctx) if (r := p.get_help_record(ctx)) is not None]
        formatter.write(
            show(ctx, self.help or "", {**panels, "Commands": list(known.values()), "Options": options}) + "\n"
        )


class ModelsGroup(PlainGroup):
    """What is no command of it is a model to show."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if self.get_command(ctx, args[0]) else ["show", *args])
