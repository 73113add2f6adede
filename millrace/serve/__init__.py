"""The front: HTTP routes, request schemas, admission checks, and the bytes of every answer. No torch here."""
