"""Commands about many replicas: gateway."""
