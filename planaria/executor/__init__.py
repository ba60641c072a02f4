"""Starting ranks, talking to them, and the loop that drives a core. The worker is handed in, never imported."""
