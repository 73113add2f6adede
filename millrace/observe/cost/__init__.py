"""What tokens cost on this machine: step times are fitted to measured seconds, then priced. Start with `fit.py`."""
