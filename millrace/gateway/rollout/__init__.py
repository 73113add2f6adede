"""A new group of replicas beside the old ones: a share of the traffic that grows or returns, or copies of it."""
