"""`python -m tests.proc.hands_over serve ...`: Planaria, but that prompts are handed over however long that takes: what
a small model computes is there sooner than a busy machine has connected, and then nothing is handed over any more."""

import sys

from planaria.cli import main
from planaria.server import prefill

prefill.MOST = prefill.LEAST
setattr(prefill.HandOvers, "_sooner_beside", lambda self, tokens, left: False)  # noqa: B010

if __name__ == "__main__":
    sys.exit(main())
