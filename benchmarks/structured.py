"""What structured output costs, and that it holds.

    python -m benchmarks.structured cost [--model smollm2] [--rounds 8]     a token, at one stream and at 32
    python -m benchmarks.structured parts [--model smollm2]                 seconds of a processor, whatever else runs
    python -m benchmarks.structured first [--rounds 30]                     the first token, of a usual schema
    python -m benchmarks.structured valid [--answers 20]                    answers that end by themselves, by feature
    python -m benchmarks.structured fuzz [--count 100000]                   grammars of all kinds, while others stream
    python -m benchmarks.structured door [--count 100000]                   such grammars at the door: what each costs
    python -m benchmarks.structured beside [--model smollm2] [--rounds 8]   others' gaps, beside such grammars

Each prints a table and writes benchmarks/out/structured_NAME.json.

- cost: steps of a batch whose rows are held to JSON against steps of one whose rows are free, as many tokens each, in
  turns, without those that took over twice the median; the median of all rounds, and of what each round costs more than
  the free one beside it. Of a round's steps the mean is what a token costs: some are forced, and their logits aren't
  computed. The median's isn't.
- parts: what a rank's thread spends on a token of a long answer, and on a schema that is new, by the processor's clock.
- first: seconds from the call to the first token of a schema that is new each time, and of none; the median.
- valid, fuzz: a random model of two layers, which says anything that isn't forbidden. Answers that end by themselves
  are held against `jsonschema`. fuzz keeps four rows of others streaming, all of whose tokens come.
- door: by verdict, how many grammars, and how long each was waited for; those that were there before are told by
  themselves, as they may be kept.
- beside: gaps of the tokens of four rows, while eight others have short answers one after the other: each held to
  another one of fuzz's grammars, or free and as long; by themselves, or while more grammars are being checked without a
  pause. As a measure, the same again, and beside a process of the idle class that only counts: what these differ by,
  nothing can be said of. In short turns, each second round the other way round; the 99th of 100, of all turns, and of
  each round over the free one's, its median and range; and how long threads that compute waited for a core.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.schemas import FEATURES, drawn
from planaria import LLM, SamplingParams
from planaria.checkpoint import resolve_checkpoint
from planaria.errors import RequestError
from planaria.server.tokenise import load_tokenizer
from planaria.structured.check import TOO_MUCH, GrammarCheck, Vocabulary
from planaria.structured.constraint import Constraint, Constraints
from planaria.structured.spec import form_of
from planaria.structured.vocabulary import make_vocabulary
from planaria.types import StructuredOutputsParams
from planaria.worker.sampler import Sampler

OUT = Path(__file__).resolve().parent / "out"
UP = "up"  # is said by what runs beside, when it does
PROMPT = "A list of ten pets, as JSON: "
PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "notes": {"type": "string"},
    },
    "required": ["name", "age", "kind", "notes"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": PET, "minItems": 100}
SKIPPED, TOKENS = 6, 72  # steps of a round that aren't counted; tokens of each row
OTHERS, SHORT = 4, 8  # rows
LASTS = 150  # tokens of those others
DRAWN = 20_000  # grammars that are there before the door opens: who sends them is elsewhere


def form(**given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


def cost(options: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with LLM(options.model, max_num_seqs=32, enable_prefix_caching=False) as llm:
        for rows in (1, 32):
            for temperature in (0.0, 1.0):
                steps: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
                for number in range(2 * options.rounds + 2):
                    bound = bool(number % 2)
                    found_now = _round(llm, rows, temperature, form(json=LONG) if bound else None)
                    if number > 1:
                        steps[bound].append(found_now)
                for at, what in enumerate(("mean", "median")):
                    free, held = ([1e3 * each[at] for each in steps[bound]] for bound in (False, True))
                    more = statistics.median(b / a for a, b in zip(free, held, strict=True)) - 1
                    found.append({"rows": rows, "temperature": temperature, "of": what, "more": more,
                                  "free": statistics.median(free), "held": statistics.median(held)})  # fmt: skip
    rows_of = [[f"{f['rows']}", f"{f['temperature']:g}", f["of"], f"{f['free']:.2f}", f"{f['held']:.2f}",
                f"{100 * f['more']:+.1f} %"] for f in found]  # fmt: skip
    _show("A token's step, in ms", ["rows", "temperature", "", "free", "held to JSON", "cost"], rows_of)
    return found


def _round(llm: LLM, rows: int, temperature: float, structured: StructuredOutputsParams | None) -> tuple[float, float]:
    """Of a batch's steps, in seconds: the mean, without those that something else held up, and the median."""
    times: list[float] = []
    asked = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=TOKENS, ignore_eos=True, structured_outputs=structured
        )
        for i in range(rows)
    ]
    llm.generate([PROMPT] * rows, asked, on_tokens=lambda done, new: times.append(time.perf_counter()))
    steps = [b - a for a, b in pairwise(times[SKIPPED:-1])]
    median = statistics.median(steps)
    return statistics.mean(step for step in steps if step < 2 * median), median


def parts(options: argparse.Namespace) -> dict[str, float]:
    """Microseconds."""
    checkpoint = resolve_checkpoint(options.model)
    tokenizer = load_tokenizer(checkpoint)
    size, eos_id = tokenizer.vocab_size, tokenizer.eos_ids[0]
    vocabulary = make_vocabulary(tokenizer.backend.to_str(), size, eos_id)
    pet = {"name": "Petella", "age": 19, "kind": "dog", "notes": "It sleeps all day, and runs at night."}
    answer = tokenizer.encode(json.dumps([pet] * 100), add_special_tokens=False)

    def begun(given: Any) -> tuple[Constraint, float]:
        source = form_of(form(json=given), "structured_outputs")
        constraint, made = Constraint(size, [eos_id], goes_on=False), Constraints(size, lambda eos: vocabulary)
        since = time.thread_time()
        made._begin(constraint, json.dumps({"grammars": [{"json_schema": source.body}]}))
        return constraint, time.thread_time() - since

    sampler = Sampler(1, size)
    sampler.warm_up()
    begins = [begun({**PET, "title": str(i)})[1] for i in range(20)]
    found = {"a schema that is new, median": statistics.median(begins), "a schema that is new, most": max(begins)}
    for kind, greedy in (("a token", False), ("a greedy row's token", True)):
        constraint, _ = begun(LONG)
        constraint.greedy = greedy
        logits, each = np.zeros((1, size), np.float32), []
        for token in answer:
            logits[:] = 0.0
            logits[0, token] = 1.0
            since = time.thread_time()
            if constraint.settle(logits) is None:
                assert sampler._kernels is not None
                constraint.drawn, _ = constraint.draw(logits, 0, sampler._kernels.allowed(logits, [0], 0))
                assert constraint.drawn == token
                constraint.settle(look=False)
            each.append(time.thread_time() - since)
        assert not constraint.error, constraint.error
        found |= {f"{kind}, mean": statistics.mean(each), f"{kind}, median": statistics.median(each),
                  f"{kind}, most": max(each)}  # fmt: skip
    found = {name: 1e6 * seconds for name, seconds in found.items()}
    _show("Microseconds of a processor", ["", ""], [[name, f"{us:.0f}"] for name, us in found.items()])
    return found


def first(options: argparse.Namespace) -> dict[str, float]:
    """Of a schema that nobody has seen: compiled at the door and by the rank."""
    found: dict[str, list[float]] = {"free": [], "held": [], "held again": []}
    with LLM(options.model, max_num_seqs=4, enable_prefix_caching=False) as llm:
        for number in range(options.rounds + 2):
            fresh = {**PET, "title": f"Number {number}"}
            given = {"free": None, "held": form(json=fresh), "held again": form(json=fresh)}
            for name, structured in given.items():
                since = time.perf_counter()
                llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0, structured_outputs=structured))
                if number > 1:
                    found[name].append(time.perf_counter() - since)
    medians = {name: 1e3 * statistics.median(values) for name, values in found.items()}
    added = [[name, f"{ms:.2f}", f"{ms - medians['free']:+.2f}"] for name, ms in medians.items()]
    _show("The first token, in ms", ["", "median", "added"], added)
    return medians


def _talker() -> LLM:
    from tests.model.checkpoints import write_talker

    folder = write_talker(Path(tempfile.mkdtemp()) / "talker")
    return LLM(str(folder), max_model_len=512, kv_cache_memory="32MiB", max_num_seqs=64, threads=1)


def valid(options: argparse.Namespace) -> dict[str, Any]:
    """By feature: answers, those that ended by themselves, and what is wrong with which."""
    import jsonschema

    found: dict[str, Any] = {}
    with _talker() as llm:
        for name, given in FEATURES.items():
            asked = SamplingParams(
                n=options.answers,
                seed=1,
                max_tokens=400,
                structured_outputs=form(json=given, disable_any_whitespace=True),
            )
            try:
                answers = llm.generate(["Say it."], asked)[0].outputs
            except RequestError as e:
                found[name] = {"refused": str(e)}
                continue
            ended = [answer.text for answer in answers if answer.finish_reason == "stop"]
            wrong = []
            kind = jsonschema.validators.validator_for(given)
            checker = kind(given, format_checker=kind.FORMAT_CHECKER)
            for text in ended:
                if errors := list(checker.iter_errors(json.loads(text))):
                    wrong.append([text, errors[0].message])
            failed = sum(answer.finish_reason == "error" for answer in answers)
            found[name] = {"answers": len(answers), "ended": len(ended), "wrong": wrong, "failed": failed}
    rows = [[name, str(f.get("answers", "")), str(f.get("ended", "refused")), str(len(f.get("wrong", ())))]
            for name, f in found.items()]  # fmt: skip
    _show("Answers against their schema", ["feature", "answers", "ended by themselves", "wrong"], rows)
    return found


def fuzz(options: argparse.Namespace) -> dict[str, Any]:
    """Every grammar to the door, and to the engine those that it lets in, with 24 tokens each."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    with _talker() as llm:
        quiet = SamplingParams(max_tokens=60, ignore_eos=True)

        def held(asked: list[SamplingParams]) -> list[Any]:
            outputs = llm.generate(["Say it."] * (len(asked) + OTHERS), [*asked, *[quiet] * OTHERS], use_tqdm=False)
            assert all(output.outputs[0].finish_reason == "length" for output in outputs[len(asked) :])
            return outputs[: len(asked)]

        let_in: list[SamplingParams] = []
        began = time.monotonic()
        for number in range(options.first, options.first + options.count):
            try:
                params = SamplingParams(max_tokens=24, seed=number, structured_outputs=form(**drawn(number)))
                let_in.append(llm._grammars.spelled(params))
            except RequestError as e:
                counts["refused"] += 1
                counts["refused, for what they take"] += "takes more than" in str(e)
            if len(let_in) == 32 or number == options.first + options.count - 1:
                for output in held(let_in):
                    answer = output.outputs[0]
                    counts[f"let in, ended by: {answer.finish_reason}"] += 1
                    if answer.finish_reason == "error":
                        reasons[re.sub(r"\d+", "N", str(answer.error))[:120]] += 1
                let_in = []
            if number % 5000 == 4999:
                print(f"{number + 1}: {dict(counts)}, {time.monotonic() - began:.0f} s", flush=True)
        deaths = llm._loop.gang.epoch
    _show("Grammars", ["", ""], [[name, str(count)] for name, count in sorted(counts.items())])
    _show("Errors of those let in", ["", ""], [[name, str(count)] for name, count in reasons.most_common()])
    print(f"ranks that died: {deaths}")
    return {"counts": counts, "errors": reasons, "seconds": time.monotonic() - began, "deaths": deaths}


def door(options: argparse.Namespace) -> dict[str, Any]:
    """Check such grammars as an API process does, one after the other, until they are all checked or this is killed."""
    tokenizer = load_tokenizer(resolve_checkpoint(options.model))
    vocabulary = Vocabulary(tokenizer.backend.to_str(), tokenizer.vocab_size, tokenizer.eos_ids[0])
    check = GrammarCheck(lambda: vocabulary)
    spent: dict[str, list[float]] = {}
    said: set[int] = set()
    check.grammar(form(choice=["warm"]), "structured_outputs")
    ready = [drawn(-1 - number) for number in range(options.first, options.first + min(DRAWN, options.count))]
    more = (drawn(-1 - number) for number in range(options.first + len(ready), options.first + options.count))
    print(UP, flush=True)
    began = time.monotonic()
    for given in itertools.chain(ready, more):
        since = time.monotonic()
        try:
            check.grammar(form(**given), "structured_outputs")
            verdict = "let in"
        except RequestError as e:
            verdict = "refused, for what it takes" if TOO_MUCH in e.message else "refused"
            verdict = "no answer (503)" if e.status == 503 else verdict
        took = time.monotonic() - since
        content = hash(json.dumps(given))
        verdict += ", seen before" if content in said else ""
        said.add(content)
        spent.setdefault(verdict, []).append(took)
    seconds = time.monotonic() - began
    check.close()
    found = {}
    for verdict, times in sorted(spent.items()):
        found[verdict] = {
            "count": len(times), "median": 1e3 * statistics.median(times), "mean": 1e3 * statistics.mean(times),
            "p99": 1e3 * sorted(times)[int(0.99 * len(times))], "longest": 1e3 * max(times),
        }  # fmt: skip
    columns = ["count", "median", "mean", "p99", "longest"]
    rows = [[verdict, str(costs["count"]), *(f"{costs[column]:.2f}" for column in columns[1:])]
            for verdict, costs in found.items()]  # fmt: skip
    _show("Verdicts, and ms for each", ["", *columns], rows)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{options.count} in {seconds:.1f} s; processes that compile took {cpu:.1f} s of a processor")
    return {"verdicts": found, "seconds": seconds, "cpu": cpu}


@contextlib.contextmanager
def _beside(command: list[str]) -> Iterator[int]:
    """The group of what it runs, once that is up: stopped."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None and process.stdout.readline() == UP + "\n"
    os.killpg(process.pid, signal.SIGSTOP)
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)  # what it started, too


def _waited(llm: LLM) -> float:
    """Seconds that the ranks' threads, but those of a lower priority, were ready and had no core."""
    found = 0
    for member in llm._loop.gang.members:
        for task in Path(f"/proc/{member.pid}/task").iterdir():
            if not os.getpriority(os.PRIO_PROCESS, int(task.name)):
                found += int((task / "schedstat").read_text().split()[1])
    return found / 1e9


def beside(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Milliseconds, by what the eight others are and what else runs."""
    door = [sys.executable, "-m", __spec__.name, "door", "--model", options.model]
    idle = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
    spin = [sys.executable, "-c", f"{idle}print('{UP}', flush=True)\nwhile True: pass"]
    numbers = itertools.count(options.first)
    with (
        LLM(options.model, max_num_seqs=OTHERS + SHORT, enable_prefix_caching=False, max_model_len=1024) as llm,
        _beside(door) as checks, _beside(spin) as counts,
    ):  # fmt: skip
        kinds = {
            "held to grammars": (True, 0), "free": (False, 0), "free, beside checks": (False, checks),
            "free again": (False, 0), "held to grammars, beside checks": (True, checks),
            "free, beside a process that counts": (False, counts),
        }  # fmt: skip
        gaps: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        waits: dict[str, list[float]] = {kind: [] for kind in kinds}

        def checked() -> SamplingParams:
            """The next one that is let in."""
            while True:
                number = next(numbers)
                params = SamplingParams(max_tokens=24, seed=number, structured_outputs=form(**drawn(number)))
                with contextlib.suppress(RequestError):
                    return llm._grammars.spelled(params)

        def run(kind: str, asked: list[SamplingParams], group: int) -> list[int]:
            """How many tokens each had."""
            times: list[float] = []
            quiet = SamplingParams(max_tokens=LASTS, ignore_eos=True)
            if group:
                os.killpg(group, signal.SIGCONT)
            waited, since = _waited(llm), time.perf_counter()
            outputs = llm.generate(
                ["Say it."] * (OTHERS + len(asked)), [*[quiet] * OTHERS, *asked], use_tqdm=False,
                on_tokens=lambda done, new: times.append(time.perf_counter()),
            )  # fmt: skip
            waits[kind].append((_waited(llm) - waited) / (time.perf_counter() - since))
            if group:
                os.killpg(group, signal.SIGSTOP)
            gaps[kind].append([b - a for a, b in pairwise(times)])
            return [len(output.outputs[0].token_ids) for output in outputs[OTHERS:]]

        for number in range(options.rounds + 1):
            held = [checked() for _ in range(SHORT * LASTS // 24)]
            lengths = run("held to grammars", held, 0)  # free ones are as long: who comes is what others see most of
            free = [SamplingParams(max_tokens=max(1, n), seed=i, ignore_eos=True) for i, n in enumerate(lengths)]
            for kind, (bound, group) in [*kinds.items()][1:][:: -1 if number % 2 else 1]:
                run(kind, held if bound else free, group)
            if not number:  # warm
                for kind in kinds:
                    gaps[kind].clear()
                    waits[kind].clear()

    def tail(values: list[float]) -> float:
        return 1e3 * sorted(values)[int(0.99 * len(values))]

    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        each = [tail(of) / tail(alone) for of, alone in zip(gaps[kind], gaps["free"], strict=True)]
        values = [gap for of in gaps[kind] for gap in of]
        found[kind] = {
            "gaps": len(values), "p50": 1e3 * statistics.median(values), "p99": tail(values),
            "longest": 1e3 * max(values), "rounds": each, "waited": 1e3 * statistics.median(waits[kind]),
        }  # fmt: skip
    rows = []
    for kind, of in found.items():
        each = of["rounds"]
        spread = f"{statistics.median(each):.2f}x ({min(each):.2f}-{max(each):.2f})"
        times = [f"{of[name]:.2f}" for name in ("p50", "p99", "longest")]
        over = f"{of['p99'] / found['free']['p99']:.2f}x"
        rows.append([kind, str(of["gaps"]), *times, over, spread, f"{of['waited']:.1f}"])
    head = ["", "gaps", "p50", "p99", "longest", "p99, over free", "of rounds", "waited for a core, ms a second"]
    _show("Gaps of others' tokens, in ms", head, rows)
    return found


COMMANDS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "cost": cost, "parts": parts, "first": first, "valid": valid, "fuzz": fuzz,
    "beside": beside, "door": door,
}  # fmt: skip


def _show(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(report.as_text([report.Table(title, head, rows)], []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--answers", type=int, default=20)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    found = COMMANDS[options.what](options)
    OUT.mkdir(exist_ok=True)
    (OUT / f"structured_{options.what}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
