"""The directive `demo`: a still picture that leads to a page with a small model inside, which reads what is typed.

It is given the command that saves the page, `regard look TEXT --save demo.html --with-model`; a click loads the page.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from extensions.pictures import FOLDER

PLACE = '<div id="regard-page"'


CAPTION = "The viewer and a small model run in your browser, and nothing that you type leaves your machine."


class DemoDirective(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        _, _, text, *_ = shlex.split(self.content[0])
        # One for each page, which it leads back to: pages are read by several processes.
        name = "demo" if self.env.docname == "index" else f"demo-{self.env.docname.replace('/', '-')}"
        path = Path(os.environ[FOLDER], name)
        # In a process of its own: pages run in forks of this one, which starts no threads.
        command = [sys.executable, "-m", "regard", "look", text, "--save", str(path), "--with-model"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        page = path.with_suffix(".html")
        html = page.read_text("utf-8")
        html = html.replace(PLACE, f'{PLACE} data-state="type=true"', 1)  # with its editor open
        back = f'<p><a href="../{self.env.docname}.html">Back to the documentation of regard</a></p>'
        page.write_text(html.replace("<body>", f"<body>\n    {back}", 1), "utf-8")
        place = "../" * self.env.docname.count("/") + f"_islands/{name}"
        size = f"{page.stat().st_size / 1e6:.1f} MB"
        figure = (
            f'<figure class="demo"><a href="{place}.html"><img src="{place}.svg" alt="Heads of the model, and a map">'
            f"<span>Type your own text</span></a>"
            f"<figcaption>{CAPTION} <small>A click loads {size}.</small></figcaption></figure>"
        )
        return [nodes.raw("", figure, format="html")]


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("demo", DemoDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
