"""What the cycle is made of: draws and the masks that they wait for, and the search for a request that makes steps
fail."""
