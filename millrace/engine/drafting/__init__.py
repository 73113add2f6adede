"""The drafter that an engine starts with: found, checked against the target, loaded."""
