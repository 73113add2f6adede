"""How answers are chosen beyond one draw after the other: further sampler options, beams, the best of several, votes.

Start with `sampler_fields` and `beam_fields` (what clients send), then `beam_job` and `best`.
"""
