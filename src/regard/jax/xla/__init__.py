"""Attention in plain JAX, for devices without an engine: `scan`, `statistics`, and rules as `values`."""
