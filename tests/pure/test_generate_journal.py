"""What is noted of sequences, for a program that is started again."""

from __future__ import annotations

from pathlib import Path

from planaria.generate_journal import GenerateJournal
from planaria.types import Delta, FinishReason, SamplingParams
from planaria.wire import Submit


def test_what_has_failed_is_tried_again(tmp_path: Path) -> None:
    """Tokens that came before are kept; an engine's death is not the end of what it generated."""
    submits = [Submit("r0-0", [1], SamplingParams(), 0, 9)]
    journal = GenerateJournal(tmp_path / "journal", submits)
    journal.add(Delta("r0-0", 0, [5]))
    journal.add(Delta("r0-0", 1, [], FinishReason.ERROR, error="rank 1 failed"))
    journal.close()
    again = GenerateJournal(tmp_path / "journal", submits)
    again.close()
    assert [(delta.tokens, delta.finish) for _, delta in again.kept.deltas] == [([5], None)]
