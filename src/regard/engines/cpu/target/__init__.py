"""Instruction sets, the permission to use AMX, and compiled objects."""
