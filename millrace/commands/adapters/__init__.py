"""Commands that use LoRA adapters: merge, create."""
