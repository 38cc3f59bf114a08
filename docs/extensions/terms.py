"""The directives `terms` and `kinds`: the glossary of the viewer's page, from the sentences that it shows itself."""

from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from regard.viewer.data.scores import KINDS
from regard.viewer.data.sentences import GLOSSARY


class TermsDirective(SphinxDirective):
    """A glossary, to whose entries `{term}` leads."""

    def entries(self) -> list[tuple[str, str]]:
        return [(x.name, f"{x.meaning} Plainly: {x.plain}.") for x in GLOSSARY]

    def run(self) -> list[nodes.Node]:
        lines = [":::{glossary}"]
        for name, meaning in self.entries():
            lines += [name, f"  {meaning}", ""]
        made = nodes.container()
        self.state.nested_parse(StringList([*lines, ":::"], source="terms"), self.content_offset, made)
        return made.children


class KindsDirective(TermsDirective):
    """The kinds of heads, likewise."""

    def entries(self) -> list[tuple[str, str]]:
        return [(x.name, f"{x.definition} Score: {x.meaning}.") for x in KINDS]


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("terms", TermsDirective)
    app.add_directive("kinds", KindsDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
