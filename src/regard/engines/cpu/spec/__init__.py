"""Contracts between kernels and their callers.

They are kernel specs, fields, query blocks, and scratch layouts.
"""
