"""The CPU's shortcut: a whole step, from the request table to drawn tokens, in one C++ call."""
