"""What is shown is what was computed, whatever the text: in the terminal, in the picture."""

import base64
import re
import struct
import subprocess
import sys
from io import BytesIO, StringIO
from xml.etree import ElementTree

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

import regard
from regard import insight
from regard.examplemodel import ExampleModel
from regard.interpret.formats import score_text, weight_text
from regard.viewer.data.scores import KINDS
from regard.viewer.data.summary import LookData, look_data, pooled
from regard.viewer.scene.labels import byte_tokens, encodable, printable, readable
from regard.viewer.scene.sources import Settings, arrays, example
from regard.viewer.show.blocks import Screen
from regard.viewer.show.colour import INK, SIGNED, VIRIDIS, ramp, readable_on, tone
from regard.viewer.show.picture import HEIGHT, WIDTH, picture
from regard.viewer.show.steps import first_matrix, show_steps
from regard.viewer.show.terminal import show
from support import assert_within, softmax, traced_memory

HOSTILE = (
    "<script>alert(1)</script>", "[red]x[/red]", "</script>", "&amp;", "🎉", "שלום", "a\u202eb", "\x1b[31m", "\x00",
    "é\u0301", "$x_$", "\ud83d", '"\'', "名", "\n", " ", "${title}", "]]>", "<!--", "\u2028",
)  # fmt: skip


def made_up(tokens, layers=2, heads=3, seed=0, causal=True, separator=" "):
    """Heads with random weights over made-up tokens; head 1 of layer 1 always looks at the token before."""
    n, rng = len(tokens), np.random.default_rng(seed)
    scores = 3 * rng.standard_normal((layers, heads, n, n))
    scores[1, 1, np.arange(1, n), np.arange(n - 1)] += 12
    if causal:
        scores[..., np.triu_indices(n, 1)[0], np.triu_indices(n, 1)[1]] = -np.inf
    weights = softmax(scores).astype(np.float32)
    statistics = {
        name: rng.random((layers, heads)) / 2 for name in (*(kind.name for kind in KINDS), "normalized entropy")
    }
    statistics["previous token"][1, 1] = 0.987
    return LookData(
        model="made up",
        text=separator.join(tokens),
        tokens=tuple(tokens),
        statistics=statistics,
        rows_of=lambda layer, head, rows: weights[layer, head, rows],
        causal=causal,
        following=(("<b>", 0.5), ("[bold]", 0.25), ("\x1b[31m", 0.125)),
        separator=separator,
    )


def printed(data, choice=None, width=80, **options):
    console = Console(file=StringIO(), width=width, color_system=None, **options)
    show(data, choice or data.choose(), console)
    return console.file.getvalue()


# Colours


def test_viridis_is_viridis():
    x = np.linspace(0, 1, 256)
    known = matplotlib.colormaps["viridis"](x)[:, :3] * 255
    assert np.abs(ramp(x, VIRIDIS).astype(float) - known).max() < 6


def lightness(colours):
    """L* of CIELAB."""
    c = colours / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    return 116 * np.cbrt(linear @ [0.2126, 0.7152, 0.0722]) - 16


@pytest.mark.parametrize(("anchors", "sign"), [(VIRIDIS, 1), (INK, -1)])
def test_lightness_alone_orders_weights(anchors, sign):
    steps = np.diff(sign * lightness(ramp(np.linspace(0, 1, 65), anchors)))
    assert steps.min() > 0.3


def test_signed_scale_is_darkest_at_zero_and_even_on_both_sides():
    light = lightness(ramp(np.linspace(0, 1, 33), SIGNED))
    assert light.argmin() == 16
    assert (np.diff(light[16:]) > 0).all()
    assert (np.diff(light[:17]) < 0).all()
    assert np.abs(light - light[::-1]).max() < 12


def test_text_on_colours_has_contrast():
    def luminance(colour):
        return ((lightness(np.asarray(colour, float)) + 16) / 116) ** 3

    for colour in ramp(np.linspace(0, 1, 64)):
        text = int(readable_on(colour)[1:3], 16)
        low, high = sorted((luminance(colour), luminance([text] * 3)))
        assert (high + 0.05) / (low + 0.05) > 4  # WCAG's ratio


# Labels


@pytest.mark.parametrize("token", HOSTILE)
def test_labels_are_one_printable_line(token):
    label = printable(token)
    assert label.isprintable()
    assert label
    assert not set(label) & {" ", "\n", "\x1b", "\u202e"}
    encodable(label).encode("utf-8")
    assert "\u202e" not in readable(token)
    assert "\x1b" not in readable(token)


def test_one_token_for_every_byte():
    for text in ("plain", "né 🎉", "שלום", "名\n"):
        tokens = byte_tokens(text)
        assert len(tokens) == 1 + len(text.encode())
        assert "".join(t for t in tokens if t not in "⊢₂₃₄") == text


# Data


@pytest.fixture(scope="module")
def model():
    return ExampleModel.load()


def exact_weights(trace, layer):
    """Weights of a layer (h, n, n) in float64, of its queries and keys as they are."""
    q, k = trace.q[layer].astype(np.float64), trace.k[layer].astype(np.float64)
    return regard.weights(q, k, causal=trace.causal, scale=trace.scale, engine="spec")


def assert_share_of_weights(name, got, exact):
    """Within the bound that engines keep for weights in float32."""
    assert_within(name, got, exact, exact, 8 * exact, np.dtype(np.float32))


def test_data_is_what_the_model_and_insight_say(model):
    text = "to be or not to be"
    stages = []
    data = look_data(example(Settings(text), model), stages.append)
    ids = model.encode(text)
    trace = model.run(ids)
    assert (data.n, data.layers, data.heads) == (19, model.config.layers, model.config.heads)
    assert len(stages) == data.layers
    for layer in range(data.layers):
        expected = exact_weights(trace, layer)
        for head in range(data.heads):
            weights = data.weights(layer, head)
            assert np.isnan(weights[np.triu_indices(19, 1)]).all()
            assert_share_of_weights(f"layer {layer}, head {head}", np.nan_to_num(weights), expected[head])
        for kind, measure in (
            ("previous token", insight.previous_token(expected)),
            ("induction", insight.induction(expected, ids, prefix=3)),
            ("first-token sink", insight.sink(expected)),
        ):
            assert_share_of_weights(f"{kind}, layer {layer}", data.statistics[kind][layer], measure)
    shares = softmax(trace.logits[-1].astype(np.float64))
    likeliest = [byte for byte in np.argsort(-shares)[:5] if shares[byte] >= 0.005]
    assert [share for _, share in data.following] == pytest.approx(shares[likeliest])
    assert data.following[0][0] == chr(likeliest[0])


@pytest.mark.parametrize("text", ["abcdef", "abcdabd", "a"])
def test_no_induction_score_where_nothing_repeats(model, text):
    """Three bytes in a row are what counts as a repetition."""
    assert not np.isnan(look_data(example(Settings("abcdabce"), model)).statistics["induction"]).any()
    data = look_data(example(Settings(text), model))
    assert np.isnan(data.statistics["induction"]).all()
    assert np.isnan(data.statistics["duplicate token"]).all() == (text != "abcdabd")
    assert data.strongest("induction") == ()
    chosen = data.choose()
    assert (chosen.layer, chosen.head) == data.strongest("previous token")[0][:2]
    assert "nothing repeats" in printed(data)
    assert b"nothing repeats" in picture(data, chosen)


def test_pooled_maps_keep_the_largest_weight():
    data = made_up([str(k) for k in range(1500)], heads=2)
    whole = data.weights(1, 0)
    small = data.pooled(1, 0, 40, 30)
    assert small.shape == (40, 30)
    np.testing.assert_array_equal(small, pooled(whole, 40, 30))
    rows, cols = (np.arange(size) * 1500 // size for size in (40, 30))
    for r, c in ((0, 0), (7, 3), (39, 29), (20, 25)):
        block = whole[rows[r] : [*rows, 1500][r + 1], cols[c] : [*cols, 1500][c + 1]]
        expected = np.nanmax(block) if np.isfinite(block).any() else np.nan
        np.testing.assert_equal(float(small[r, c]), float(expected))
    np.testing.assert_array_equal(data.pooled(0, 0, 9999, 9999), data.weights(0, 0))


def test_a_long_text_takes_memory_for_some_rows_at_a_time():
    n = 6000
    data = made_up(["a", "b"])
    long = LookData(
        data.model,
        "",
        ("x",) * n,
        data.statistics,
        lambda layer, head, rows: np.zeros((len(range(n)[rows]), n), np.float32),
    )
    with traced_memory() as held:
        long.pooled(0, 0, 30, 60)
        _, peak = held()
    assert peak < 4 * n * n * 0.6  # one float32 matrix is 4 n²


def test_choice():
    data = made_up(["the", "cat", "and", "the", "dog"])
    strongest = data.strongest("induction")[0]
    assert data.choose() == data.choose(strongest.layer, strongest.head, 4)
    assert data.choose(token=-5).token == 0
    assert data.choose(token="the").token == 3
    only = data.choose(layer=1)
    assert only.layer == 1
    assert only.head == data.statistics["induction"][1].argmax()
    for wrong, message in (
        ({"layer": 2}, "layer 2 does not exist: this model has layers 0 to 1"),
        ({"head": -1}, "head -1 does not exist: this model has heads 0 to 2"),
        ({"token": 5}, "token 5 does not exist: the text has tokens 0 to 4"),
        ({"token": "bird"}, "token 'bird' does not occur in the text"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            data.choose(**wrong)


def test_a_head_is_named_by_its_kind():
    data = made_up(["a", "b"])
    for kind in KINDS:
        data.statistics[kind.name][:] = 0.1
    assert data.kinds_of(0, 0) == ()
    data.statistics["first-token sink"][0, :2] = 0.9
    assert data.kinds_of(0, 0) == ((KINDS[2], "first-token sink", 0.9),)
    data.statistics["induction"][0, 1:] = 0.3
    assert data.kinds_of(0, 1) == ((KINDS[1], "induction", 0.3), (KINDS[2], "first-token sink", 0.9))
    assert [found.tentative for found in data.kinds_of(0, 1)] == [True, False]
    assert data.kinds_of(0, 2) == ((KINDS[1], "induction", 0.3),)
    data.statistics["induction"][0, 2] = np.nan
    assert data.kinds_of(0, 2) == ()


def test_most_attended():
    data = made_up([f"t{k}" for k in range(30)])
    choice = data.choose(0, 2, 20)
    found = data.attended(choice)
    row = data.weights(0, 2)[20, :21]
    assert [weight for _, weight in found] == np.sort(row)[::-1][:8].tolist()
    assert all(row[token] == weight for token, weight in found)


# Terminal


def test_terminal_shows_the_numbers_that_were_computed():
    data = made_up([f"t{k}" for k in range(12)])
    choice = data.choose(0, 2, 7)
    text = printed(data, choice)
    for kind in ("previous token", "induction", "first-token sink"):
        section = text[text.index(f"  {kind}") :]
        found = re.findall(r"L(\d) H(\d)  (\d\.\d{2})", section)[:3]
        assert found == [(str(a), str(b), score_text(score)) for a, b, score in data.strongest(kind)]
    section = text[text.index("What token 7, “t7”, attends to in L0 H2") :]
    for token, weight in data.attended(choice):
        assert re.search(rf"^ +{token}  t{token} +{weight_text(weight)}", section, re.MULTILINE)
    assert "The model expects next: “<b>” 50.0%, “[bold]” 25.0%" in printed(data, data.choose(0, 2))


@pytest.mark.parametrize("n", [1, 2, 24, 25, 66, 67, 500])
@pytest.mark.parametrize("style", ["plain", "colour", "ascii"])
def test_terminal_fits_80_columns(n, style):
    data = made_up([f"t{k % 7}" for k in range(n)], layers=2, heads=5) if n > 1 else made_up(["x"], heads=5)
    console = Console(
        file=StringIO(), width=80, record=True, force_terminal=style == "colour",
        color_system="truecolor" if style == "colour" else None,
    )  # fmt: skip
    if style == "ascii":
        console = Console(file=Ascii(), width=80, color_system=None)
    show(data, data.choose(), console)
    text = console.export_text() if style != "ascii" else console.file.getvalue()
    assert max(map(cell_len, text.splitlines())) <= 80
    assert f"{n} tokens, 2 layers of 5 heads" in text
    if style == "ascii":
        text.encode("ascii")
        assert "#" in text


class Ascii(StringIO):
    encoding = "ascii"


@pytest.mark.parametrize("n", [20, 55, 60, 64, 68, 70])
@pytest.mark.parametrize("colour", [None, "truecolor"])
def test_terminal_with_long_tokens(n, colour):
    data = made_up([f"{k}-long-as-tokens-go" for k in range(n)])
    console = Console(file=StringIO(), width=80, color_system=colour, record=True, force_terminal=bool(colour))
    show(data, data.choose(token=n // 2), console)
    text = console.export_text()
    assert max(map(cell_len, text.splitlines())) <= 80
    section = text[text.index("Map of") : text.index("What token")]
    assert section.count("▸") == 1
    marked = next(line for line in section.splitlines() if "▸" in line)
    numbers = [int(x) for x in re.findall(r"\d+", marked.partition("▸")[0])]
    assert min(abs(number - n // 2) for number in numbers) <= 2


def test_terminal_shows_hostile_text_as_text():
    data = made_up(HOSTILE)
    for style in ({}, {"force_terminal": True, "no_color": False}):
        console = Console(file=StringIO(), width=100, color_system="truecolor" if style else None, **style)
        show(data, data.choose(token=2), console)
        text = console.file.getvalue()
        assert "[red]x[/re" in text
        assert "\x1b[31m" not in text
        assert "\u202e" not in text
        assert "\x00" not in text
    text = printed(data, data.choose(token=1), width=100)
    assert max(map(cell_len, text.splitlines())) <= 100


def cells_of(line):
    """The colours of each character: (character, foreground, background)."""
    styles = [None] * len(line.plain)
    for span in line.spans:
        for k in range(span.start, span.end):
            styles[k] = span.style
    return [
        (c, s and s.color and tuple(s.color.triplet), s and s.bgcolor and tuple(s.bgcolor.triplet))
        for c, s in zip(line.plain, styles, strict=True)
    ]


def test_half_blocks_have_the_colours_of_two_rows():
    levels = np.linspace(0, 1, 64)[[[0, 5, 63], [9, 63, 20], [40, 41, 42]]]
    levels[0, 2] = levels[1, 1] = np.nan
    screen = Screen(colour=True, unicode=True, width=80)
    first, second = (cells_of(line) for line in screen.dense(levels))
    colour = {(r, c): tuple(ramp(levels[r, c]).tolist()) for r in range(3) for c in range(3)}
    assert first == [
        ("▀", colour[0, 0], colour[1, 0]),
        ("▀", colour[0, 1], None),
        ("▄", colour[1, 2], None),
    ]
    assert second == [("▀", colour[2, c], None) for c in range(3)]


def test_shades_rise_with_the_level():
    (line,) = Screen(colour=False, unicode=True, width=80).dense(np.array([[0, 0.25, 0.5, 0.75, 1, np.nan]]))
    assert line.plain == " ░▒▓█ "
    assert Screen(colour=True, unicode=True, width=80).bar(0.5, 3) == "█▌"
    assert Screen(colour=True, unicode=False, width=80).bar(0.5, 4) == "##"


def test_wide_and_joined_characters_keep_the_grid():
    screen = Screen(colour=True, unicode=True, width=80)
    lines = screen.upright(["ab", "名", "é\u0301x", "👩‍🚀"], 8)
    assert {cell_len(line) for line in lines} == {4}
    assert screen.upright(["abcdefgh"], 3) == ["a", "b", "⋮"]
    assert cell_len(screen.right("名名名", 5)) == 5


def test_steps_show_their_values():
    rng = np.random.RandomState(42)
    steps = regard.ops.stepping.steps(
        rng.randn(2, 4), rng.randn(3, 4), rng.randn(3, 4), mask=np.array([[1, 0, 1], [1, 1, 1]])
    )
    console = Console(file=StringIO(), width=100, color_system=None)
    show_steps(steps, console)
    text = console.file.getvalue()
    for step in steps:
        assert f"{step.name} {step.tensor}" in text
        for x in step.value.ravel():
            expected = (f"{x:.3f}" if x else "·") if step.name == "softmax" else f"{x:+.2f}".replace("-", "−")
            assert (expected if np.isfinite(x) else "−∞") in text
    assert "P[i,j] = exp(S[i,j] − lse[i])" in text


def test_steps_show_the_first_head_of_the_first_batch_entry():
    x = np.random.RandomState(0).standard_normal((2, 3, 4, 2))
    for layout in ("bhnd", "bnhd"):
        y = x.swapaxes(1, 2) if layout == "bnhd" else x
        steps = regard.ops.stepping.steps(y, y, y, layout=layout)
        np.testing.assert_array_equal(first_matrix(steps["Q"]), x[0, 0])
        np.testing.assert_array_equal(first_matrix(steps["P"]), steps["P"].value[0, 0])
        np.testing.assert_array_equal(first_matrix(steps["lse"])[:, 0], steps["lse"].value[0, 0])


@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 2, 50, 16), (30, 100), (1, 0, 4), (1, 200, 3)])
def test_steps_fit_80_columns(shape):
    x = np.random.RandomState(0).standard_normal(shape)
    for colour in (None, "truecolor"):
        console = Console(file=StringIO(), width=80, color_system=colour, record=True, force_terminal=bool(colour))
        show_steps(regard.ops.stepping.steps(x, x, x, causal=True), console)
        assert max(map(cell_len, console.export_text().splitlines())) <= 80


# Picture


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("n", [1, 2, 30, 150])
def test_picture_is_a_png_of_its_size(n):
    data = made_up([f"t{k}" for k in range(n)]) if n > 1 else made_up(["x"])
    content = picture(data, data.choose(), "png")
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (WIDTH, HEIGHT)
    pixels = matplotlib.image.imread(BytesIO(content))
    assert pixels.shape[:2] == (HEIGHT, WIDTH)


def test_picture_holds_the_colours_of_the_map():
    data = made_up([f"t{k}" for k in range(10)])
    pixels = matplotlib.image.imread(BytesIO(picture(data, data.choose(1, 1, 9), "png")))
    found = (pixels[..., :3] * 255).round().astype(int)
    # The strongest cells of head 1 of layer 1, below its diagonal, each 80 pixels wide.
    strong = ramp(tone(data.weights(1, 1)[5, 4]), INK).astype(int)
    cols = np.nonzero(np.abs(found - strong).max(-1) <= 2)[1]
    assert ((cols > WIDTH * 0.3) & (cols < WIDTH * 0.75)).sum() > 70 * 70


def test_picture_as_svg_holds_the_weights_of_the_map():
    data = made_up([f"t{k}" for k in range(10)])
    root = ElementTree.fromstring(picture(data, data.choose(1, 1, 9)))
    assert root.get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"
    largest = max(root.iter(SVG + "image"), key=lambda image: float(image.get("height")))
    kind, _, content = largest.get("href").partition(",")
    assert kind == "data:image/png;base64"
    pixels = (matplotlib.image.imread(BytesIO(base64.b64decode(content))) * 255).round().astype(int)
    expected = ramp(tone(np.nan_to_num(data.weights(1, 1))), INK)
    np.testing.assert_array_equal(pixels[..., :3], expected)
    np.testing.assert_array_equal(pixels[..., 3] == 255, np.tri(10, dtype=bool))


@pytest.mark.parametrize("token", HOSTILE)
def test_picture_of_hostile_text(token):
    data = made_up([*HOSTILE, "the end"] * 3)
    written = picture(data, data.choose(token=token))
    texts = [text.text for text in ElementTree.fromstring(written).iter(SVG + "text")]
    label = encodable(printable(token))
    assert any(label[:11] in text and text.endswith("attends most to") for text in texts)
    assert written == picture(data, data.choose(token=token))


@pytest.mark.parametrize("token", ["$x_$", "\ud83d", "🎉"])
def test_png_of_hostile_text(token):
    data = made_up(HOSTILE * 3)
    assert picture(data, data.choose(token=token), "png").startswith(b"\x89PNG")


def test_a_picture_needs_no_matplotlib(tmp_path):
    """Unless it is a PNG: which is refused before any work, and left out where no ending was given."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import importlib.util as util; real = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'matplotlib' else real(name, *rest)\n"
        "from regard.cli import main; sys.exit(main(sys.argv[1:]))"
    )

    def run(*arguments):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, " ".join(done.stdout.split()), done.stderr

    needs = "PNG needs matplotlib: pip install 'regard[plots]'"
    assert run("look", "abab", "--save", "x") == (0, f"saved x.html saved x.svg no PNG was saved: {needs}", "")
    assert run("look", "abab", "--save", "y.svg") == (0, "saved y.svg", "")
    assert run("look", "a", "--save", "z.png") == (2, "", f"regard: error: cannot save z.png: {needs}, or save .svg\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.html", "x.svg", "y.svg"]


def test_nothing_of_matplotlib_is_global():
    code = (
        "import sys; from regard.viewer.data import summary\n"
        "from regard.viewer.scene import sources\nfrom regard.viewer.show import picture\n"
        "data = summary.look_data(sources.example(sources.Settings('abab')))\n"
        "picture.picture(data, data.choose()); assert 'matplotlib' not in sys.modules\n"
        "picture.picture(data, data.choose(), 'png'); assert 'matplotlib.figure' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_maps_of_pictures_leave_out_no_weight():
    """Of many tokens the largest of each block is drawn, and every block has a pixel at least."""
    data = made_up([str(k) for k in range(1500)], heads=2)
    root = ElementTree.fromstring(picture(data, data.choose(1, 1, 9)))
    for image in root.iter(SVG + "image"):
        size = struct.unpack(">II", base64.b64decode(image.get("href").partition(",")[2])[16:24])
        assert size[0] <= float(image.get("width"))
        assert size[1] <= float(image.get("height"))


def test_rich_text_is_never_parsed_as_markup():
    """The premise of the tests above: Rich would parse it, were it not for Text."""
    assert Text.from_markup("[red]x[/red]").plain == "x"
    data = made_up(["[red]x[/red]"] * 3)
    assert "[red]x[/red]" in printed(data, width=120)


@pytest.mark.parametrize(
    ("queries", "keys"), [("le chat dort", "the old cat sleeps"), ("a b c d", "e f"), ("a b", "c d")]
)
def test_pictures_of_two_texts_name_each_by_its_own_tokens(queries: str, keys: str) -> None:
    tokens, others = queries.split(), keys.split()
    q, k = (np.random.default_rng(0).standard_normal((2, len(x), 8)) for x in (tokens, others))
    data = look_data(arrays(q, k, tokens=tokens, key_tokens=others))
    choice = data.choose(0, 0, len(tokens) - 1)
    weights = regard.weights(q, k)[0, -1]
    assert [key for key, _ in data.attended(choice)] == np.argsort(-weights, kind="stable").tolist()
    printed = StringIO()
    show(data, choice, Console(file=printed, width=100, height=60, color_system=None))
    drawn = picture(data, choice).decode()
    for text in (printed.getvalue(), drawn):
        assert all(token in text for token in (*tokens, *others))
    said = printed.getvalue()
    best = others[int(weights.argmax())]
    assert f"“{best}”" in said
    assert not re.search(r'stroke="#[0-9a-f]+" stroke-width="2.5"', drawn)  # no key is the chosen query


def test_terminal_wraps_nine_heads_into_even_lines():
    lines = re.findall(r"^ +((?:H\d +)+)$", printed(made_up(["a", "b", "c"], heads=9)), re.MULTILINE)
    assert [len(line.split()) for line in lines] == [5, 4, 5, 4]


# Learned sinks


def with_sink(n=24):
    x = np.random.default_rng(0).standard_normal((2, n, 8))
    return arrays(x, x, causal=True, sink=np.array([3.0, 0.5]), tokens=[f"t{k}" for k in range(n)])


def test_a_learned_sink_has_a_column_of_its_own():
    data = look_data(with_sink())
    P = data.weights(0, 0)
    sinks = data.sinks_of(0, 0)
    np.testing.assert_allclose(sinks, 1 - np.nansum(P, axis=1), atol=1e-6)
    whole = data.beside(0, 0, P)
    np.testing.assert_array_equal(whole[:, 2:], P)
    np.testing.assert_array_equal(whole[:, 0], sinks)
    assert np.isnan(whole[:, 1]).all()
    small = data.small(0, 0, 4, 10)
    assert small.shape == (4, 10)
    np.testing.assert_array_equal(small[:, 0], sinks.reshape(4, 6).max(1))
    attended = data.attended(data.choose(0, 0))
    assert dict(attended)[None] == pytest.approx(sinks[-1])
    assert [weight for _, weight in attended] == sorted((weight for _, weight in attended), reverse=True)


def test_a_head_without_a_sink_has_its_map_alone():
    data = look_data(arrays(*np.ones((2, 1, 3, 4)), tokens="abc"))
    assert not data.has_sink(0, 0)
    np.testing.assert_array_equal(data.small(0, 0, 3, 3), data.pooled(0, 0, 3, 3))
    assert None not in dict(data.attended(data.choose()))
    assert ">sink<" not in picture(data, data.choose()).decode()
    assert "a row sums to 1." in printed(data)


@pytest.mark.parametrize("n", [24, 40, 500])
def test_terminal_shows_a_learned_sink(n):
    data = look_data(with_sink(n))
    text = printed(data, data.choose(0, 0))
    assert "a row and the learned sink sum to 1." in " ".join(text.split())
    assert re.search(rf"^ +sink +{weight_text(data.sinks_of(0, 0)[-1])} ", text, re.MULTILINE)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert ("first the learned sink" in text) == (n == 500)
    row = next(line.partition("▸ ")[2] for line in text.splitlines() if "▸" in line)
    wide = 2 if n == 24 else 1
    assert row[:wide].strip()
    assert not row[wide : 2 * wide].strip()
    assert row[2 * wide :].strip()


def test_picture_draws_a_learned_sink():
    data = look_data(with_sink())
    root = ElementTree.fromstring(picture(data, data.choose(0, 0)))
    svg = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in root.iter(f"{svg}text")].count("sink") == 2  # above its column, and at its bar
    (column,) = (image for image in root.iter(f"{svg}image") if image.get("width") == "24")
    assert column.get("height") == "800"
    pixels = matplotlib.image.imread(BytesIO(base64.b64decode(column.get("href").split(",")[1])))
    np.testing.assert_array_equal((255 * pixels[:, 0, :3]).round(), ramp(tone(data.sinks_of(0, 0)), INK))
