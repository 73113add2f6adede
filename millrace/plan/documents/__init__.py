"""Documents in a prompt that is not their prefix: cached keys and values used at other positions."""
