"""What tutorials of attention promise is found: three links from the front page at most, in the first words of a page.

A page is read as its source, from its title or from the section that the link names.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRONT = [ROOT / "README.md", ROOT / "docs" / "index.md"]
MOST_CLICKS, FIRST_WORDS = 3, 300
PROMISES = {
    "one formula of Q, K and V": ("dictionary", r"O_{ib} = \sum_j P_{ij} V_{jb}"),
    "scores with indices, summed over features": ("dictionary", r"S_{ij} = \frac{1}{\sqrt d} \sum_a Q_{ia} K_{ja}"),
    "a softmax of each row": ("dictionary", r"P_{ij} = \frac{e^{S_{ij}}}{\sum_{m} e^{S_{im}}}"),
    "the shapes of all arrays": ("dictionary", "| $S$, $P$ | $(n_q, n_k)$ |"),
    "attention is a soft dictionary": ("dictionary", "A dictionary of Python takes a key that fits exactly"),
    "the formula as matrices": ("dictionary#in-one-line", r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt d}\right) V"),
    "each formula beside its line of code": ("dictionary#in-one-line", '`S = np.einsum("ia,ja->ij", Q, K)'),
    "an example small enough for paper": ("dictionary#three-tokens-by-hand", "So the weights are 4/7, 2/7 and 1/7"),
    "code that runs in the browser": ("dictionary#three-tokens-by-hand", "```{run}"),
    "tokens of one text, or of two": ("dictionary#self-and-cross", "Where the keys and values are those"),
    "random queries of seed 42 in NumPy": ("dictionary#self-and-cross", "np.random.RandomState(42)"),
    "weights as a mean of values": ("average", r"\hat y(x) = \frac{\sum_j K(x - x_j) \, y_j}"),
    "ways to score": ("average#three-ways-to-score", r"$w \cdot \tanh(A q + B k)$"),
    "the variance of a score is d": ("scale", "Then $q \\cdot k$ has mean 0 and variance $d$"),
    "gradients vanish without 1/√d": ("scale", "vanishes. With it neither depends on $d$"),
    "a mask in the softmax": ("masks", r"P_{ij} = \frac{m_{ij} \, e^{S_{ij}}}"),
    "no token sees what comes later": ("masks#reading-from-left-to-right", "causal=True"),
    "several heads look at different things": ("heads", "the subject of the sentence, the last time that this name"),
    "projections, and attention of each head": ("heads#projections", r"\mathrm{Attention}(Q_h, K_h, V_h)_{ib}"),
    "heads side by side, and a product": ("heads#joining-is-adding", r"\mathrm{Concat}(O_1, \ldots, O_h) \, W^O"),
    "a cat sat, and what it looks at": ("first", "The blue arcs are those of “it”"),
    "order by sinusoids and rotations": ("positions", "numbers added to the tokens, rotations of queries and keys"),
    "two maps under a slider": ("positions#a-penalty-for-distance", "{compare} Without positions | With ALiBi"),
    "the function in PyTorch, with a mask": ("pytorch#the-function", "masked_fill(mask == 0, -1e9)"),
    "a triangle that hides the future": ("pytorch#the-function", "torch.triu(torch.ones(10, 10), diagonal=1)"),
    "a module with dropout": ("pytorch#dropout-in-training-alone", "class Attention(nn.Module)"),
    "a module of many heads": ("pytorch#many-heads", "class MultiHead(nn.Module)"),
    "a block of a transformer": ("pytorch#a-transformer-block", "class_Block(nn.Module)"),
    "the same in JAX": ("pytorch", "jnp.asarray"),
    "time and memory grow as n²": ("quadratic", 'log="xy"'),
    "operations and bytes of each step": ("quadratic#count-it", "$2 \\, n_q n_k d$ | $n_q n_k$"),
    "256 MiB of weights at 8,192 tokens": ("quadratic#count-it", "256 MiB in float32"),
    "attention in tiles from nothing": ("tiles#in-twenty-lines", "def tiled_attention(q, k, v"),
    "tiles against the naive form": ("tiles#on-this-machine", "best(naive_attention)"),
    "linear attention": ("variants#linear-attention", r"\phi(q_i)"),
    "two heads that copy": ("looking#two-heads-in-a-row", "induction"),
    "when induction heads emerge": ("looking#how-they-came-to-be", "{film} Step of training"),
    "a demo on a text of one's own": ("../index", "{demo}"),
    "a video of building a model": ("looking#such-a-model-from-nothing", "https://www.youtube.com/"),
}
"""What five tutorials promise; the page of `docs/learn` that has it, or its section; its formula, figure or code."""


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The pages, and the sections of them, that a source links to."""
    text = page.read_text("utf-8")
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, section = address.partition("#")
        path = (page.parent / file).resolve()
        if file.endswith(".md") and path.exists():
            yield path, section


def clicks(front: Path) -> dict[tuple[Path, str], int]:
    """The least number of links from a page to others and to their sections."""
    least, queue = {(front, ""): 0}, [front]
    for page in queue:  # which grows
        for path, section in links(page):
            if (path, "") not in least:
                queue.append(path)
            for place in ((path, ""), (path, section)):
                least.setdefault(place, least[page, ""] + 1)
    return least


FOLDED = re.compile(r"^```(?:\{fold\}|\{code-cell\} hide-input).*?^```$", re.M | re.S)


def first_words(page: Path, section: str) -> str:
    """What a reader sees first, without comments, and with folded code as one word."""
    text = re.sub("^> |<!--.*?-->", "", page.read_text("utf-8"), flags=re.M)
    text = FOLDED.sub(lambda block: re.sub(r"\s+", "_", block[0]), text)
    if section:
        headings = {
            re.sub(r"[^\w -]", "", x[1]).lower().replace(" ", "-"): x for x in re.finditer("^## (.*)$", text, re.M)
        }
        text = text[headings[section].end() :]
    return " ".join(text.split()[:FIRST_WORDS])


@pytest.fixture(scope="module", params=FRONT, ids=lambda page: page.stem)
def least(request: pytest.FixtureRequest) -> dict[tuple[Path, str], int]:
    return clicks(request.param)


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_is_found(least: dict[tuple[Path, str], int], promise: str) -> None:
    where, shown = PROMISES[promise]
    name, _, section = where.partition("#")
    page = (ROOT / "docs" / "learn" / f"{name}.md").resolve()
    assert least[page, section] <= MOST_CLICKS
    assert " ".join(shown.split()) in first_words(page, section)


def test_what_is_far_is_seen(tmp_path: Path) -> None:
    pages = [tmp_path / f"{x}.md" for x in "abcde"]
    for page, after in pairwise(pages):
        page.write_text(f"[next]({after.name}#part) and [itself](#x)")
    pages[-1].write_text(f"# Title\n\n## Part\n\n{'word ' * 299}last next")
    least = clicks(pages[0])
    assert least[pages[-1], "part"] == 4
    assert first_words(pages[-1], "part").endswith("word last")
