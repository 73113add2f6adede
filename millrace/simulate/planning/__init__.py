"""What simulations decide: how many machines, which settings."""
