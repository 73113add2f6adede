"""What the engine tells fronts: tokens, ends, figures, and which KV blocks are cached."""
