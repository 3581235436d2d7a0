"""Data and protocols of the engine. No machinery, no method, no device code."""
