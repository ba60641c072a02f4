"""Each rank of a node gets an accelerator of its own, by the number it has for the node and for the process."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from planaria.config import machine, system
from planaria.config.options import EngineOptions, ParallelConfig
from planaria.config.resolve import check_torch, device_config, resolve
from planaria.env import visible, visible_devices
from planaria.errors import ConfigError, UserError
from planaria.executor import preflight
from planaria.executor.watch import System
from planaria.hosts.local import LocalHost
from planaria.topology.platforms import CUDA, MASKS, PLATFORMS, SERVED
from planaria.worker.device import own_device


@pytest.mark.parametrize(
    ("mask", "ids"),
    [(None, [0, 1, 2, 3]), ("2,3", [2, 3]), ("3,1", [3, 1]), ("GPU-aa,GPU-bb", [0, 1]), ("", []), ("-1", [])],
)
def test_what_a_node_has_and_which_is_the_ranks(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, ids: list[int]
) -> None:
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(4)])
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert machine.accelerator_ids() == ids
    # a rank's process sees what its launcher sees: local rank i uses the i-th of them
    assert [own_device((id,), visible(CUDA)) for id in ids] == list(range(len(ids)))


def test_a_device_that_is_listed_twice_has_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(2)])
    for mask, ids, told in (("1,1", [1, 1], "1"), ("0,1,0", [0, 1, 0], "0,1"), ("0,1", [0, 1], None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert (machine.accelerator_ids(), machine.num_accelerators()) == (ids, len(ids))
        # what its ranks' processes are told has each once, and each finds its own there
        assert visible_devices(CUDA, []) == ({"CUDA_VISIBLE_DEVICES": told} if told else {})
        assert own_device((ids[-1],), (told or mask).split(",")) == (told or mask).split(",").index(str(ids[-1]))
    assert visible_devices(CUDA, [1, 1]) == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a CPU and two devices, as AMD's driver lists them, and a torch that was built for them."""
    for number, id in enumerate(("0", "4096", "8192")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "gpu_id").write_text(f"{id}\n")
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n")
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: spec)
    own = [str(path) for path in tmp_path.glob("*/gpu_id")]
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: own if pattern == PLATFORMS["rocm"].files else [])


def test_rocm_is_found_and_masked_as_cuda_is(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for mask in MASKS:
        monkeypatch.delenv(mask, raising=False)
    assert (machine.usable_platform().name, machine.accelerator_ids()) == ("rocm", [0, 1])
    assert visible_devices(machine.present_platform(), [1]) == {"HIP_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.accelerator_ids() == [1]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert machine.num_accelerators() == 0 and machine.usable_platform().name == "cpu"


def test_a_torch_that_was_built_for_another_device_is_of_no_use(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [f"/dev/nvidia{i}" for i in range(2)]
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: there if pattern == CUDA.files else [])
    assert machine.present_platform() is CUDA and machine.usable_platform().name == "cpu"


@pytest.mark.parametrize("name", [name for name, each in PLATFORMS.items() if each not in SERVED])
def test_others_are_refused_by_name_before_anything_is_read(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--device {name}: ranks don't compute on .*; use --device cpu or cuda or"):
        resolve(EngineOptions(model="/nowhere", device=name))


def test_what_is_served_lacks_nothing() -> None:
    for each in SERVED:
        assert each.torch and each.resource and each.collective and each.step_tokens
        assert each.on_host or (each.masks and each.files and each.build and each.graphs)


def test_a_rank_to_which_none_was_dealt_uses_the_first() -> None:
    assert own_device((), ["3"]) == 0 and own_device((3,), ["3"]) == 0


def on(monkeypatch: pytest.MonkeyPatch, name: str, processor: str) -> None:
    monkeypatch.setattr(system, "sys", types.SimpleNamespace(platform=name))
    monkeypatch.setattr(system, "platform", types.SimpleNamespace(machine=lambda: processor))


@pytest.mark.parametrize(
    ("name", "processor", "kernels", "processes"),
    [
        ("linux", "x86_64", "native", True), ("linux", "aarch64", "native", True), ("linux", "riscv64", "torch", True),
        ("darwin", "arm64", "torch", False), ("darwin", "x86_64", "torch", False), ("win32", "AMD64", "torch", False),
    ],
)  # fmt: skip
def test_which_kernels_are_for_which_system(
    monkeypatch: pytest.MonkeyPatch, name: str, processor: str, kernels: str, processes: bool
) -> None:
    on(monkeypatch, name, processor)
    device = device_config(EngineOptions(model="m"), "cpu", "float32", packed=False, ranks=1)
    assert device.kernels == kernels and bool(system.no_processes()) is not processes
    if not processes:
        with pytest.raises(UserError, match=f"pidfds .* {name}; `planaria generate`"):
            LocalHost(devices=())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kernels": "native"}, "--kernels native: .* futexes, and this is darwin; use --kernels torch"),
        ({"batch_invariant": True}, "--batch-invariant True: .* not --kernels torch"),
    ],
)
def test_what_another_system_lacks_is_named(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str) -> None:
    on(monkeypatch, "darwin", "arm64")
    with pytest.raises(ConfigError, match=says):
        device_config(EngineOptions(model="m", **given), "cpu", "float32", packed=False, ranks=1)


def test_another_system_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "darwin", "arm64")
    device = device_config(EngineOptions(model="m"), "cpu", "float32", packed=False, ranks=1)
    with pytest.raises(
        ConfigError, match=r"PyTorch is not installed .* this is darwin; pip install \"planaria\[torch\]\"$"
    ):
        check_torch(device, ParallelConfig(), machine.Machine(torch_installed=False))


def test_one_rank_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it asks for none of what a system that isn't Linux lacks."""
    monkeypatch.setattr(preflight.futex, "available", lambda: "darwin has no futex")
    assert not System().problems(1) and "futex" in System().problems(2)[0]
