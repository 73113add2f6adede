"""Questions that are answered by measuring this machine; those that simulations answer are in `simulate/studies`."""
