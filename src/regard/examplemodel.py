"""Small trained decoder as an example: `ExampleModel.load()`."""

from regard.arguments.signatures import listed
from regard.interpret.examplemodel.model import BOS, LONGEST, Config, ExampleModel, Trace, repeated_bytes

__all__ = ["BOS", "LONGEST", "Config", "ExampleModel", "Trace", "repeated_bytes"]

listed(*(globals()[name] for name in __all__))
