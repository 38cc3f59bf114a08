"""A token that is pointed at is lit wherever it stands, with its weight; words of a text are found."""

from in_browser import READY, Tab

LIT = "all => all.map(x => Number(x.dataset.token))"


def test_a_token_is_lit_in_every_panel(tab: Tab) -> None:
    page = tab.open("view=map&layer=2&head=2&i=53&j=25")
    page.wait_for_selector(READY["map"])
    page.locator(".token-row .shares .word[data-token='3']").first.hover()
    page.wait_for_function("() => document.querySelectorAll('.lit-token').length > 1")
    assert set(page.eval_on_selector_all(".lit-token", LIT)) == {3}
    weight = float(tab.viewer.answers.get("example/row/2/2/53").content[3])
    told = "w => Math.abs(document.querySelector('.readout output').dataset.weight - w) < 1e-6"
    page.wait_for_function(told, arg=weight)
    box = page.locator(".deepmap .stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.8)
    page.wait_for_selector(".pointer-tag:not([hidden])")
    readout = page.locator(".map .readout output").inner_text()
    assert page.locator(".pointer-tag").inner_text() == readout
    assert len(set(page.eval_on_selector_all(".lit-token", LIT))) == 2


def test_words_of_a_text_are_found(tab: Tab) -> None:
    page = tab.open("view=text&layer=2&head=2")
    page.wait_for_selector(READY["text"])
    box = page.get_by_role("searchbox", name="Find in the text")
    box.fill("otokar")
    assert page.locator(".search output").inner_text() == "2 found"
    for token in (16, 45, 16):
        box.press("Enter")
        page.wait_for_function("i => location.hash.includes(`i=${i}`)", arg=token)
    box.fill("zebra")
    assert page.locator(".search output").inner_text() == "not found"
