"""What drafting tokens is worth: the same requests with and without it, in turn, and whether their tokens are the same.

    python -m benchmarks.speculation [--model smollm2] [--methods ngram,suffix] [--rounds 3] [--tokens 256]
        [--dtype bfloat16] [--quantization none] [--option name=value ...] [--isa generic]
        [--markdown PAGE]

Tasks that repeat much of their prompt (an edit of code, JSON written anew, a document quoted), one that repeats
nothing (at temperature 1: greedy answers of small models go round in circles), each as one stream, and 32 streams of
all of them at once. `suffix` remembers no other answers here, since rounds ask the same again. Tokens a second of the
answers, without their first tokens; medians of rounds; 1.00x is without drafts. --isa generic: our kernels for AVX2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from planaria import LLM, SamplingParams

FREE = "nothing to find"
CODE = '''def area(shape):
    """The area of a shape that is a dict."""
    kind = shape["kind"]
    if kind == "circle":
        return 3.14159 * shape["radius"] ** 2
    if kind == "square":
        return shape["side"] ** 2
    if kind == "rectangle":
        return shape["width"] * shape["height"]
    if kind == "triangle":
        return shape["base"] * shape["height"] / 2
    raise ValueError(f"no area is known for {kind}")
'''
RECORDS = json.dumps(
    [{"id": n, "name": f"user{n}", "email": f"user{n}@example.org", "active": n % 3 > 0} for n in range(8)], indent=1
)
REPORT = """The river was measured at four places in spring. At the first place, by the old bridge, it carried
forty cubic metres a second, more than in any year since the gauge was built. At the second place,
below the mill, a part of the water had left for the canal, and the gauge showed thirty-one. The
third place lies in the gorge, where nobody could reach the gauge before May; the figure there,
twenty-eight, is therefore of another month and should not be compared with the others. At the
fourth place, where the river meets the lake, the water stood so high that the gauge itself was
under it, and what it carried can only be estimated from the level of the lake, which rose by nine
centimetres a day."""
TASKS = {
    "code edit": f"Rename the function area to surface and change nothing else.\n\n{CODE}\nThe changed code:\n\n",
    "JSON rewrite": f'Write these records again, each with a field "group".\n\n{RECORDS}\n\nThe records:\n\n',
    "quoting": f"Document:\n\n{REPORT}\n\nRepeat the document word for word.\n\nDocument:\n\n",
    FREE: "Write a long story about a lighthouse keeper who learns to paint.\n\n",
}
CROWD = 32
GOALS = {FREE: 0.97, f"{CROWD} at once": 0.98}
GOAL, PACKED_GOAL = 1.8, 1.4  # of weights packed in 4 bits, of which a row costs a third of a step


def drafting(way: str) -> dict[str, Any] | None:
    """The configuration of a method; none for none."""
    if way == "suffix":
        return {"method": way, "suffix_decoding_max_cached_requests": 0}
    return {"method": way} if way else None


def prompts_of(task: str) -> list[str]:
    if task in TASKS:
        return [TASKS[task]]
    names = list(TASKS)
    return [f"{TASKS[names[i % len(names)]]}{i}. " for i in range(CROWD)]


def run(llm: LLM, task: str, tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens a second, and the tokens."""
    warm = float(task == FREE)
    params = SamplingParams(temperature=warm, seed=7, max_tokens=tokens, ignore_eos=True)
    told: list[tuple[float, int]] = []
    outputs = llm.generate(
        prompts_of(task),
        params,
        use_tqdm=False,
        on_tokens=lambda done, count: told.append((time.perf_counter(), count)),
    )
    (first, skipped), last = told[0], told[-1][0]
    count = sum(number for _, number in told) - skipped
    return count / (last - first), [output.outputs[0].token_ids for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", default="ngram,suffix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--option", action="append", default=[], help="of LLM, name=value")
    parser.add_argument("--isa")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    if given.isa:
        from planaria.kernels.cpu import ops
        from planaria.kernels.cpu.target import Target

        vars(ops)["target_for"] = lambda dtype, isa: Target(dtype, given.isa)
    usual = GOAL if given.quantization == "none" else PACKED_GOAL
    options: dict[str, Any] = {"dtype": given.dtype, "quantization": given.quantization, "max_model_len": 2048}
    for said in given.option:
        name, _, value = said.partition("=")
        options[name] = int(value) if value.isdigit() else value
    ways = ["", *given.methods.split(",")]
    engines = {
        way: LLM(given.model, speculative_config=drafting(way), kv_cache_memory="2GiB", **options) for way in ways
    }
    tasks = [*TASKS, f"{CROWD} at once"]
    rates: dict[tuple[str, str], list[float]] = {(task, way): [] for task in tasks for way in ways}
    differ: list[str] = []
    for number in range(given.rounds + 1):  # the first round warms up
        for task in tasks:
            found = {way: run(llm, task, given.tokens) for way, llm in engines.items()}
            for way, (rate, tokens) in found.items():
                if number:
                    rates[task, way].append(rate)
                if tokens != found[""][1]:
                    differ.append(f"{task}, {way}")
    rows = []
    for task in tasks:
        plain = statistics.median(rates[task, ""])
        row = [task, f"{plain:.0f}"]
        for way in ways[1:]:
            ratios = [a / b for a, b in zip(rates[task, way], rates[task, ""], strict=True)]
            row.append(f"{statistics.median(rates[task, way]):.0f} ({statistics.median(ratios):.2f}x)")
        rows.append([*row, f"{GOALS.get(task, usual):.2f}x"])
    head = ["task", "no drafts, tok/s", *[f"{way}, tok/s" for way in ways[1:]], "goal"]
    table = report.Table("Drafts", head, rows)
    print(report.as_text([table], []))
    for way in ways[1:]:
        drafts = engines[way].stats.drafts
        assert drafts is not None
        right = sum(drafts.accepted)
        print(f"{way}: {drafts.drafted} drafts checked, {right} right")
    print(f"other tokens: {', '.join(sorted(set(differ))) or 'none'}")
    for llm in engines.values():
        llm.close()
    if given.markdown:
        report.write_between(given.markdown, "speculation", report.as_markdown([table], []))
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
