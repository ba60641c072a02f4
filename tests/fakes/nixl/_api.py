"""Memory is read with process_vm_readv, as UCX does on one machine, where its owner has registered it. An environment
variable FAKE_NIXL makes reads never end ("stuck") or fail ("error")."""

from __future__ import annotations

import ctypes
import json
import os
import time
from typing import Any

Region = tuple[int, int, int]
_libc = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class nixl_agent_config:
    def __init__(self, *, enable_prog_thread: bool, backends: list[str]) -> None:
        assert not enable_prog_thread  # it would never sleep
        self.backends = backends


class nixl_agent:
    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config) -> None:
        self.name = agent_name
        self.backends = {name: 1 for name in nixl_conf.backends if name in self.get_plugin_list()}
        self.regions: list[tuple[int, int]] = []
        self.others: dict[bytes, dict[str, Any]] = {}

    def get_plugin_list(self) -> list[str]:
        return ["POSIX", "UCX"]

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> None:
        assert mem_type == "DRAM"
        self.regions += [(address, size) for address, size, _, _ in reg_list]

    def get_agent_metadata(self) -> bytes:
        return json.dumps({"name": self.name, "pid": os.getpid(), "regions": self.regions}).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        about = json.loads(metadata)
        self.others[about["name"].encode()] = about
        return about["name"].encode()  # type: ignore[no-any-return]

    def remove_remote_agent(self, name: bytes) -> None:
        del self.others[name]

    def get_xfer_descs(self, descs: list[Region], mem_type: str) -> list[Region]:
        assert mem_type == "DRAM"
        return descs

    def initialize_xfer(self, op: str, into: list[Region], source: list[Region], other: bytes, notif: bytes) -> Any:
        assert op == "READ"
        return into, source, self.others[other]

    def transfer(self, handle: Any) -> str:
        if os.environ.get("FAKE_NIXL") == "stuck":
            return "PROC"
        into, source, other = handle
        for (address, size, _), (there, length, _) in zip(into, source, strict=True):
            if size != length or not any(at <= there and there + length <= at + most for at, most in other["regions"]):
                raise RuntimeError("NIXL_ERR_NOT_FOUND")
            here, far = _Vector(address, size), _Vector(there, length)
            if _libc.process_vm_readv(other["pid"], ctypes.byref(here), 1, ctypes.byref(far), 1, 0) != size:
                return "ERR"
        return "ERR" if os.environ.get("FAKE_NIXL") == "error" else "DONE"

    def check_xfer_state(self, handle: Any) -> str:
        time.sleep(0.01)
        return "PROC"

    def release_xfer_handle(self, handle: Any) -> None:
        """There is nothing to release."""
