"""Numbers that NumPy has not, against torch: every float16, bfloat16 and float8, float32 at every rounding."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from planaria.kernels.numbers import float8_values, in_parts, to_bfloat16, to_float32
from tests.model.tensors import tensor

EVERY = np.arange(1 << 16, dtype=np.uint16)


def bits(x: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """A NaN is a NaN."""
    found: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = x.view(torch.int32).where(~x.isnan(), 1).numpy()
    return found


def test_bfloat16_is_what_torch_makes_of_it() -> None:
    wide = to_float32(EVERY)
    assert (bits(tensor(wide)) == bits(tensor(EVERY).float())).all()
    assert (bits(tensor(to_float32(to_bfloat16(wide)))) == bits(tensor(wide))).all()
    # every bfloat16 and what lies around the middle between it and the next
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (EVERY.astype(np.uint32)[:, None] << 16 | low).view(np.float32)
    rounded = to_float32(to_bfloat16(values))
    assert (bits(tensor(rounded)) == bits(tensor(values).bfloat16().float())).all()
    assert to_bfloat16(EVERY) is EVERY and to_float32(wide) is wide


def test_float16_is_exact() -> None:
    halves = EVERY.view(np.float16)
    finite = halves[np.isfinite(halves)]
    for values in (finite, halves, np.tile(finite, (3, 2))[:, ::2]):
        exact = values.astype(np.float32)
        assert (bits(tensor(to_float32(values))) == bits(tensor(exact))).all()
        assert (to_bfloat16(values) == to_bfloat16(exact)).all()


@pytest.mark.parametrize(("kind", "dtype"), [("f8_e4m3", torch.float8_e4m3fn), ("f8_e5m2", torch.float8_e5m2)])
def test_float8_is_what_torch_makes_of_it(kind: str, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    assert (bits(tensor(float8_values(kind))) == bits(every)).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_are_done_once_each_and_errors_are_told(threads: int) -> None:
    done, who = np.zeros(100, np.int64), set[str]()

    def work(first: int, last: int) -> None:
        done[first:last] += 1
        who.add(threading.current_thread().name)

    in_parts(100, 7, threads, work)
    in_parts(0, 7, threads, work)
    assert (done == 1).all() and (threads > 1) == all(name.startswith("planaria-load") for name in who)

    def fails(first: int, last: int) -> None:
        raise ValueError(f"at {first}")

    with pytest.raises(ValueError, match="at 0"):
        in_parts(100, 50, threads, fails)
