"""Words and spans of tokens in the text: sums over keys, means over queries."""

from typing import Any

import numpy as np
from in_browser import READY, Tab
from test_page import accessible, hash_of

TOLD = "all => all.map(b => [Number(b.dataset.token), Number(b.dataset.weight)])"


def listed(page: Any) -> dict[int, float]:
    return dict(page.eval_on_selector_all(".strongest button", TOLD))


def example_weights(tab: Tab) -> tuple[np.ndarray, list[str]]:
    answers = tab.viewer.answers
    found = answers.get("example/values/2/2").content
    return np.nan_to_num(found), answers.get("example/tokens").content["tokens"]


def test_words_sum_over_keys_and_average_over_queries(tab: Tab) -> None:
    page = tab.open("view=text&layer=2&head=2&i=50&scene=example")
    page.wait_for_selector(READY["text"])
    assert page.locator(".token.chosen").count() == 1
    page.get_by_label("Words").check()
    page.wait_for_function("() => document.querySelectorAll('.token.chosen').length > 1")
    page.wait_for_function("() => document.querySelector('aside h2').textContent.includes(' to ')")
    weights, tokens = example_weights(tab)
    chosen = page.locator(".token.chosen").all_inner_texts()
    assert "".join(chosen).strip() == "Otokar"
    rows = [int(x.get_attribute("data-token")) for x in page.locator(".token.chosen").all()]
    word = "".join(tokens).rindex("Otokar")
    assert rows[-6:] == list(range(word, word + 6))
    mean = weights[rows].mean(0)
    first = "".join(tokens).index("Otokar")
    start = first - 1  # the blank belongs to the word
    found = listed(page)
    np.testing.assert_allclose(found[start], mean[start : first + 6].sum(), rtol=1e-5)
    assert sum(found.values()) <= 1.0001
    accessible(page)
    page.get_by_label("Shade").select_option("true")
    page.wait_for_function("() => location.hash.includes('by=true')")
    page.wait_for_timeout(500)
    summed = weights[:, rows].sum(1)
    for at, weight in listed(page).items():
        stop = at + 1
        while stop < len(tokens) and tokens[stop] not in " .⊢":
            stop += 1
        if tokens[at] not in ".⊢":
            np.testing.assert_allclose(weight, summed[at:stop].mean(), rtol=1e-5)


def test_several_tokens_are_chosen_with_shift(tab: Tab) -> None:
    page = tab.open("view=text&layer=2&head=2&i=46&scene=example&by=true&j=17")
    page.wait_for_selector(READY["text"])
    page.locator(".token[data-token='22']").click(modifiers=["Shift"])
    page.wait_for_function("() => document.querySelectorAll('.token.chosen').length === 6")
    page.wait_for_function("() => document.querySelector('aside h2').textContent.includes('17 to 22')")
    weights, _ = example_weights(tab)
    summed = weights[:, 17:23].sum(1)
    for at, weight in listed(page).items():
        np.testing.assert_allclose(weight, summed[at], rtol=1e-5)
    np.testing.assert_allclose(max(listed(page).values()), summed.max(), rtol=1e-6)
    page.locator(".text-scroll").focus()
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_function("() => location.hash.includes('span=23')")
    assert hash_of(page)["j"] == "17"
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => document.querySelectorAll('.token.chosen').length === 1")
    assert "span" not in hash_of(page)
