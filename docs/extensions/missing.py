"""The reference of modules whose packages are missing: autodoc imports them over mocks.

Signatures and docstrings are those of the source, so that every build has the same reference.
"""

from functools import update_wrapper
from importlib.util import find_spec
from inspect import Signature, signature
from types import FunctionType
from typing import Any, Union

from sphinx.ext.autodoc.mock import _MockObject
from sphinx.util.inspect import stringify_signature

PACKAGES = ("torch", "jax", "jaxlib", "transformers")
call = _MockObject.__call__


def either(one: Any, other: Any) -> Any:
    """Return the union of two types of an annotation."""
    return Union[one, other]  # noqa: UP007  what mocks cannot do by themselves


def called(mock: Any, *args: Any, **options: Any) -> Any:
    """Return what a mock returns, with the docstring and the signature of a function that it decorates."""
    result = call(mock, *args, **options)
    return update_wrapper(result, args[0]) if args and isinstance(args[0], FunctionType) else result


def own_signature(app: Any, what: str, name: str, obj: Any, *_: Any) -> tuple[str, None] | None:
    """Give a class over a mock the signature of its own `__init__`; autodoc asks the mock."""
    if what != "class" or not issubclass(obj, _MockObject):
        return None
    parameters = list(signature(obj.__init__).parameters.values())[1:]  # without self
    return stringify_signature(Signature(parameters), show_annotation=False), None


def setup(app: Any) -> dict[str, Any]:
    _MockObject.__call__ = called
    _MockObject.__sphinx_empty_attrs__ |= {"__signature__"}
    _MockObject.__or__ = either
    _MockObject.__ror__ = lambda other, one: either(one, other)
    _MockObject.__setitem__ = lambda mock, key, value: None  # a module may register what it makes
    app.config.autodoc_mock_imports = [name for name in PACKAGES if find_spec(name) is None]
    app.connect("autodoc-process-signature", own_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
