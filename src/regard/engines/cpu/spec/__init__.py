"""Contracts between kernels and their callers: kernel specs, fields, query blocks, scratch layouts."""
