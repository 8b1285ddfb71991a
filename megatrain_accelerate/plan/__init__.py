"""Which modules stream, and how much memory a run will take."""
