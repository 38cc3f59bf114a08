"""Attention in plain JAX, for devices without an engine."""
