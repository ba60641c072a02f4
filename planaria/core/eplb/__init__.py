"""Expert load balancing: which experts to repeat, where to put them, and how they move while they are used."""
