"""Views of attention: data first, then a page, a terminal or a picture."""

from regard.viewer.looking import look

__all__ = ["look"]
