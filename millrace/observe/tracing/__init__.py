"""OpenTelemetry: W3C trace context, spans of a request's stages, and their export over OTLP/HTTP.

Spans are built when a request has ended, from times that are kept anyway, and sent by a task of its own. Start with
`request_trace.py`.
"""
