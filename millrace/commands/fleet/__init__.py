"""Commands about many replicas: a gateway, and a fleet on one machine."""
