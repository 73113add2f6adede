"""The packet: the int32 array that the host sends to the GPU for each step, and the ring buffers that carry it.

Start with `step_packet.py`.
"""
