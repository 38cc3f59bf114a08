"""Instruction sets, compiling, and the object code on disk."""
