"""What can go wrong, made to go wrong: loads and faults against a real server, each with what must still hold."""
