"""A worker whose libraries for GPUs are stand-ins (tests/model/fake_libraries.py), between processes: what is exchanged
goes over the group that they are given. On a CPU ranks pass NumPy arrays where on a device they pass tensors."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from planaria.config.all2all import EXCHANGES
from planaria.mesh.all2all import All2All, Shapes, adapters
from planaria.worker.worker import Worker
from tests.model.fake_libraries import World, install


class ProcessWorld(World):
    """The ranks of a group."""

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.calls = group, group.size, []

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        self.calls.append((rank, what))
        found = []
        for source in range(self.size):
            data = np.frombuffer(pickle.dumps(value), np.uint8).copy() if source == rank else np.empty(0, np.uint8)
            size = np.array([len(data)])
            self.group.broadcast(size, source)
            data = data if source == rank else np.empty(int(size[0]), np.uint8)
            self.group.broadcast(data, source)
            found.append(pickle.loads(data.tobytes()))
        return found


class WithTensors:
    """An adapter over stand-ins. `made`: of this process, each with its calls."""

    made: ClassVar[list[WithTensors]] = []

    def __init__(self, adapter: Callable[..., All2All], group: Any, shapes: Shapes) -> None:
        self.world = ProcessWorld(group)
        install(sys.modules.__setitem__, self.world)
        self.adapter = adapter(group, shapes)
        self.made.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    def dispatch(self, parts: Sequence[Any], into: Sequence[Any]) -> None:
        self.adapter.dispatch([tensor(part) for part in parts], [tensor(part) for part in into])

    def combine(self, y: Any, out: Any) -> None:
        self.adapter.combine(tensor(y), tensor(out))


def tensor(x: Any) -> torch.Tensor:
    """Of the same memory."""
    made = torch.from_numpy(x)
    return made.view(torch.bfloat16) if x.dtype == np.uint16 else made


for _way in EXCHANGES.values():
    if _way.library:
        _name = _way.made_by.partition(":")[2]
        setattr(adapters, _name, functools.partial(WithTensors, getattr(adapters, _name)))


class LibraryWorker(Worker):
    def calls(self) -> list[str]:
        """Of the exchange of this epoch."""
        return [what for _, what in WithTensors.made[-1].world.calls]
