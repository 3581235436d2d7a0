"""The HTTP server, and the parsers that turn a model's text into messages."""
