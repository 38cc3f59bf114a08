"""The reference of modules whose packages are missing: autodoc imports them over mocks.

Signatures and docstrings are then those of the source.
"""

from importlib.util import find_spec
from typing import Any, Union

from sphinx.ext.autodoc.mock import _MockObject

PACKAGES = ("torch", "jax", "jaxlib", "transformers")


def either(one: Any, other: Any) -> Any:
    """Return the union of two types of an annotation."""
    return Union[one, other]  # noqa: UP007  what mocks cannot do by themselves


def setup(app: Any) -> dict[str, Any]:
    _MockObject.__or__ = either
    _MockObject.__ror__ = lambda other, one: either(one, other)
    _MockObject.__setitem__ = lambda mock, key, value: None  # a module may register what it makes
    app.config.autodoc_mock_imports = [name for name in PACKAGES if find_spec(name) is None]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
