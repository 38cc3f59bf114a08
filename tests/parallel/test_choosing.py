"""Deals by live tiles and bytes, and how a plan shows them."""

import numpy as np
import pytest

import regard
from regard.cli import main


def test_a_causal_rule_takes_stripes_and_a_window_contiguous_shards() -> None:
    causal = regard.plan(n=32768, d=64, heads=2, causal=True, ranks=4).ranks
    window = regard.plan(n=65536, d=64, heads=2, mask=regard.window(256), ranks=8).ranks
    assert causal is not None
    assert window is not None
    assert (causal.deal, window.deal) == ("stripes", "contiguous")
    assert causal.balance <= 1.05
    assert window.balance <= 1.05
    gathered = 8 * 7 * (65536 // 8) * 2 * 128 * 4
    assert 0 < sum(window.bytes) < 0.02 * gathered
    assert sorted(i for runs in causal.rows for run in runs for i in run) == list(range(32768))


def test_documents_are_dealt_where_they_lie() -> None:
    ids = np.arange(8192) // 512
    ranks = regard.plan(n=8192, d=64, mask=regard.documents(ids), ranks=4).ranks
    assert ranks is not None
    assert (ranks.deal, ranks.bytes, ranks.balance) == ("contiguous", (0, 0, 0, 0), 1.0)


def test_more_ranks_than_positions() -> None:
    ranks = regard.plan(n=3, d=8, ranks=5).ranks
    assert ranks is not None
    assert ranks.rows == ((range(1),), (range(1, 2),), (range(2, 3),), (), ())
    assert "rows none" in str(regard.plan(n=3, d=8, ranks=5))


def test_the_command_shows_a_line_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--n", "4096", "--d", "64", "--causal", "--ranks", "2"])
    shown = capsys.readouterr().out
    assert "2, stripes: 1.0" in shown
    assert "rank 1" in shown
    assert "rows 128 to 255, 384 to 511 and 14 more" in shown
