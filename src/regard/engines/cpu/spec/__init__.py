"""Contracts between kernels and their callers: specs, fields, scratch layouts."""
