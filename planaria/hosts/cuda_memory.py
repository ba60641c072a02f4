"""A CUDA device's memory by the driver's own calls: allocations that other processes can have by a descriptor.

Not run on hardware. Nothing here needs torch; a process without a context may reserve and export, and who maps has one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from typing import Any

Handle = ctypes.c_ulonglong
Address = ctypes.c_ulonglong

PINNED, POSIX_FD, ON_DEVICE, SMALLEST = 1, 1, 1, 0  # of types of allocation, handle and location; of granularities
READ, READ_WRITE = 1, 3
NO_CONTEXT = "(201)"


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DeviceBytes:
    """Addresses on a device; `mapping` holds them. Other libraries read them by `__cuda_array_interface__`, and keep
    this as long as they do."""

    def __init__(self, mapping: object, address: int, size: int) -> None:
        self._mapping, self.address, self._size = mapping, address, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self._size)
        return DeviceBytes(self._mapping, self.address + start, max(0, stop - start))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # torch takes nothing that says it is read-only: what it is mapped for, the device sees to
        return {"shape": (self._size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 2}


class _Mapping:
    """keeps: what is to be there as long as this."""

    def __init__(self, driver: Driver, device: int, address: int, size: int, keeps: object) -> None:
        self.keeps = keeps
        weakref.finalize(self, driver.unmap, device, address, size).atexit = False


class Driver:
    """The calls. library: libcuda, or what stands in for it. Raises OSError: what the driver says."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *args: Any) -> None:
        try:
            code = int(getattr(self._library, name)(*args))
        except AttributeError:
            raise OSError(f"this CUDA driver has no {name}") from None
        if code:
            why = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(why))
            raise OSError(f"{name}: {(why.value or b'an unknown error').decode()} ({code})")

    def enter(self, device: int) -> None:
        """Have the calling thread in the device's primary context, which is torch's: one that hasn't computed yet is in
        none, and calls that wait for the device, or write to it, need one."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
            self.call("cuCtxSetCurrent", context)

    def unmap(self, device: int, address: int, size: int) -> None:
        """Once nothing on the device uses it; in any thread. After a fault of the device there is nothing to be
        done."""
        with contextlib.suppress(OSError):
            self.enter(device)
        for name, args in (
            ("cuCtxSynchronize", ()),
            ("cuMemUnmap", (Address(address), ctypes.c_size_t(size))),
            ("cuMemAddressFree", (Address(address), ctypes.c_size_t(size))),
        ):
            getattr(self._library, name)(*args)


@functools.cache
def driver() -> Driver:
    """Raises OSError: there is none here."""
    return Driver(ctypes.CDLL("libcuda.so.1"))


class CudaAllocator:
    """See Allocator. device: as this process numbers them."""

    kind = "cuda"

    def __init__(self, device: int, using: Driver | None = None) -> None:
        self._driver, found = using or driver(), ctypes.c_int()
        self._driver.call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(device))
        self._where = _Location(ON_DEVICE, found.value)
        self._properties = _Properties(type=PINNED, handles=POSIX_FD, location=self._where)
        page = ctypes.c_size_t()
        self._driver.call(
            "cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(self._properties), ctypes.c_int(SMALLEST)
        )
        self._page = max(1, page.value)

    def reserve(self, size: int) -> tuple[Any, int]:
        handle, size = Handle(), -(-size // self._page) * self._page
        args = ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._properties), ctypes.c_ulonglong(0)
        try:
            self._driver.call("cuMemCreate", *args)
        except OSError as e:
            if NO_CONTEXT not in str(e):
                raise
            self._driver.enter(self._where.id)  # it takes memory, so only where the driver wants one for this, too
            self._driver.call("cuMemCreate", *args)
        return handle.value, size

    def export(self, handle: Any) -> int:
        fd = ctypes.c_int(-1)
        self._driver.call(
            "cuMemExportToShareableHandle", ctypes.byref(fd), Handle(handle), ctypes.c_int(POSIX_FD),
            ctypes.c_ulonglong(0),
        )  # fmt: skip
        return fd.value

    def free(self, handle: Any) -> None:
        self._driver.call("cuMemRelease", Handle(handle))

    def map(self, fd: int, size: int, *, writable: bool, keeps: object = None) -> DeviceBytes:
        handle, address, length = Handle(), Address(), ctypes.c_size_t(size)
        call = self._driver.call
        self._driver.enter(self._where.id)
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), ctypes.c_int(POSIX_FD))
        try:
            call(
                "cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), Address(0),
                ctypes.c_ulonglong(0),
            )  # fmt: skip
            try:
                call("cuMemMap", address, length, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
                try:
                    if writable or not self._may_be_read_only(address, length):
                        self._allow(address, length, READ_WRITE)
                except OSError:
                    call("cuMemUnmap", address, length)
                    raise
            except OSError:
                call("cuMemAddressFree", address, length)
                raise
        finally:
            call("cuMemRelease", handle)  # the mapping has it
        made = _Mapping(self._driver, self._where.id, address.value, size, keeps)
        return DeviceBytes(made, address.value, size)

    def _may_be_read_only(self, address: Address, length: ctypes.c_size_t) -> bool:
        """Some drivers map a device's own memory for writing only; then nobody writes, by agreement."""
        try:
            self._allow(address, length, READ)
        except OSError:
            return False
        return True

    def _allow(self, address: Address, length: ctypes.c_size_t, flags: int) -> None:
        access = _Access(self._where, flags)
        self._driver.call("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))

    def clear(self, mapped: DeviceBytes) -> None:
        self._driver.enter(self._where.id)
        size = ctypes.c_size_t(len(mapped))
        self._driver.call("cuMemsetD8_v2", Address(mapped.address), ctypes.c_ubyte(0), size)
        self._driver.call("cuCtxSynchronize")
