"""What `regard look` and `regard steps` show: data first, then a terminal, a page or a picture that draws it."""

from .model_view import Choice, LookData, look_data
from .picture import png
from .report import check_fits, page
from .steps_terminal import show_steps
from .terminal import show

__all__ = ["Choice", "LookData", "check_fits", "look_data", "page", "png", "show", "show_steps"]
