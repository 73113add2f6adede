"""The adapters of an engine: where their files are, which are in host memory, and which have a slot on the device."""
