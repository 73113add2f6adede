"""`millrace load`: sends a workload to any OpenAI-compatible server and measures what its clients see.

Open loop: requests are sent at their intended times, however slow the server is, and every latency counts from the
intended time, so a stall of the server or of this client is never hidden. Start with `run.py`.
"""
