"""The page as it was built with the package: three files that load nothing from outside, and the licences in them."""

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
    """Return the texts of the built page by name.

    Raises FileNotFoundError where the package was not built: run from a checkout that was never installed, say.
    """
    folder = files("regard.viewer").joinpath("page")
    try:
        return {name: folder.joinpath(name).read_text("utf-8") for name in FILES}
    except FileNotFoundError:
        raise FileNotFoundError(
            "the page of `regard look` is not built; `pip install .` or `pip install -e .` in the checkout builds it"
        ) from None
