"""Requests that say nothing get the model's own sampling parameters; those that do get what they say."""

from __future__ import annotations

import pytest

from planaria.types import SamplingParams

DEFAULTS = SamplingParams(temperature=0.25, top_p=0.9, top_k=7, min_p=0.05, repetition_penalty=1.1)


@pytest.mark.parametrize("chat", [True, False])
async def test_defaults_and_what_is_said(start, chat: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    said = {"temperature": 1.0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1.0}
    async with start(sampling_defaults=DEFAULTS) as server, server.http() as http:
        for more in ({}, {"temperature": None, "top_p": 0.5}, said):
            assert (await http.post(path, json={**asked, **more, "max_tokens": 2})).status_code == 200
        silent, one, all_of_them = [submit.params for submit in server.engine.submitted]
        names = list(said)
        assert [getattr(silent, name) for name in names] == [getattr(DEFAULTS, name) for name in names]
        assert (one.temperature, one.top_p, one.top_k) == (0.25, 0.5, 7)
        assert [getattr(all_of_them, name) for name in names] == list(said.values())
