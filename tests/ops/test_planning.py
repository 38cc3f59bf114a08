"""Plans: counted by formula, by brute force over all pairs, and against what the engine really does."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import regard
from regard.cli import main
from regard.engines.tiled.tiles import BLOCK_K, BLOCK_Q, head_blocks
from regard.ops.normalization import problem_from
from regard.ops.planning import plan
from regard.rules import alibi, causal, documents, padding, prefix, softcap, strided, window
from support import traced_memory


def sizes(n=1000, m=None, h=2, d=16, lead=()):
    return (*lead, h, n, d), (*lead, h, m or n, d), (*lead, h, m or n, d)


def brute_force(mask, n, m, offset=None):
    """How many of the tiles of one head hold a visible pair, how many pairs those tiles hold, how many are visible."""
    first = m - n if offset is None else offset
    i, j = np.arange(first, first + n), np.arange(m)
    every = np.zeros((n, m), bool)
    zero = np.zeros((), np.int64)
    every[...] = regard.rules.evaluate([mask.node], regard.rules.At(zero, zero, i[:, None], j, keys=m))[0]
    visited = pairs = full = 0
    for row in np.unique(i // BLOCK_Q):
        for key in np.unique(j // BLOCK_K):
            tile = every[np.ix_(i // BLOCK_Q == row, j // BLOCK_K == key)]
            visited += tile.any()
            full += tile.all()
            pairs += tile.size * tile.any()
    return visited, full, pairs, every.sum()


MASKS = {
    "causal": causal(),
    "window": window(70),
    "two sides": window(100, 300),
    "prefix": causal() | prefix(300),
    "padding": padding(700),
    "documents": documents(np.repeat(np.arange(8), 140)) & causal(),
    "everything": window(None, None),
}


@pytest.mark.parametrize("n", [1000, 1024])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_those_that_hold_a_visible_pair(name, n):
    mask = MASKS[name]
    found = plan(*sizes(n), mask=mask).tiles
    visited, full, pairs, visible = brute_force(mask, n, n)
    assert found.full + found.mixed == 2 * visited
    assert found.full == 2 * full
    assert found.total == found.skipped + found.full + found.mixed == 2 * -(-n // BLOCK_Q) * -(-n // BLOCK_K)
    assert found.pairs == 2 * pairs
    assert found.visible == pytest.approx(visible / n**2, rel=1e-12)
    assert found.exact
    assert found.visible_exact


@pytest.mark.parametrize(
    ("n", "m", "offset"), [(100, 1000, None), (1, 3000, None), (300, 100, None), (500, 700, 13), (64, 5, -200)]
)
def test_tiles_where_queries_and_keys_differ(n, m, offset):
    found = plan(*sizes(n, m), causal=True, offset=offset)
    visited, full, pairs, visible = brute_force(causal(), n, m, offset)
    assert (found.tiles.full + found.tiles.mixed, found.tiles.full) == (2 * visited, 2 * full)
    assert found.flops_visited == 4 * 2 * pairs * 16
    assert found.tiles.visible == pytest.approx(visible / (n * m), rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"mask": window(90)},
        {"mask": lambda b, h, i, j: (j <= i) & (i - j <= 100 * (h + 1) + 50 * b)},
        {"score": [softcap(5.0), alibi(np.array([0.5, 0.25, 0.1, 0.05]))], "causal": True},
        {"causal": True, "offset": np.array([0, 40, -300])},
        {"mask": np.tri(500, dtype=bool)},
    ],
)
def test_tiles_are_those_that_the_engine_visits(options):
    shape = (3, 4, 500, 8)
    found = plan(shape, (3, 2, 500, 8), (3, 2, 500, 8), **options).tiles
    zeros = np.zeros(shape, np.float32)
    p = problem_from(zeros, zeros[:, :2], zeros[:, :2], **options)
    blocks = [block for heads in head_blocks(p) for block in heads.blocks]
    assert found.full + found.mixed == sum(len(block.tiles) * block.heads.h.size for block in blocks)
    assert found.total == sum(len(block.heads.tile_starts) * block.heads.h.size for block in blocks)


def test_flops_and_bytes():
    found = plan((3, 8, 100, 32), (3, 2, 300, 32), (3, 2, 300, 48), dtype="float16")
    pairs = 3 * 8 * 100 * 300
    assert found.flops == found.flops_visited == 2 * pairs * (32 + 48)
    assert found.flops_backward == found.flops_visited_backward == 5 * pairs * (32 + 48)
    assert found.bytes_read == 2 * 3 * (8 * 100 * 32 + 2 * 300 * 32 + 2 * 300 * 48)
    assert found.bytes_written == 3 * 8 * 100 * (48 * 2 + 4)
    assert plan(*sizes(d=64)).flops == 4 * 2 * 1000 * 1000 * 64


def test_naive_memory_at_8192_is_256_mib_per_head():
    found = plan((8, 8192, 64), (8, 8192, 64), (8, 8192, 64), causal=True)
    assert found.naive_memory_per_head == 256 * 2**20
    assert found.naive_memory == 2 * 2**30
    assert "256 MiB per head" in str(found)
    assert found.working_memory < 32 * 2**20


def test_causal_by_formula():
    n = 8192
    found = plan(*sizes(n), causal=True)
    # A block of rows sees its own end's worth of keys, rounded up to whole tiles.
    visited = sum(-(-end // BLOCK_K) for end in range(BLOCK_Q, n + 1, BLOCK_Q))
    assert found.tiles.full + found.tiles.mixed == 2 * visited
    assert found.tiles.visible == pytest.approx((n + 1) / (2 * n), rel=1e-9)


def test_arrays_and_shapes_give_the_same_plan():
    arrays = [np.zeros(shape, np.float64) for shape in sizes(300)]
    assert plan(*arrays, causal=True) == plan(*sizes(300), dtype=np.float64, causal=True)
    assert plan(*(x[0] for x in arrays)).heads == 1
    assert plan((300, 4, 16), (300, 2, 16), (300, 2, 16), layout="bnhd").kv_heads == 2
    assert plan(*sizes(100), dtype="bfloat16").dtype == "bfloat16"


def test_a_plan_allocates_nothing_of_the_size_of_the_call():
    with traced_memory() as held:
        plan(*sizes(16384, d=128, lead=(64,)), mask=window(1000))
        _, peak = held()
    assert peak < 4 * 2**20


def test_a_plan_for_a_million_keys_is_an_estimate():
    found = plan(*sizes(1_000_000, h=1), mask=window(1000))
    assert not found.tiles.exact
    assert found.tiles.total == -(-1_000_000 // BLOCK_Q) * -(-1_000_000 // BLOCK_K)
    # Each row sees 1,001 keys, but for the first 1,000 rows.
    starts = np.arange(0, 1_000_000, BLOCK_Q)
    visited = (starts + BLOCK_Q - 1) // BLOCK_K - np.maximum(starts - 1000, 0) // BLOCK_K + 1
    assert found.tiles.full + found.tiles.mixed == pytest.approx(visited.sum(), rel=0.01)
    assert found.tiles.visible == pytest.approx(1001 / 1e6 - 0.5e-6, rel=0.01)
    assert "about" in str(found)


def test_estimate_where_every_tile_is_mixed():
    found = plan(*sizes(4096, h=1), mask=strided(16)).tiles
    assert found.exact
    assert not found.visible_exact
    assert found.mixed == found.total
    assert found.visible == pytest.approx(1 / 16, rel=1e-3)


@pytest.mark.parametrize(("d", "dtype"), [(16, np.float64), (64, np.float32), (128, np.float16)])
def test_working_memory_is_about_what_the_engine_takes(d, dtype, monkeypatch):
    monkeypatch.setattr("regard.runtime.threads._chosen", 1)
    x = np.random.default_rng(0).standard_normal((1, 4096, d)).astype(dtype)
    found = plan(x, x, x, causal=True)
    regard.attention(x, x, x, causal=True)  # what is compiled once
    with ThreadPoolExecutor(1) as fresh, traced_memory() as held:  # a thread that keeps no memory of earlier calls
        out = fresh.submit(regard.attention, x, x, x, causal=True).result()
        _, peak = held()
    assert found.working_memory / 2.5 < peak - out.nbytes < found.working_memory * 2.5


def test_engines_and_reasons():
    found = plan(*sizes(100))
    assert found.engine == "cpu"
    assert found.engines == {
        "cpu": "the first that supports this call",
        "tiled": "supports this call too, but comes later",
        "device": "runs only when named",
        "spec": "runs only when named",
    }
    named = plan(*sizes(100), engine="spec", causal=True)
    assert named.engine == "spec"
    assert named.engines["spec"] == "named"
    assert named.engines["tiled"] == "supports this call too, but comes later"
    assert named.flops_visited == named.flops
    with pytest.raises(ValueError, match="engine must be one of 'cpu', 'tiled', 'device', 'spec', got 'gpu'"):
        plan(*sizes(100), engine="gpu")


def test_text():
    text = str(plan(*sizes(1000), mask=window(16) & causal(), score=softcap(50.0)))
    for line in (
        "call      batch 1, 2 heads, 1000 queries, 1000 keys, d = 16, float32",
        "rules     window(16) & causal(), softcap(50.0)",
        "engine    cpu: the first that supports this call",
        "          not spec: runs only when named",
        "forward   128 MFLOP, ",
        "backward  320 MFLOP, ",
        "naive     7.629 MiB of scores, 3.815 MiB per head",
    ):
        assert line in text


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (2, 0, 4)])
def test_empty_axes(shape):
    found = plan(shape, shape, shape)
    assert found.flops == found.flops_visited
    assert found.tiles.visible == (1.0 if shape == (5, 0) else 0.0)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (sizes(10)[:1] * 2 + ((2, 9, 16),), {}, ValueError, "same number of keys"),
        (((2, 10, -1),) * 3, {}, TypeError, "query must be an array or a shape of non-negative integers"),
        (((2, 10, 1.5),) * 3, {}, TypeError, "query must be an array or a shape of non-negative integers"),
        (sizes(10), {"dtype": "int32"}, TypeError, r"dtype must be a floating dtype \(.*\), got 'int32'"),
        (sizes(10), {"dtype": "float"}, None, ""),
        (sizes(10), {"dtype": "wide"}, TypeError, r"dtype must be a floating dtype \(.*\), got 'wide'"),
        (sizes(10), {"scale": np.nan}, ValueError, "scale must be finite"),
        (sizes(10), {"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\)"),
    ],
)
def test_bad_input(arguments, options, error, message):
    if error is None:
        assert plan(*arguments, **options).dtype == "float64"
        return
    with pytest.raises(error, match=message):
        plan(*arguments, **options)


LARGE = """
import resource
import regard
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
n = 2**40
shapes = ((8, n, 64),) * 3
causal = regard.plan(*shapes, causal=True).tiles
assert causal.mixed == 8 * n // 128
assert abs(causal.visible - 0.5) < 1e-3 and not causal.exact
window = regard.plan(*shapes, mask=regard.window(4096)).tiles
assert 0.99 < window.visible / (4097 / n) < 1.01
assert regard.plan(*shapes).tiles.full == 8 * (n // 128) ** 2
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory as Linux has them")
def test_a_plan_takes_no_memory_however_long_the_call() -> None:
    subprocess.run([sys.executable, "-c", LARGE], check=True)


SIZES = {"n": 40, "d": 8, "n_keys": 70, "d_value": 4, "heads": 6, "kv_heads": 3, "batch": 2}


def test_sizes_mean_shapes():
    named = plan(**SIZES, causal=True, dtype=np.float64)
    assert named == plan((2, 6, 40, 8), (2, 3, 70, 8), (2, 3, 70, 4), causal=True, dtype=np.float64)
    turned = plan(**SIZES, causal=True, dtype=np.float64, layout="bnhd")
    assert turned == plan((2, 40, 6, 8), (2, 70, 3, 8), (2, 70, 3, 4), causal=True, dtype=np.float64, layout="bnhd")
    assert turned.heads == named.heads == 6
    assert plan(n=40, d=8) == plan((40, 8), (40, 8), (40, 8))
    assert plan(n=40, d=8, kv_heads=1, heads=4) == plan((4, 40, 8), (1, 40, 8), (1, 40, 8))


def test_the_command_takes_the_same_sizes(capsys):
    options = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
    assert main(["plan", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for label, line in plan(**SIZES).rows():
        assert " ".join(f"{label} {line}".split()) in said


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("size", "error", "said"),
    [
        (-1, ValueError, "must be at least 1, got -1"),
        (0, ValueError, "must be at least 1, got 0"),
        (True, TypeError, "must be an int, got True"),
        (2.0, TypeError, "must be an int, got 2.0"),
        ("8", TypeError, "must be an int, got '8'"),
        (2**70, ValueError, "must be below 2**60, got 1180591620717411303424"),
    ],
)
def test_a_wrong_size_is_refused_by_name(name, size, error, said):
    with pytest.raises(error) as raised:
        plan(**SIZES | {name: size})
    assert str(raised.value) == f"{name} {said}"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({}, TypeError, "plan takes query, key and value, or sizes such as n=1024, d=64: got neither"),
        ({"d": 8}, TypeError, "n is missing: sizes are n, d and others as needed"),
        ({"n": 8, "heads": 2}, TypeError, "d is missing: sizes are n, d and others as needed"),
        (
            {"query": (4, 8), "n": 4, "d": 8},
            TypeError,
            "plan takes query, key and value, or sizes, not both: got query and n",
        ),
        (
            {"n": 2**40, "d": 2**30},
            ValueError,
            "query must have fewer than 2**60 entries, got shape (1099511627776, 1073741824)",
        ),
        ({"n": 8, "d": 8, "heads": 3, "kv_heads": 2}, ValueError, None),
        ({"query": (4, 8)}, TypeError, None),
        ({"n": 8, "d": 8, "n_k": 9}, TypeError, "plan() got an unexpected keyword argument 'n_k'; here it is n_keys="),
    ],
)
def test_forms_that_do_not_go_together(arguments, error, said):
    with pytest.raises(error) as raised:
        plan(**arguments)
    assert said is None or str(raised.value) == said
    assert raised.value.args[0].count("\n") == 0


def test_a_plan_and_an_error_print_bytes_alike():
    found = plan(n=2**26, d=4, causal=True)
    assert found.naive_memory == 16 * 2**50
    assert "16 PiB of scores, 16 PiB per head" in str(found)
    keys = np.zeros((1, 4), np.float32)
    keys = np.broadcast_to(keys, (2**26, 4))
    with pytest.raises(MemoryError, match=r"the results of this call take 16 PiB \(weights 16 PiB"):
        regard.attention(keys, keys, keys, return_weights=True)


def test_a_plan_takes_no_memory_for_batch_elements_that_are_alike():
    """Nor time: a step for each of 2^26 elements would take a minute."""
    small, large = sizes(n=300, lead=(3,)), sizes(n=300, lead=(2**20,))
    one = plan(*small, causal=True).tiles
    with traced_memory() as held:
        many = plan(*large, causal=True).tiles
        peak = held()[1]
    assert (many.full, many.mixed) == (one.full * 2**20 // 3, one.mixed * 2**20 // 3)
    assert peak < 2**20
