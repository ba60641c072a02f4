"""Imports collect nothing, and afterwards all is as it was."""

from __future__ import annotations

import gc

import pytest

from planaria.preload import importing


def test_nothing_is_collected_while_something_is_imported() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
