"""A command line as people bring it from vLLM, turned into this package's: words with another name or without effect,
underscores, `--model M`, files of options (`--config`). What is unknown, or not there yet, is said by its name."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

from planaria.cli.help import PlainCommand
from planaria.config.declared import options_of
from planaria.config.json_option import json_option
from planaria.config.options import EngineOptions
from planaria.config.vllm_words import RENAMED, WORDS, said, value_of, without_effect
from planaria.env import path_of
from planaria.errors import ConfigError, UserError
from planaria.server.config import ServerConfig

logger = logging.getLogger("planaria.config")

LIKE = 0.85  # so much alike is a slip of the fingers; less would lead elsewhere
SHORT = {
    "-q": "--quantization", "-O": "--optimization-level", "-cc": "--compilation-config",
    "-ep": "--enable-expert-parallel",
}  # fmt: skip


def _verify_name(word: str, flag: str) -> None:
    """Raises UserError for what was more likely meant as another MODEL."""
    from planaria.checkpoint.resolve import is_model

    if is_model(word):
        fix = f"give all models before options, or write {flag}={word}"
        raise UserError(f"{word} comes after {flag}, where names follow one another, and is a model itself: {fix}")


class EngineCommand(PlainCommand):
    """A command with the options of an engine."""

    def topics(self) -> frozenset[str]:
        return frozenset({*options_of(EngineOptions), *options_of(ServerConfig)})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help-all" in args:
            ctx.meta["planaria.all"] = True
            args = ["--help"]
        found = Translation(self, ctx)
        translated = found.of(found.with_file(args))
        if line := said(found.notes, found.values):
            logger.warning(line)
        return super().parse_args(ctx, translated)


class Translation:
    """notes: words without effect; values: lines about values."""

    def __init__(self, command: TyperCommand, ctx: Any) -> None:
        self.command = command.name or ""
        kinds: dict[str, list[Any]] = {"option": [], "argument": []}
        for parameter in command.get_params(ctx):
            kinds[parameter.param_type_name].append(parameter)
        self.known = {flag: each for each in kinds["option"] for flag in (*each.opts, *each.secondary_opts)}
        self.by_name = {each.name: each for each in kinds["option"]}
        several = any(each.nargs == -1 for each in kinds["argument"][1:])
        self.places = len(kinds["argument"]) + 10**6 * several  # after which words belong to an option that takes more
        self.model_in_file = False
        self.notes: list[str] = []
        self.values: list[str] = []

    def with_file(self, args: list[str]) -> list[str]:
        """`args` after those of the file that `--config` names; the command line's count. Raises UserError."""
        at = next((i for i, word in enumerate(args) if word.partition("=")[0] == "--config"), None)
        if at is None:
            return args
        rest = deque(args[at + 1 :])
        path = self._value(args[at], rest)
        others = [*args[:at], *rest]
        return [*self._file(path, {self._name(word) for word in others if word.startswith("-")}), *others]

    def _file(self, path: str, typed: set[str]) -> Iterator[str]:
        import yaml

        try:
            values = yaml.safe_load(path_of(path).read_text())
        except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as e:
            raise ConfigError("--config", path, f"can't be read: {' '.join(str(e).split())}") from None
        if not isinstance(values, dict):
            raise ConfigError("--config", path, "is no list of options", "write name: value, one a line")
        for name, value in values.items():
            flag = f"--{name}".replace("_", "-")
            known = self.known.get(self._name(flag))
            if self._name(flag) in typed or value is None:
                continue
            self.model_in_file |= flag == "--model"
            if isinstance(value, bool):
                if value or known is None or known.secondary_opts:
                    yield flag if value else f"--no-{flag[2:]}"
                continue
            for one in value if isinstance(value, list) and known is not None and known.multiple else [value]:
                yield from (flag, one if isinstance(one, str) else json.dumps(one, default=str))

    def of(self, args: list[str]) -> list[str]:
        """The same in this package's words. Raises UserError."""
        out: list[str] = []
        model: list[str] = []
        placed: list[str] = []
        left = deque(args)
        while left:
            word = left.popleft()
            flag = self._name(word)
            name = flag[2:].replace("-", "_")
            switched = name.removeprefix("no_")
            if word == "--":
                return [*model, *out, word, *left]
            if not word.startswith("-") or word == "-" or word[1].isdigit():
                placed.append(word)
                out.append(word)
            elif flag == "--model" and flag not in self.known:
                model = [self._value(word, left)]
            elif flag in self.known:
                out += self._own(self.known[flag], word, flag, left, [*model, *placed])
            elif name in WORDS and not WORDS[name].switch:
                alone = "=" not in word and (not left or left[0].startswith("--"))
                self._note(without_effect(name, True if alone else self._value(word, left), flag))
            elif switched in WORDS and WORDS[switched].switch:
                on = name == switched and word.partition("=")[2].lower() != "false"
                self._note(without_effect(switched, on, flag))
            else:
                raise self._unknown(flag)
        if model and len(placed) >= self.places:  # a file's counts less
            if not self.model_in_file:
                raise UserError(f"MODEL is given twice, by its place and as --model {model[0]}: leave one out")
            model = []
        return [*model, *out]

    def _own(self, known: Any, word: str, flag: str, left: deque[str], placed: list[str]) -> Iterator[str]:
        """An option of this package's, and its values. placed: what is no option; where it's all, a list may follow."""
        if known.is_flag:
            off = word.partition("=")[2].lower() == "false"
            yield from known.secondary_opts[:1] if off else [flag]
            return
        values = [self._value(word, left)]
        listed = known.multiple and "=" not in word and len(placed) >= self.places
        while listed and left and not left[0].startswith("-"):
            values.append(left.popleft())
            if known.name == "served_model_names" and values[-1] not in placed:
                _verify_name(values[-1], flag)
        if known.multiple and values[0].startswith("["):  # vLLM's way to write a list
            values = json_option(flag, values[0], list[str | int | float], """write '["a", "b"]'""")
        for each in values:
            value, line = value_of(known.name, str(each))
            self.values += [line] if line else []
            yield from (flag, value)

    def _name(self, word: str) -> str:
        """The flag of a word, as it is called here."""
        flag = word.partition("=")[0]
        flag = "--optimization-level" if re.fullmatch(r"-O\d", flag) else SHORT.get(flag, flag)
        if flag in self.known or not flag.startswith("--"):
            return flag
        flag = flag.replace("_", "-").partition(".")[0]
        renamed = self.by_name.get(RENAMED.get(flag[2:].replace("-", "_"), ""))
        return flag if renamed is None else str(renamed.opts[0])

    def _value(self, word: str, left: deque[str]) -> str:
        flag, equals, value = word.partition("=")
        if equals:
            return value
        if re.fullmatch(r"-O\d", flag):
            return flag[2:]
        if not left:
            raise UserError(f"{flag} needs a value")
        return left.popleft()

    def _note(self, note: str) -> None:
        self.notes += [note] if note and note not in self.notes else []

    def _unknown(self, flag: str) -> UserError:
        near = difflib.get_close_matches(flag, [*self.known, "--model", "--config"], 1, LIKE)
        hint = f"did you mean {near[0]}?" if near else f"planaria {self.command} --help lists them"
        return UserError(f"{flag[:80]}: {self.command} has no such option; {hint}")
