"""The directive `video`: a link with a still picture, which loads nothing.

It is given an address, the picture as `:still:`, and a caption.
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
        text, messages = self.state.inline_text(" ".join(self.content), self.lineno)
        caption = nodes.caption("", "", *text)
        still = nodes.image(uri=self.options["still"], alt=f"Video: {caption.astext()}")
        link = nodes.reference("", "", still, refuri=self.arguments[0])
        return [nodes.figure("", link, caption, classes=["video"]), *messages]


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("video", VideoDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
