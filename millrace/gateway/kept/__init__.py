"""What replicas keep: things that one of them holds, and what all of them must have."""
