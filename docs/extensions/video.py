"""The directive `video`: a link with a still picture, which loads nothing.

    ```{video} https://example.org/film
    :still: ../pictures/film.svg

    The caption.
    ```
"""

from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective


class VideoDirective(SphinxDirective):
    required_arguments = 1
    option_spec = {"still": directives.unchanged_required}  # noqa: RUF012  as docutils types it
    has_content = True

    def run(self) -> list[nodes.Node]:
        if "still" not in self.options or not self.content:
            raise self.error("a video has a :still: picture of the documentation, and a caption")
        caption = nodes.caption()
        self.state.nested_parse(self.content, self.content_offset, caption)
        text = caption.astext()
        still = nodes.image(uri=self.options["still"], alt=f"Video: {text}")
        caption = nodes.caption("", "", *caption.children[0].children)
        return [nodes.figure("", nodes.reference("", "", still, refuri=self.arguments[0]), caption, classes=["video"])]


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("video", VideoDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
