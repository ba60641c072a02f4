"""A rank whose device fails once, when a file is there that says so."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from planaria.protocol import Command, Reply, StepPlan
from planaria.worker.guard import guard
from planaria.worker.worker import Worker

FILE = "TEST_DEVICE_FAULT"


class FaultyRank(Worker):
    def handle(self, command: Command) -> Reply:
        if isinstance(command, StepPlan) and self.rank == 0:
            return guard(self.rank, "step", lambda: self._fail_or_step(command))
        return super().handle(command)

    def _fail_or_step(self, command: StepPlan) -> Reply:
        file = Path(os.environ[FILE])
        if file.exists():
            file.unlink()
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return super().handle(command)
