"""One way to keep a process: where it can be, what it is told, how it ends. Hosts keep them, a Pool deals them out."""
