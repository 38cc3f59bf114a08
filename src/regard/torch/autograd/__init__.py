"""Derivatives and transforms of a call."""
