"""What is kept for later: stored completions, prompts in the cache."""
