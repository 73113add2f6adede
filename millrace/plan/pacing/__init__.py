"""How long steps take, as measured, and what prompts may take from rows that decode."""
