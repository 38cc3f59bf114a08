"""The version of the package, which keys of compiled kernels and reports name."""

__version__ = "0.1.0"
