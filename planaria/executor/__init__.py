"""Starting ranks, talking to them, and the loop that drives a core with them. The worker is handed in, never imported."""
