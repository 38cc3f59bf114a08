"""What `regard.look`, `regard look` and `regard steps` show: data first, then a page, a terminal or a picture."""

from regard.viewer.looking import look

__all__ = ["look"]
