"""Calls over several processes."""
