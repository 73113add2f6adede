"""Questions about serving that simulations answer, each with its page."""
