"""How many drafts a step verifies, decided by what was measured."""
