"""The shape of the package: one meaning a name, no circles between packages, no class that has grown too large."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "planaria"
LARGEST_CLASS = 300  # lines


@cache
def modules() -> dict[Path, ast.Module]:
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def classes() -> list[tuple[str, Path, int]]:
    """Name, module and lines of each."""
    return [
        (node.name, path, (node.end_lineno or 0) - node.lineno + 1)
        for path, tree in modules().items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]  # fmt: skip


def test_no_class_has_anothers_name() -> None:
    places = defaultdict(list)
    for name, path, _ in classes():
        places[name].append(str(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_class_is_larger_than_a_few_pages() -> None:
    assert not [(name, str(path), lines) for name, path, lines in classes() if lines > LARGEST_CLASS]


def test_no_two_packages_import_each_other() -> None:
    edges = set()
    for path, tree in modules().items():
        package = path.parts[0].removesuffix(".py")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            edges |= {(package, part[1]) for name in names if (part := name.split("."))[0] == "planaria" and part[1:]}
    assert not {edge for edge in edges if edge[::-1] in edges and edge[0] < edge[1]}
