"""Attention in plain JAX, for devices without an engine: `scan`, and rules as `values`."""
