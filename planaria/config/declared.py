"""What an option says of itself, beside its field and nowhere else. Pure.

The flags and the help of the command line, the words `LLM(...)` takes, the checks of a value by itself, what is hashed
(`planaria.config.digest`) and docs/options.md are made from these.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from planaria.errors import ConfigError

UNHASHED = "unhashed"  # of a field that is no option: ranks may differ in it


@dataclass(frozen=True, kw_only=True)
class Option:
    """help: one line. flags: more of them, or all where one begins with `--`. hashed: must all ranks agree on it? None
    of what ranks never see. choices, least, most: of a value that is given; rule and fix: in the error's place of the
    usual words. typed: does the command line have it? metavar: what a value is, in a word for people."""

    help: str
    flags: tuple[str, ...] = ()
    hashed: bool | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    rule: str = ""
    fix: str = ""
    typed: bool = True
    metavar: str = ""

    def check(self, flag: str, value: Any) -> None:
        """Raises ConfigError."""
        if value is None:
            return
        if self.choices and value not in self.choices:
            fix = self.fix or f"choose one of {', '.join(self.choices)}"
            raise ConfigError(flag, value, self.rule or "is unknown", fix)
        if isinstance(value, str):  # of a number, to be read yet
            return
        if self.least is not None and not value >= self.least:
            raise ConfigError(flag, value, self.rule or f"must be at least {self.least:g}", self.fix)
        if self.most is not None and not value <= self.most:
            raise ConfigError(flag, value, self.rule or f"must be at most {self.most:g}", self.fix)


def option(help: str, *flags: str, **more: Any) -> Option:
    return Option(help=help, flags=flags, **more)


@dataclass(frozen=True)
class Declared:
    """An option and its field. kind: the field's type; default: msgspec.NODEFAULT where there is none."""

    name: str
    option: Option
    kind: Any
    default: Any

    @property
    def flag(self) -> str:
        """The long one that switches it on, for errors."""
        return self.flags[0].partition("/")[0]

    @property
    def flags(self) -> tuple[str, ...]:
        given = self.option.flags
        if given and given[0].startswith("--"):
            return given
        word = self.name.replace("_", "-")
        plain = self.default is False or bool not in (get_args(self.kind) or (self.kind,))
        return (f"--{word}" if plain else f"--{word}/--no-{word}", *given)

    @property
    def metavar(self) -> str | None:
        """What is shown for a value; None: nothing to say, or it takes none."""
        return self.option.metavar or "|".join(self.option.choices) or None

    @property
    def typed_kind(self) -> Any:
        """As the command line takes it: where text is one of several forms, it is text."""
        parts = get_args(self.kind) if get_origin(self.kind) in (Union, types.UnionType) else (self.kind,)
        if any(get_origin(part) is tuple for part in parts) and str not in parts:
            return list[str] | None
        if str in parts or get_origin(parts[0]) is Literal:
            return str | None if type(None) in parts else str
        return self.kind


@functools.cache
def options_of(kind: type[msgspec.Struct]) -> dict[str, Declared]:
    """The options among a configuration's fields by name: its own, then those of what it is made from."""
    hints = get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    bases = (base for base in kind.__mro__[1:] if issubclass(base, msgspec.Struct) and base is not msgspec.Struct)
    inherited = {name for base in bases for name in base.__struct_fields__}
    found = {}
    for name in sorted(kind.__struct_fields__, key=lambda name: name in inherited):
        for extra in _extras(hints[name]):
            if isinstance(extra, Option):
                found[name] = Declared(name, extra, get_args(hints[name])[0], defaults[name])
    return found


def unhashed(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Fields that are marked so."""
    hints = get_type_hints(kind, include_extras=True)
    return (name for name in kind.__struct_fields__ if UNHASHED in _extras(hints[name]))


def _extras(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def check(options: msgspec.Struct) -> None:
    """Each option by itself. Raises ConfigError for the first that can't be."""
    for declared in options_of(type(options)).values():
        declared.option.check(declared.flag, getattr(options, declared.name))


def picked(kind: type[msgspec.Struct], options: msgspec.Struct) -> dict[str, Any]:
    """The values of `options` for the fields of `kind` that have the same name."""
    return {name: getattr(options, name) for name in kind.__struct_fields__ if name in options.__struct_fields__}


def table(kind: type[msgspec.Struct]) -> str:
    """The options as a table of docs/options.md."""
    lines = ["| option | default | what it is |", "|---|---|---|"]
    for declared in options_of(kind).values():
        named = ", ".join(f"`{flag}`" for flag in declared.flags) if declared.option.typed else f"`{declared.name}=`"
        default = "" if declared.default in (None, ()) else f"`{declared.default}`"
        lines.append(f"| {named} | {default} | {declared.option.help} |")
    return "\n".join(lines)
