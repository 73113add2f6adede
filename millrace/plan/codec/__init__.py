"""Steps as bytes: the one form in which plans, inputs, captures and block copies are logged, sent and run again.

Start with `encoder.py`; `layout.py` has the formats that both sides share.
"""
