"""Reasoning: the part of an answer in which the model thinks before it answers.

`formats` names the markers and finds a model's own in its chat template. `splitter` separates reasoning from the answer
while both are streamed.
"""
