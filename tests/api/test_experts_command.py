"""`planaria experts` from what a server said: the table, the picture, and one line for what is missing."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from planaria.cli import experts, experts_plot
from planaria.errors import PlanariaError, UserError

LAYER = {"layer": 3, "load": [30, 10, 10, 10], "slots": [0, 1, 2, 3], "rank_loads": [40.0, 20.0], "balancedness": 0.75}
ENGINE = {
    "engine": 0, "ranks": 2, "steps": 1000, "balancedness": 0.75, "rearrangements": 2, "rearranging": False,
    "seconds_since": 1.5, "bytes_moved": 3 << 20, "bytes_needed": 3 << 20,
}  # fmt: skip


def saved(tmp_path: Path, *engines: dict[str, Any]) -> Path:
    path = tmp_path / "experts.json"
    path.write_text(json.dumps({"engines": engines}))
    return path


def show(path: Path, plot: Path | None = None, as_json: bool = False) -> None:
    experts.run(url=None, admin_key=None, saved=path, plot=plot, as_json=as_json)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(saved(tmp_path, {**ENGINE, "layers": [LAYER]}))
    said, _, row, *_ = capsys.readouterr().out.splitlines()
    assert said == ("engine 0: 2 ranks, load of 1,000 steps, balancedness 0.750, 2 rearrangements, 3.0 MiB moved")
    assert row.split() == ["0", "3", "60", "2.00", "1.33", "0.750"]


def test_json_is_what_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, {**ENGINE, "layers": [LAYER]})
    show(path, as_json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


@pytest.mark.parametrize("engines", [(), ({**ENGINE, "layers": []},)])
def test_a_server_that_balances_nothing(tmp_path: Path, engines: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(UserError, match="still loading, or was started without --enable-expert-parallel --enable-eplb"):
        show(saved(tmp_path, *engines))


def test_files_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone: can't be read: No such file"):
        show(tmp_path / "gone")
    (tmp_path / "other").write_text('{"engines": [{"engine": "x"}]}')
    with pytest.raises(UserError, match=r"other: is not what planaria experts --json prints"):
        show(tmp_path / "other")


def test_a_picture_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, {**ENGINE, "layers": [LAYER]})
    with pytest.raises(UserError, match=r"out\.txt: a picture ends in \.png, \.svg, \.pdf"):
        show(path, tmp_path / "out.txt")
    monkeypatch.setattr(experts_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanariaError, match=r"pip install 'planaria\[plot\]'"):
        show(path, tmp_path / "out.png")


@pytest.mark.parametrize("layers", [1, pytest.param(40, marks=pytest.mark.long)])
def test_a_picture(tmp_path: Path, layers: int) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot (matplotlib) is not installed")
    engine = {**ENGINE, "layers": [{**LAYER, "layer": i} for i in range(layers)]}
    path = saved(tmp_path, engine, {**engine, "engine": 1})
    show(path, tmp_path / "out.png")
    data = (tmp_path / "out.png").read_bytes()
    assert struct.unpack(">I", data[16:20]) == (1950,) and len(data) > 20_000
    show(path, tmp_path / "out.svg")
    text = (tmp_path / "out.svg").read_text()
    assert all(f">{words}<" in text for words in ("tokens of each expert", "tokens of each rank", "layer", "1x"))
    assert "matplotlib.pyplot" not in sys.modules  # which would look for a display
    with pytest.raises(UserError, match="can't be written"):
        show(path, tmp_path / "no" / "out.png")
