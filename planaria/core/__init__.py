"""The deciding column: pure state machines. No torch, sockets, threads, clock or randomness in here."""
