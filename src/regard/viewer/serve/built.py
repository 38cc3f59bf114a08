"""The built page: files that load nothing from outside, and their licences."""

from functools import cache
from importlib.resources import files

FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript",
    "page.css": "text/css",
    "LICENSES.txt": "text/plain; charset=utf-8",
}


@cache
def page() -> dict[str, str]:
    """Return the texts of the built page by file name.

    Raises FileNotFoundError if the page was not built, as in a checkout that was never installed.
    """
    folder = files("regard.viewer").joinpath("page")
    try:
        return {name: folder.joinpath(name).read_text("utf-8") for name in FILES}
    except FileNotFoundError:
        raise FileNotFoundError(
            "the page of `regard look` is not built; `pip install .` or `pip install -e .` in the checkout builds it"
        ) from None
