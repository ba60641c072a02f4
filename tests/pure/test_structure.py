"""The shape of the package: one meaning a name, no circles between packages, no class that has grown too large."""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "planaria"
LARGEST_CLASS = 300  # lines


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All below it, at any depth."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()) if not isinstance(tree, ast.expr) else ():
            yield node
            yield from statements(node)


@cache
def package() -> tuple[list[tuple[str, Path, int]], set[tuple[str, str]]]:
    """Of all classes their name, module and lines; which package imports which."""
    classes, edges = [], set()
    gc.disable()  # it would look at a million nodes again and again
    try:
        for file in sorted(ROOT.rglob("*.py")):
            path = file.relative_to(ROOT)
            for node in statements(ast.parse(file.read_text())):
                names = list[str]()
                match node:
                    case ast.ClassDef(name=name, lineno=first, end_lineno=last):
                        classes.append((name, path, (last or 0) - first + 1))
                    case ast.ImportFrom(module=str(module), level=0):
                        names = [f"{module}.{alias.name}" for alias in node.names]
                    case ast.Import():
                        names = [alias.name for alias in node.names]
                own = [part[1] for name in names if (part := name.split("."))[0] == "planaria" and part[1:]]
                edges |= {(path.parts[0].removesuffix(".py"), other) for other in own}
    finally:
        gc.enable()
    return classes, edges


def test_no_class_has_anothers_name() -> None:
    places = defaultdict(list)
    for name, path, _ in package()[0]:
        places[name].append(str(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_class_is_larger_than_a_few_pages() -> None:
    assert not [(name, str(path), lines) for name, path, lines in package()[0] if lines > LARGEST_CLASS]


def test_no_two_packages_import_each_other() -> None:
    _, edges = package()
    assert not {edge for edge in edges if edge[::-1] in edges and edge[0] < edge[1]}
