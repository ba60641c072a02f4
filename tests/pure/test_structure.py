"""The shape of the package: one meaning a name, no circles between packages, no class that has grown too large."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "planaria"
LARGEST_CLASS = 300  # lines


# Read as text: parsing all of the package takes a second and a half.
CLASS = re.compile(r"^ *class (\w+)(?:\[.*\])?[(:]", re.MULTILINE)
ALIAS = re.compile(r"^([A-Z]\w*[a-z]\w*) = (?!Any$)", re.MULTILINE)  # of a type
WHOLE_CLASS = re.compile(r"^class .*\n(?:(?:[ )#].*)?\n)*", re.MULTILINE)  # to the next line at the margin
IMPORT = re.compile(r"^ *(?:from|import) planaria\b(?:\.(\w+)|(?: import (\([^)]*\)|.*))?)", re.MULTILINE)


@cache
def package() -> dict[Path, str]:
    """The text of each module."""
    return {file.relative_to(ROOT): file.read_text() for file in sorted(ROOT.rglob("*.py"))}


def imports() -> Iterator[tuple[str, str]]:
    """Which package or module of the package imports which."""
    for path, text in package().items():
        for module, names in IMPORT.findall(text):
            for other in [module] if module else re.findall(r"(\w+)(?: as \w+)?", names):
                yield path.parts[0].removesuffix(".py"), other


def test_the_search_finds() -> None:
    text = (
        "import planaria.a\n    from planaria.b.x import f\n"
        "from planaria import (\n    c as d,\n    e,\n)\nfrom planaria import f\n"
    )
    found = [module or re.findall(r"(\w+)(?: as \w+)?", names) for module, names in IMPORT.findall(text)]
    assert found == ["a", "b", ["c", "e"], ["f"]]
    assert CLASS.findall("class A:\n    class B(C):\nclass D[T](E[T]):\n# class F:\n") == ["A", "B", "D"]
    assert WHOLE_CLASS.findall("class A(\n    B\n):\n    x = 1\n\n    y = 2\ndef f():\n    ...\n") == [
        "class A(\n    B\n):\n    x = 1\n\n    y = 2\n"
    ]


def test_no_class_has_anothers_name() -> None:
    places = defaultdict(list)
    for path, text in package().items():
        for name in CLASS.findall(text):
            places[name].append(str(path))
    assert len(places) > 500
    assert not {name: where for name, where in places.items() if len(where) > 1}
    aliases = [(name, str(path)) for path, text in package().items() for name in ALIAS.findall(text)]
    assert len(aliases) > 50
    assert not [alias for alias in aliases if alias[0] in places], "a type that is called as a class is"


def test_no_class_is_larger_than_a_few_pages() -> None:
    classes = [(path, whole.rstrip()) for path, text in package().items() for whole in WHOLE_CLASS.findall(text)]
    assert len(classes) > 500
    assert not [(whole.splitlines()[0], path) for path, whole in classes if whole.count("\n") >= LARGEST_CLASS]


def test_no_two_packages_import_each_other() -> None:
    edges = set(imports())
    assert len(edges) > 100
    assert not {edge for edge in edges if edge[::-1] in edges and edge[0] < edge[1]}


def test_what_the_architecture_calls_pure_the_import_contract_holds() -> None:
    """A package as a whole, or each module by name."""
    held = set(re.findall(r"^    planaria\.([\w.]+)$", (ROOT.parent / ".importlinter").read_text(), re.MULTILINE))
    tree = (ROOT.parent / "docs" / "ARCHITECTURE.md").read_text().partition("## 2. Layout")[2].partition("## 3")[0]
    package, found = "", set[str]()
    for line in tree.splitlines():
        package = begun[1] if (begun := re.match(r"  (\w+)/", line)) else package
        if pure := re.search(r" PURE +(.*)", line):
            listed = re.sub(r"\([^)]*\)", "", pure[1])
            found |= {f"{package}.{name.strip('/ ').removesuffix('.py')}" for name in re.split(r"[,·]", listed)}
    assert {"hosts.pool", "executor.health", "server.kept", "core.router"} <= found
    assert not {module for module in found if module not in held and module.partition(".")[0] not in held}


def test_no_rank_imports_a_module_of_tests() -> None:
    """With pytest, torch and Transformers, for seconds of a processor each: a class that ranks are told of by its path
    is in a module of its own."""
    files, told = [*(ROOT.parent / "tests").rglob("*.py")], re.compile(r"[\"']tests\.\w+\.test_\w+\.[A-Z]")
    assert len(files) > 200
    assert not [file for file in files if told.search(file.read_text())]
