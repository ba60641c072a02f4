"""A rank's place in a step on a device: hidden states go from device to device where the group takes them there."""

from __future__ import annotations

import torch

from planaria.mesh.comm import Array
from planaria.worker.stage import Stage


class TorchStage(Stage):
    """`forward` gives tensors on the device."""

    def _send_hidden(self, hidden: Array) -> None:
        pp = self.mesh.pp
        pp.send(hidden.cpu().numpy() if pp.device == "cpu" else hidden.contiguous(), pp.rank + 1)

    def _receive_hidden(self, num_tokens: int) -> None:
        pp = self.mesh.pp
        if pp.device == "cpu":
            super()._receive_hidden(num_tokens)
            return
        self.batch.arrived = torch.empty(num_tokens, self.hidden_size, device=pp.device)
        pp.receive(self.batch.arrived, pp.rank - 1)
