"""LoRA adapters: PEFT directories are read and validated on the host, then copied to slots on the device.

A step's tokens name their slots; the decoder adds each one's low-rank product to the output of its linears.
"""
