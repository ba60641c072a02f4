"""The diffs of CONTRIBUTING.md: each applies to what there is, touches three files or fewer, and does what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 3  # files

TRY = """
import numpy as np
from planaria.mesh.all2all import Shapes, make
from planaria.models import model_config
from planaria.protocol import Fresh
from planaria.server.schema import CompletionRequest
from planaria.types import SamplingParams
from planaria.worker.sampler import _Row
from tests.model.checkpoints import TINY
from tests.model.test_models import BY_NAME
from tests.pure import test_api_fields, test_options

wide = {**TINY, "num_key_value_heads": 2, "architectures": ["StarfishForCausalLM"]}
assert model_config(wide).attention_bias and BY_NAME["starfish"].overrides == {"num_key_value_heads": 2}

asked = CompletionRequest(prompt="x", no_repeat_ngram_size=2)
row = _Row(Fresh([5, 6, 7, 5], 4, SamplingParams(no_repeat_ngram_size=asked.no_repeat_ngram_size), 0), 10)
assert row.edits and row.changes()[0].tolist() == [6]

class Group:
    size, rank = 2, 0

shapes = Shapes(max_tokens=8, num_slots=4, top_k=2, hidden_size=16)
assert type(make("ring", Group(), shapes)).__name__ == "Ring"
for file, page in ((test_options.DOCS, test_options.page()), (test_api_fields.PAGE, test_api_fields.page())):
    assert file.read_text() != page, file
"""


def test_each_applies_and_does_what_it_says(tmp_path: Path) -> None:
    diffs = re.findall(r"^```diff\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(diffs) == 3
    for folder in ("planaria", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    for page in ("options.md", "api-fields.md"):
        shutil.copy(ROOT / "docs" / page, tmp_path / "docs")
    for diff in diffs:
        files = re.split(r"^(?:---|\+\+\+) (\S+).*\n", diff, flags=re.MULTILINE)[1:]
        assert 1 <= len(files) // 2 <= MOST
        for name, lines in zip(files[::2], files[1::2], strict=True):
            apply(tmp_path / name, lines.splitlines())
    done = subprocess.run([sys.executable, "-c", TRY], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def apply(path: Path, diff: list[str]) -> None:
    """Lines with + stand behind the one that is shown before them, or at the beginning of a new file."""
    before = path.read_text().splitlines() if path.exists() else []
    at = 0
    for line in diff:
        if line[0] == " ":
            assert before.count(line[1:]) == 1, f"{path.name} has this line {before.count(line[1:])} times: {line[1:]}"
            at = before.index(line[1:]) + 1
        else:
            assert line[0] == "+" and (at or not path.exists())
            before.insert(at, line[1:])
            at += 1
    path.write_text("\n".join(before) + "\n")
