"""Commands that make and use LoRA adapters: train-adapter, merge."""
