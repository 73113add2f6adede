"""A fleet on one machine, from one file: starts replicas and the gateway, watches and restarts them, and says how they
are. The gateway finds the replicas in a file that this room writes."""
