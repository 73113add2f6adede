"""The engine's own scheduler and cycle under a virtual clock: steps are priced instead of computed.

`replica.py` drives a cycle, `priced_runner.py` stands for the device, `profile.py` says what a step costs. Nothing here
decides anything that the engine decides.
"""
