"""One driver per engine, run with that engine's own python; all speak `peer_protocol`. They import nothing of the
project but that file (the planaria driver aside)."""
