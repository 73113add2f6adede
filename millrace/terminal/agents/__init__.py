"""The coding agents that `millrace launch` starts, and how each is told which server and model to use."""
