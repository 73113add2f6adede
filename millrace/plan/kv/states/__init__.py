"""Slots and checkpoints of recurrent states."""
