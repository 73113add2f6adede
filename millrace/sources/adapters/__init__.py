"""Where adapters come from, besides directories of this machine: the hub, and Ollama's Modelfiles."""
