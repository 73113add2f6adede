"""`millrace bench gpu`: one engine per model, without HTTP, through cases with recorded figures of a peer.

`cases.py` defines what is measured, `client.py` drives the engine, `run.py` joins them. `peers_h200.json` holds the
peer's figures and the bars, `shapes/` the model shapes.
"""
