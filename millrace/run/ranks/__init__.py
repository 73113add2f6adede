"""Other ranks: they run the steps of rank 0 from the same bytes, in the same order."""
