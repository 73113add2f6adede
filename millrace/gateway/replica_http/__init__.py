"""HTTP/1.1 to replicas: answers are handled where their bytes arrive, without a task switch per token."""
