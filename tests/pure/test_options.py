"""An option is declared once: what is made of it, everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import typer
from typer.main import get_command

from planaria.cli.app import app, only
from planaria.config.declared import check, option, options_of, table
from planaria.config.digest import NOT_HASHED
from planaria.config.options import EngineOptions
from planaria.core.policy import POLICIES
from planaria.errors import ConfigError
from planaria.server.config import ServerConfig

DOCS = Path(__file__).parents[2] / "docs" / "options.md"
WRITE = "write it with `python -m tests.pure.test_options`"


def page() -> str:
    return f"""# Options

Of every command that runs an engine, and as keywords of `LLM(...)` and `AsyncLLM(...)` (`--max-num-seqs 8` is
`max_num_seqs=8`):

{table(EngineOptions)}

Of `planaria serve` alone:

{table(ServerConfig)}
"""


def test_a_command_is_made_alone() -> None:
    every: Any = get_command(app)
    for name in every.commands:
        one: Any = get_command(only(app, name))
        assert list(one.commands) == [name]
        alone, among = ([p.opts for p in made.commands[name].params] for made in (one, every))
        assert alone == among
    for word in ("", "--help", "serv"):
        assert only(app, word) is app, "what is no command is answered by all of them"


def test_the_page_of_options_is_that_of_the_code() -> None:
    assert DOCS.read_text() == page(), WRITE


@pytest.mark.parametrize("kind", [EngineOptions, ServerConfig])
def test_every_option_has_help_and_a_flag_of_its_own(kind: type[msgspec.Struct]) -> None:
    declared = options_of(kind).values()
    for one in declared:
        assert one.option.help.endswith("."), f"{one.name} has no help"
    flags = [flag for one in declared if one.option.typed for flag in one.flags]
    assert len(set(flags)) == len(flags)


def test_every_option_of_an_engine_says_whether_it_is_hashed() -> None:
    options = options_of(EngineOptions)
    assert set(EngineOptions.__struct_fields__) - set(options) == {"model"}, "declare it with option(help, hashed=...)"
    assert not [name for name, one in options.items() if one.option.hashed is None], "say hashed=True or False"


def test_what_an_option_says_of_hashing_holds_in_every_part_it_is_in() -> None:
    hashed = {name for name, one in options_of(EngineOptions).items() if one.option.hashed}
    assert not [name for name in NOT_HASHED if name.rpartition(".")[2] in hashed]
    assert "parallel.tensor_parallel_size" in NOT_HASHED and "parallel.lanes" in NOT_HASHED
    assert "faults.step_timeout" in NOT_HASHED and "served_model_name" in NOT_HASHED


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "batch", "plan"])
def test_every_option_is_on_the_command_line_with_its_help(command: str) -> None:
    found = {p.name: p for p in typer.main.get_command(app).commands[command].params}  # type: ignore[attr-defined]
    kinds: list[type[msgspec.Struct]] = [EngineOptions, ServerConfig] if command == "serve" else [EngineOptions]
    for one in [one for kind in kinds for one in options_of(kind).values() if one.option.typed]:
        parameter: Any = found[one.name]
        assert parameter.help == one.option.help
        typed = {word for flag in one.flags for word in flag.split("/")}
        assert typed == {*parameter.opts, *parameter.secondary_opts}


def test_the_policies_to_choose_from_are_those_there_are() -> None:
    assert options_of(EngineOptions)["policy"].option.choices == tuple(POLICIES)


class Sample(msgspec.Struct, frozen=True):
    number: Annotated[int, option("A number.", least=1, most=3)] = 1
    word: Annotated[str | None, option("A word.", "--said", choices=("a", "b"))] = None
    many: Annotated[tuple[str, ...], option("Some.", "-m")] = ()
    both: Annotated[int | str | None, option("Either.")] = None
    on: Annotated[bool, option("On.")] = True
    off: Annotated[bool, option("Off.")] = False
    other: int = 0


def test_what_a_declaration_becomes() -> None:
    declared = options_of(Sample)
    assert {name: one.flags for name, one in declared.items()} == {
        "number": ("--number",), "word": ("--said",), "many": ("--many", "-m"), "both": ("--both",),
        "on": ("--on/--no-on",), "off": ("--off",),
    }  # fmt: skip
    kinds = {name: one.typed_kind for name, one in declared.items()}
    assert kinds == {
        "number": int, "word": str | None, "many": list[str] | None, "both": str | None, "on": bool, "off": bool
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"number": 0}, "--number 0: must be at least 1"),
        ({"number": 4}, "--number 4: must be at most 3"),
        ({"word": "c"}, "--said c: is unknown; choose one of a, b"),
    ],
)
def test_a_value_is_checked_where_it_is_declared(values: dict[str, Any], says: str) -> None:
    check(Sample(number=3, word="b"))
    with pytest.raises(ConfigError, match=says):
        check(Sample(**values))


if __name__ == "__main__":
    DOCS.write_text(page())
