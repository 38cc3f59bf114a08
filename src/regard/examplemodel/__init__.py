"""A small trained decoder to look at: `ExampleModel.load()`."""

from .model import BOS, LONGEST, Config, ExampleModel, Trace, repeated_bytes

__all__ = ["BOS", "LONGEST", "Config", "ExampleModel", "Trace", "repeated_bytes"]
