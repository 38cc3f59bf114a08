"""What `regard.look`, `regard look` and `regard steps` show: data first, then a page, a terminal or a picture."""

from .looking import look

__all__ = ["look"]
