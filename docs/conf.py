"""The site: `pip install -c constraints.txt '.[docs]' && python -m sphinx -d docs/_trees docs docs/_build`."""

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import regard

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # extensions, benchmarks

project = "regard"
release = version = regard.__version__

extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx",
    "extensions.demo", "extensions.execution", "extensions.markup", "extensions.mathml", "extensions.missing",
    "extensions.notebooks", "extensions.pictures", "extensions.reports", "extensions.run",
]  # fmt: skip
# The last is what MyST-NB writes.
exclude_patterns = ["_build", "_templates", "_trees", "extensions", "pictures", "jupyter_execute"]
templates_path = ["_templates"]

# Pages: `extensions.markup` gives those with blocks a header of MyST-NB, which runs them.
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"

# Docstrings
default_role = "literal"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # the docstrings of PyTorch's modules are not ours
autodoc_typehints = "none"  # signatures hold them
maximum_signature_line_length = 60
napoleon_google_docstring = True
napoleon_numpy_docstring = False
if "online" in tags:  # noqa: F821  `sphinx -t online` links to others' references; without it nothing is fetched
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
    }

html_theme = "furo"
html_title = f"regard {version}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def escaped(line: str) -> str:
    """Escape what reStructuredText would read as markup, except in backticks."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"[|*]", r"\\\g<0>", part) for part in parts[::2]]
    parts[2::2] = [rf"\ {part}" if part[:1].isalnum() else part for part in parts[2::2]]  # the s of `Mask`s
    return "`".join(parts)


def as_restructured(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Prepare a docstring for Sphinx: of a module its first paragraph, indented blocks as code, no other markup."""
    if inspect.ismodule(obj) and "" in lines:
        del lines[lines.index("") :]
    made: list[str] = []
    example = code = False
    for line in lines:
        after_text = len(made) > 1 and not made[-1] and bool(made[-2]) and not made[-2].startswith(" ")
        example = bool(line) and (example or line.lstrip().startswith(">>>"))
        if not code and not example and after_text and line.startswith("    "):
            made += ["::", ""]
            code = True
        code = code and (not line or line.startswith(" "))
        made.append(line if example or code else escaped(line))
    lines[:] = made


PICTURE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<src>[./]*_images/(?P<name>[^"]*))"')
PARAMETERS = re.compile(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>")  # of a long signature, a list without terms


def parameters(found: re.Match[str]) -> str:
    """Return the lines of a long signature as blocks, not as a list."""
    lines = found[1].replace("<dd>", "<div>").replace("</dd>", "</div>")
    return f'<div class="sig-parameters">{lines}</div>'


def described(found: re.Match[str], files: dict[str, str]) -> str:
    """Give a figure of ours its class, and what a block made the title of its own file as a description."""
    path = Path(files.get(found["name"], ""))
    text = path.read_text("utf-8") if path.suffix == ".svg" else ""
    title = re.search(r"<title>(.*?)</title>", text)
    figure = 'class="drawn" ' if '<svg xmlns="http://www.w3.org/2000/svg" class="figure"' in text else ""
    about = found["alt"]
    if about.endswith(found["name"]):  # which Sphinx gives to what has none
        about = title[1] if title else "The picture that the block above makes"
    return f'<img {figure}alt="{about}" src="{found["src"]}"'


def focusable(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Let the keyboard reach blocks, which scroll sideways; name pictures; mend empty headings and lists.

    What scrolls on small screens alone is reached by `site.js`.
    """
    if "body" in context:
        body = context["body"].replace("<pre>", '<pre tabindex="0">')
        body = body.replace(' aria-label="Toggle hidden content"', "")
        body = body.replace('<th class="head"><p></p></th>', "<td></td>")
        body = PARAMETERS.sub(parameters, body)
        files = {name: os.path.join(app.srcdir, path) for path, name in app.builder.images.items()}
        context["body"] = PICTURE.sub(lambda x: described(x, files), body)


def setup(app: Any) -> None:
    app.connect("html-page-context", focusable)
    app.connect("autodoc-process-docstring", as_restructured, priority=400)  # before napoleon
