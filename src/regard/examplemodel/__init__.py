"""A small trained decoder to look at: `ExampleModel.load()`."""

from regard.signatures import listed

from .model import BOS, LONGEST, Config, ExampleModel, Trace, repeated_bytes

__all__ = ["BOS", "LONGEST", "Config", "ExampleModel", "Trace", "repeated_bytes"]

listed(*(globals()[name] for name in __all__))
