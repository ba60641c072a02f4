"""How ranks reach one another: axes by name, and what a rank can do along each. Nothing here starts a process."""
