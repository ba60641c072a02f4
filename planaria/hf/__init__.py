"""Models that are run by Transformers' own code, with keys and values in paged caches (docs/adr/0054)."""
