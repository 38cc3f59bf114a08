"""Mathematics as MathML, which browsers draw without scripts, fonts or a network."""

import re
from html import unescape
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ACCENTS = ("~", "˙", "^", "¯", "→")
ENTITY = re.compile(r"&(?!lt;|gt;|amp;|quot;)\w+;")  # of MathML, which XML does not know
ElementTree.register_namespace("", NAMESPACE)


def mathml(tex: str, as_block: bool) -> str:
    r"""Return TeX as MathML; an index of a letter with an accent stands beside it, not below.

    >>> "munderover" in mathml(r"\tilde q_i", False)
    False
    """
    made = ENTITY.sub(lambda found: unescape(found[0]), tex2mathml(tex, as_block=as_block))
    root = ElementTree.fromstring(made)
    for both in root.iter(f"{{{NAMESPACE}}}munderover"):
        letter, index, accent = both
        if accent.text in ACCENTS:
            both.tag = f"{{{NAMESPACE}}}msub"
            above = ElementTree.Element(f"{{{NAMESPACE}}}mover")
            above.extend([letter, accent])
            both[:] = [above, index]
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext(), False))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(writer.starttag(node, "div", CLASS="math"))
    if node.get("number"):
        writer.body.append(f'<span class="eqno">({node["number"]})</span>')
    writer.body.append(mathml(node.astext(), True))
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
