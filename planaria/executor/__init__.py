"""Starting ranks, talking to them, and the loop that drives a core with them. Never imports the worker: it is handed in."""
