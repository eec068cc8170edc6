"""The page in a browser, with a server that answers from a table, and with real models."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from tests.inspect.browser import Shown, contrasts, opened
from tests.serve.fake_api import FakeServer, served
from ziggurat.serve.config import ServeConfig
from ziggurat.serve.server import app_of

FOLDER = Path(__file__).resolve().parents[2] / "ziggurat" / "serve" / "interfaces" / "static"
GERMAN = "Der Hund 🐕 läuft schnell.\n\nEr bellt laut."
ENGLISH = "The dog 🐕 runs fast.\n\nIt barks loudly."
REFUSED = "Failed to load resource"  # the browser itself logs each error response

FAST = """for (const name of ["setTimeout", "setInterval"]) {
  const own = window[name];
  window[name] = (work, milliseconds) => own(work, milliseconds / 8);
}"""

Visit = Callable[..., Shown]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def started() -> Iterator[FakeServer]:
    fake = FakeServer()
    with served(fake.app()) as address:
        fake.address = address
        yield fake


@pytest.fixture
def fake(started: FakeServer) -> FakeServer:
    started.reset()
    return started


def new_window(browser: Any, *, width: int = 1280, fast: bool = True, **settings: Any) -> Shown:
    """An empty page in its own profile; if `fast`, its timers run eight times as fast."""
    allowed = ["clipboard-read", "clipboard-write"]
    size = {"width": width, "height": 844}
    context = browser.new_context(viewport=size, locale="en-GB", permissions=allowed, **settings)
    context.set_default_timeout(60_000)  # on a busy machine
    if fast:
        context.add_init_script(FAST)
    return Shown(context.new_page())


@pytest.fixture(scope="module")
def usual(browser: Any) -> Iterator[Shown]:
    window = new_window(browser)
    yield window
    window.page.context.close()


@pytest.fixture
def visit(browser: Any, fake: FakeServer, usual: Shown) -> Iterator[Visit]:
    """Open the page in the usual window, emptied, in one with other settings, or in another tab of `before`.

    At the end there must be no requests to other servers and no messages in the console.
    """
    windows: list[tuple[Shown, str]] = []

    def open_page(address: str = "", *, before: Shown | None = None, **settings: Any) -> Shown:
        if before is not None:
            window = Shown(before.page.context.new_page())
        elif settings or windows:
            window = new_window(browser, **settings)
        else:
            window = usual
            usual.said.clear()
            usual.requested.clear()
        windows.append((window, address or fake.address))
        window.page.goto(address or fake.address)
        window.page.locator("#to option").first.wait_for(state="attached")
        return window

    yield open_page
    for window, address in windows:
        server = "/".join(address.split("/")[:3])
        assert all(url.startswith((server, f"blob:{server}")) for url in window.requested)
        assert [text for text in window.said if REFUSED not in text] == []
        if window is usual:
            usual.page.evaluate("localStorage.clear(); sessionStorage.clear()")
            usual.page.goto("about:blank")
    for window, _ in windows:
        if window.page.context != usual.page.context:
            window.page.context.close()
        elif window is not usual:
            window.page.close()


TYPED = """text => {
  const source = document.activeElement;
  for (const letter of text) {
    source.value += letter;
    source.dispatchEvent(new InputEvent("input", { bubbles: true, data: letter }));
  }
}"""
"""TYPED is text entered without pauses, so that the machine's load does not matter."""


def wait_until(window: Shown, condition: Callable[[], bool]) -> None:
    """Wait until the server has seen something."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        window.page.wait_for_timeout(20)


def translate(window: Shown, text: str = GERMAN, expected: str = ENGLISH) -> None:
    window.page.fill("#source", text)
    shows(window, expected)


def shows(window: Shown, expected: str) -> None:
    window.page.wait_for_function(
        """expected => {
             const seen = document.getElementById("target");
             return seen.textContent.replaceAll("▾", "") === expected && !seen.matches(".stale, [aria-busy=true]");
           }""",
        arg=expected,
    )


def lit(window: Shown, pane: str) -> list[str]:
    return list(window.page.locator(f"#{pane} .on").all_text_contents())


def menu(window: Shown) -> list[str]:
    window.page.locator("#menu button").first.wait_for()
    return list(window.page.locator("#menu button").all_text_contents())


# Typing


def test_typed_text_is_translated_once_after_a_pause(visit: Visit, fake: FakeServer) -> None:
    window = visit(fast=False)
    window.page.evaluate(TYPED, "Er bellt laut.")  # the text has the focus
    shows(window, "It barks loudly.")
    assert [asked["text"] for asked in fake.asked] == ["Er bellt laut."]
    assert fake.asked[0] | {"source": "auto", "target": "en", "alignments": True} == fake.asked[0]
    assert window.page.locator("#from option:checked").text_content() == "German (detected)"
    assert window.page.text_content("#counter") == "14 / 200"
    window.page.wait_for_selector("#announcement >> text=Translated into English.", state="attached")
    window.page.click("#clear")
    shows(window, "")
    assert window.page.evaluate("document.activeElement.id") == "source"
    assert len(fake.asked) == 1
    assert window.page.url == f"{fake.address}/"
    window.page.keyboard.type("Er bellt laut.")
    shows(window, "It barks loudly.")


@pytest.mark.slow
def test_further_typing_cancels_the_current_request(visit: Visit, fake: FakeServer) -> None:
    window = visit(fast=False)
    fake.delay = 1.0
    window.page.fill("#source", "Er bellt laut.")
    window.page.keyboard.press("Control+Enter")
    window.page.wait_for_selector("#target[aria-busy=true]")
    wait_until(window, lambda: len(fake.asked) == 1)
    fake.delay = 0.0
    translate(window, "Der Hund 🐕 läuft schnell.", "The dog 🐕 runs fast.")
    wait_until(window, lambda: fake.called_off == 1)
    shows(window, "The dog 🐕 runs fast.")


@pytest.mark.slow
def test_languages_are_swapped_and_remembered(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    translate(window, "Der Hund 🐕 läuft schnell.", "The dog 🐕 runs fast.")
    window.page.fill("#terms input >> nth=0", "Hund")
    window.page.fill("#terms input >> nth=1", "hound")
    window.page.keyboard.press("Alt+Shift+KeyS")
    shows(window, "Der Hund 🐕 läuft schnell.")
    assert window.page.input_value("#source") == "The dog 🐕 runs fast."
    assert fake.asked[-1]["glossary"] == [{"source": "hound", "target": "Hund", "mode": "soft"}]
    again = visit(before=window)
    assert [again.page.input_value(f"#{name}") for name in ("from", "to")] == ["en", "de"]
    assert again.page.input_value("#source") == ""
    again.page.select_option("#to", "qlo")
    assert again.page.is_disabled("#swap"), "no model translates from Qlo"
    offered = again.page.locator("#from option").all_text_contents()
    assert offered == ["Detect language", "Arabic", "English", "German"]


@pytest.mark.slow
def test_each_side_has_its_language_and_direction(visit: Visit) -> None:
    window = visit()

    def side(name: str) -> list[str]:
        return list(window.page.eval_on_selector(f"#{name}", "e => [e.lang, e.dir]"))

    assert side("source") == ["", "auto"]
    window.page.select_option("#from", "en")
    window.page.select_option("#to", "ar")
    translate(window, "The dog runs.", "الكلب يجري.")
    assert (side("source"), side("target")) == (["en", "ltr"], ["ar", "rtl"])
    window.page.focus("#target .word")
    window.page.keyboard.press("ArrowLeft")  # in its own direction, in which this is forwards
    assert window.page.evaluate("document.activeElement.textContent") == "يجري"
    window.page.click("#swap")
    assert (side("source"), side("mirror"), side("target")) == (["ar", "rtl"], ["ar", "rtl"], ["en", "ltr"])


def test_text_is_never_markup_and_a_text_in_the_target_language_is_reported(visit: Visit) -> None:
    window = visit()
    window.page.select_option("#from", "en")
    hostile = "<img src=x onerror=alert(1)>."
    translate(window, hostile, f"<b>{hostile.upper()}</b>")
    assert window.page.locator("#target b, #target img, #mirror img").count() == 0
    assert window.page.is_hidden("#note")
    window.page.select_option("#from", "auto")
    window.page.select_option("#to", "en")
    translate(window, "A cat.", "A cat.")
    assert window.page.text_content("#note") == "The text is already in English."


# Words


def test_the_pointer_highlights_corresponding_words(visit: Visit) -> None:
    window = visit()
    translate(window)
    window.page.hover("#target .word >> text=runs")  # after a character of two units
    assert (lit(window, "mirror"), lit(window, "target")) == (["läuft"], ["runs"])
    window.page.hover("#target .word >> text=loudly")  # a word of the second sentence
    assert (lit(window, "mirror"), lit(window, "target")) == (["laut"], ["loudly"])
    box = window.page.locator("#mirror .word >> text=bellt").bounding_box()
    window.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert (lit(window, "mirror"), lit(window, "target")) == (["bellt"], ["barks"])
    window.page.mouse.move(5, 5)
    assert lit(window, "mirror") + lit(window, "target") == []
    assert window.page.text_content("#target") == "The dog 🐕 runs fast.▾\n\nIt barks loudly.▾"
    properties = ["padding", "font", "letterSpacing", "whiteSpace", "overflowWrap", "textAlign", "direction", "tabSize"]
    text, mirror = (
        window.page.eval_on_selector(
            f"#{name}",
            """(e, names) => [names.map(name => getComputedStyle(e)[name]), e.getBoundingClientRect().toJSON(),
                 e.clientWidth, e.scrollHeight]""",
            properties,
        )
        for name in ("source", "mirror")
    )
    assert text == mirror, "otherwise highlights are off the words"


@pytest.mark.slow
def test_another_word_is_chosen_and_the_translation_continues(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    translate(window)
    window.page.click("#target .word >> text=runs")
    assert menu(window) == ["walks quickly.", "is running fast."]
    asked = {"text": "Der Hund 🐕 läuft schnell.", "source": "de", "target": "en", "prefix": "The dog 🐕"}
    asked["complete"] = True
    assert fake.asked[-1] | {**asked, "alternatives": 3, "next_words": True} == fake.asked[-1]
    window.page.click("#menu button >> text=walks")
    shows(window, "The dog 🐕 walks briskly.\n\nIt barks loudly.")
    assert fake.asked[-1] | {**asked, "prefix": "The dog 🐕 walks"} == fake.asked[-1]
    assert "next_words" not in fake.asked[-1]
    assert window.page.evaluate("document.activeElement.textContent") == "briskly"
    window.page.hover("#target .word >> text=briskly")
    assert lit(window, "mirror") == ["schnell"]
    window.page.hover("#target .word >> text=barks")  # the following text has moved
    assert lit(window, "mirror") == ["bellt"]
    window.page.click("#target .word >> text=It")
    assert menu(window) == ["He barks loudly."]
    assert not fake.asked[-1].keys() & {"prefix", "complete"}
    assert fake.asked[-1]["next_words"] is True
    window.page.keyboard.press("Escape")
    assert window.page.evaluate("document.activeElement.textContent") == "It"
    for word in ("loudly", "barks"):  # "Its bark is loud." begins with "It", but has another word there
        window.page.click(f"#target .word >> text={word}")
        window.page.wait_for_selector("#choices-said >> text=No other word was found.")
        window.page.keyboard.press("Escape")


def test_words_and_sentences_are_chosen_with_the_keyboard(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    translate(window)
    press = window.page.keyboard.press
    for _ in range(2):  # past the button below the text
        press("Tab")
    assert window.page.evaluate("document.activeElement.textContent") == "The"
    assert lit(window, "mirror") == ["Der"]
    press("ArrowRight")
    press("ArrowRight")
    press("Enter")
    assert menu(window) == ["walks quickly.", "is running fast."]
    press("ArrowDown")
    press("ArrowDown")  # round
    press("ArrowUp")
    assert window.page.evaluate("document.activeElement.textContent") == "is running fast."
    press("Enter")
    shows(window, "The dog 🐕 is running fast.\n\nIt barks loudly.")
    assert window.page.evaluate("document.activeElement.textContent") == "running"
    assert window.page.locator("#target [role=button]").all_text_contents() == ["running"]
    press("Tab")
    assert window.page.evaluate("document.activeElement.ariaLabel") == "Other translations of sentence 1"
    press("Tab")
    press("Enter")
    assert menu(window) == ["He barks loudly."]
    press("Enter")
    shows(window, "The dog 🐕 is running fast.\n\nHe barks loudly.")
    assert window.page.evaluate("document.activeElement.ariaLabel") == "Other translations of sentence 2"
    assert fake.asked[-1] | {"text": "Er bellt laut.", "prefix": "He barks loudly."} == fake.asked[-1]
    window.page.hover("#target .word >> text='He'")
    assert lit(window, "mirror") == ["Er"]


def test_a_word_that_cannot_be_chosen_shows_the_reason(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    translate(window)
    fake.failures = 2 * [(400, "no prefix through a third language.", {})]  # with alignments, and without
    window.page.click("#target .word >> text=runs")
    window.page.wait_for_selector("#choices-said >> text=The server refused (400): no prefix through a third language.")
    window.page.keyboard.press("Escape")
    window.page.click(".other >> nth=1")
    assert menu(window) == ["He barks loudly."]
    fake.failures = 2 * [(400, "no prefix through a third language", {})]
    window.page.click("#menu button")
    shows(window, "The dog 🐕 runs fast.\n\nHe barks loudly.")
    assert window.page.is_hidden("#problem")


def test_unsure_words_are_underlined(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    translate(window)
    assert window.page.locator(".unsure").count() == 0
    window.page.check("#unsure")
    window.page.wait_for_selector(".unsure")
    assert window.page.locator(".unsure").all_text_contents() == ["fast", "It"]
    assert [asked["scores"] for asked in fake.asked] == [False, True]


def test_models_without_alignment_still_have_words_and_sentences(visit: Visit, fake: FakeServer) -> None:
    fake.exported = True
    window = visit()
    window.page.select_option("#from", "de")
    translate(window)
    assert window.page.is_hidden("#problem")
    window.page.click("#target .word >> text=runs")
    assert menu(window) == ["walks quickly.", "is running fast."]
    assert lit(window, "mirror") == []
    window.page.keyboard.press("Escape")
    window.page.click(".other >> nth=1")
    assert menu(window) == ["He barks loudly."]
    assert [asked.get("alignments", False) for asked in fake.asked] == [True, False, False, False], "asked once"


# Failures


@pytest.mark.slow
def test_a_busy_server_is_asked_again(visit: Visit, fake: FakeServer) -> None:
    fake.start_failures = [(503, "", {"Retry-After": "2"})]
    window = visit()
    assert window.page.is_hidden("#problem")
    assert fake.start_failures == []
    fake.failures = [(429, "Slowdown: 60 requests per 1 minute", {"Retry-After": "8"})]
    window.page.fill("#source", GERMAN)
    window.page.wait_for_selector("#problem:not([hidden])")
    said = "Too many requests: Slowdown: 60 requests per 1 minute. Trying again"
    assert window.page.text_content("#problem [role=alert]") == said
    assert window.page.text_content("#countdown") in [f"in {seconds} s" for seconds in range(1, 9)]
    shows(window, ENGLISH)
    assert window.page.is_hidden("#problem")
    fake.failures = [(503, "de-en: failed", {"Retry-After": "600"})]
    window.page.fill("#source", "Er bellt laut.")
    window.page.wait_for_selector("#complaint >> text=cannot translate at the moment: de-en: failed.")
    window.page.click("#again")
    shows(window, "It barks loudly.")


def test_other_errors_are_shown_in_words(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    fake.failures = [*2 * [(400, "<i>no</i>", {})], (504, "", {})]
    for text, said in (
        ("a", "The server refused (400): <i>no</i>."),
        ("b", "The translation took too long."),
        ("🐕" * 201, "The text is 1 character too long."),
    ):
        window.page.fill("#source", text)
        window.page.wait_for_function("said => document.getElementById('complaint').textContent === said", arg=said)
    assert len(fake.asked) == 3, "what is too long is not sent"
    assert window.page.is_hidden("#again")
    assert window.page.get_attribute("#source", "aria-invalid") == "true"
    assert window.page.text_content("#counter.over") == "201 / 200"


def test_without_a_network_it_waits_for_one(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    window.page.context.set_offline(True)
    window.page.fill("#source", GERMAN)
    window.page.wait_for_selector("#complaint >> text=You are offline. Trying again")
    window.page.context.set_offline(False)
    shows(window, ENGLISH)


@pytest.mark.slow
def test_a_key_is_asked_for_and_stays_in_the_tab(visit: Visit, fake: FakeServer) -> None:
    assert visit().page.is_hidden("#key-box")
    fake.key = "secret"
    window = visit()
    window.page.fill("#source", GERMAN)
    window.page.wait_for_selector("#complaint >> text=This server requires an API key")
    assert fake.asked == []
    window.page.fill("#key", "wrong")
    window.page.click("#key-box button")
    window.page.wait_for_selector("#complaint >> text=The API key is not accepted: Invalid API key.")
    window.page.fill("#key", "secret")
    window.page.keyboard.press("Enter")
    shows(window, ENGLISH)
    window.page.reload()
    assert window.page.input_value("#key") == "secret"
    assert "secret" not in window.page.evaluate("JSON.stringify(localStorage) + location.href + document.cookie")
    assert visit(before=window).page.input_value("#key") == ""


# Glossary, documents, link


@pytest.mark.slow
def test_terms_are_sent_and_kept_only_on_request(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    for index, (term, wanted) in enumerate((("Hund", "hound"), ("laut", "noisily"), ("Katze", "cat"), ("half", ""))):
        if index:
            window.page.click("#add")
        window.page.locator("#terms input").nth(2 * index).fill(term)
        window.page.locator("#terms input").nth(2 * index + 1).fill(wanted)
    window.page.locator("#terms select").first.select_option(label="always")
    translate(window)
    assert fake.asked[-1]["glossary"] == [
        {"source": "Hund", "target": "hound", "mode": "hard"},
        {"source": "laut", "target": "noisily", "mode": "soft"},
        {"source": "Katze", "target": "cat", "mode": "soft"},
    ]
    said = ["used", "not used: the sentence would suffer", "not in the text", ""]
    assert window.page.locator("#terms .use").all_text_contents() == said
    assert "hound" not in window.page.evaluate("JSON.stringify(localStorage)")
    assert visit(before=window).page.input_value("#terms input >> nth=0") == ""
    window.page.check("#keep")
    again = visit(before=window)
    assert again.page.locator("#terms li").count() == 3
    assert again.page.locator("#terms select").first.input_value() == "hard"
    again.page.click("#terms button >> nth=1")
    assert "noisily" not in again.page.evaluate("JSON.stringify(localStorage)")
    again.page.uncheck("#keep")
    assert "hound" not in again.page.evaluate("JSON.stringify(localStorage)")


@pytest.mark.slow
def test_terms_are_always_applied_if_the_model_cannot_weigh_them(visit: Visit, fake: FakeServer) -> None:
    fake.hard = ("de", "en")
    window = visit()
    window.page.select_option("#from", "en")
    window.page.select_option("#to", "de")
    window.page.fill("#terms input >> nth=0", "dog")
    window.page.fill("#terms input >> nth=1", "Hund")
    mode = window.page.locator("#terms select").first
    assert (mode.input_value(), window.page.is_hidden("#always")) == ("soft", True)
    window.page.check("#keep")
    for source in ("de", "auto"):  # `auto` may be German
        window.page.select_option("#from", source)
        window.page.select_option("#to", "en")
        assert (mode.input_value(), window.page.is_hidden("#always")) == ("hard", False)
        assert mode.locator("option").first.is_disabled()
    translate(window)
    assert fake.asked[-1]["glossary"] == [{"source": "dog", "target": "Hund", "mode": "hard"}]
    window.page.select_option("#from", "ar")
    assert (mode.input_value(), window.page.is_hidden("#always")) == ("soft", True), "as it was wished for"
    again = visit(before=window)
    assert again.page.locator("#terms select").first.input_value() == "soft"


@pytest.mark.slow
def test_documents_are_sent_watched_and_saved(visit: Visit, fake: FakeServer, tmp_path: Path) -> None:
    window = visit()
    window.page.select_option("#from", "de")
    window.page.fill("#terms input >> nth=0", "Hund")
    window.page.fill("#terms input >> nth=1", "hound")
    fake.gate = False
    fake.document_failures = [(429, "a full queue", {"Retry-After": "4"})]
    files = {"ä.txt": b"gut", "b.txt": b"damaged", "c.jpeg": b"", "d.html": b"x" * 3000}
    given = [{"name": name, "mimeType": "text/plain", "buffer": content} for name, content in files.items()]
    window.page.set_input_files("#files", given[:1])
    window.page.wait_for_selector("#uploads >> text=Too many requests: a full queue. Trying again in 4 s.")
    window.page.wait_for_selector("#uploads >> text=1 of 3 sentences")
    bar = window.page.locator("#uploads progress")
    assert (bar.get_attribute("max"), bar.get_attribute("value")) == ("3", "1")
    window.page.set_input_files("#files", given[1:])
    fake.gate = True
    wrong = ["These can: .txt, .html", "The file is larger than 2 KiB."]
    for said in ("Translated into English", "the file is damaged", *wrong):
        window.page.wait_for_selector(f"#uploads >> text={said}")
    form = {"source": "de", "target": "en", "glossary": '[{"source":"Hund","target":"hound","mode":"soft"}]'}
    assert [asked for asked in fake.asked if "text" not in asked] == [form] * 3  # one refused, two accepted
    with window.page.expect_download() as waited:
        window.page.click("#uploads >> text=Download")
    waited.value.save_as(tmp_path / "found")
    assert (waited.value.suggested_filename, (tmp_path / "found").read_bytes()) == ("en-ä.txt", b"GUT")
    assert window.page.locator("#uploads progress").count() == 0


def test_a_document_is_dropped_and_cancelled(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    fake.gate = False
    window.page.evaluate("""() => {
      const held = new DataTransfer();
      held.items.add(new File(["a"], "a.txt"));
      for (const kind of ["dragover", "drop"])
        document.body.dispatchEvent(new DragEvent(kind, {dataTransfer: held, bubbles: true, cancelable: true}));
    }""")
    window.page.wait_for_selector("#uploads >> text=1 of 3 sentences")
    with window.page.expect_request(lambda request: request.method == "DELETE"):
        window.page.click("#uploads >> text=Cancel")
    wait_until(window, lambda: fake.documents == {})
    window.page.locator("#uploads li").first.wait_for(state="detached")


@pytest.mark.slow
def test_text_is_in_a_link_only_on_request(visit: Visit, fake: FakeServer) -> None:
    window = visit()
    translate(window)
    window.page.keyboard.press("Alt+Shift+KeyC")
    window.page.wait_for_selector("#copy >> text=Copied")
    assert window.page.evaluate("navigator.clipboard.readText()") == ENGLISH
    window.page.click("#link")
    window.page.wait_for_selector("#link >> text=Copied")
    link = window.page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{fake.address}/#source=auto&target=en&text=Der+Hund")
    assert "Hund" not in window.page.url
    again = visit(link)
    shows(again, ENGLISH)
    assert again.page.input_value("#source") == GERMAN
    assert again.page.url == f"{fake.address}/"
    assert not any("Hund" in url for url in window.requested)


# Appearance


def states(visit: Visit, fake: FakeServer, **settings: Any) -> Iterator[Shown]:
    """Yield a page with a lot of content, with a menu, and with an error and a dialogue."""
    window = visit(**settings)
    window.page.check("#unsure")
    window.page.fill("#terms input >> nth=0", "Hund")
    window.page.fill("#terms input >> nth=1", "hound")
    translate(window, f"{'Der Hund 🐕 läuft schnell. ' * 7}\n\n", f"{'The dog 🐕 runs fast. ' * 7}\n\n")
    fake.gate = False
    window.page.set_input_files("#files", {"name": "a" * 60 + ".txt", "mimeType": "text/plain", "buffer": b""})
    window.page.wait_for_selector("#uploads >> text=1 of 3 sentences")
    fake.gate = True
    window.page.wait_for_selector("#uploads >> text=Download")
    window.page.set_input_files("#files", {"name": "b.jpeg", "mimeType": "image/jpeg", "buffer": b""})
    window.page.hover("#target .word >> nth=0")
    yield window
    window.page.click("#target .word >> text=runs >> nth=6")
    assert len(menu(window)) == 2
    yield window
    window.page.keyboard.press("Escape")
    fake.failures = [(503, "no", {"Retry-After": "600"})]
    window.page.fill("#source", "")
    window.page.fill("#source", "Er bellt laut.")
    window.page.wait_for_selector("#problem:not([hidden])")
    window.page.click("#open-help")
    yield window


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_and_is_legible(visit: Visit, fake: FakeServer, width: int) -> None:
    for window in states(visit, fake, width=width):
        assert window.page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = window.page.evaluate(
            """() => [...document.querySelectorAll("button, select, input:not(.hidden), #choices")]
                 .filter(e => e.checkVisibility()).map(e => (e.closest("label") ?? e).getBoundingClientRect())"""
        )
        assert min(box["height"] for box in boxes) >= 24, "targets (WCAG 2.5.8)"
        assert all(box["left"] >= 0 and box["right"] <= width for box in boxes)
        names = window.page.locator("#uploads .name")
        assert all(each.bounding_box()["width"] > 150 for each in names.all()), "not a letter in a line"
    window.page.evaluate("document.querySelectorAll('#mirror, noscript').forEach(e => e.remove())")  # nobody reads it
    for scheme, expected in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(22, 24, 29)")):  # as in the report
        window.page.emulate_media(color_scheme=scheme)
        assert window.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == expected
        found = contrasts(window.page)
        assert len(found) > 40
        assert found[0][0] >= 4.5, (scheme, found[:5])


@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_accessibility_problem(visit: Visit, fake: FakeServer, width: int) -> None:
    path = os.environ.get("ZIGGURAT_AXE")
    if not path:
        pytest.skip("$ZIGGURAT_AXE names no axe.min.js (npm install axe-core)")
    for window in states(visit, fake, width=width):
        window.page.evaluate(Path(path).read_text(encoding="utf-8"))  # not as a script element: the policy forbids it
        for scheme in ("light", "dark"):
            window.page.emulate_media(color_scheme=scheme)
            found = window.page.evaluate("axe.run()")
            assert len(found["passes"]) > 15
            assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []


@pytest.mark.slow
def test_motion_and_forced_colours(visit: Visit, fake: FakeServer) -> None:
    window = visit(reduced_motion="reduce", forced_colors="active")
    translate(window)
    window.page.hover("#target .word >> text=runs")
    style = "e => { const s = getComputedStyle(e); return [s.backgroundColor, s.color, s.outlineStyle]; }"
    paper, ink, _ = window.page.eval_on_selector("#target .on", style)
    assert paper not in (ink, window.page.eval_on_selector("#target", style)[0])
    assert window.page.eval_on_selector("#mirror .on", style)[2] == "solid"
    assert window.page.eval_on_selector("#mirror", style)[1] == "rgba(0, 0, 0, 0)", "the text is shown once"
    fake.delay = 0.5
    window.page.fill("#source", "Er bellt laut.")
    window.page.wait_for_selector("#working:not([hidden])")
    assert window.page.eval_on_selector("#working", "e => getComputedStyle(e, '::before').animationName") == "none"
    shows(window, "It barks loudly.")


# Real models


def test_the_page_with_real_models(visit: Visit, folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    models = [{"path": str(path), "threads": 1} for path in folders.values()]
    config = ServeConfig.model_validate({"models": models, "names": {"qlo": "Qlo"}})
    text = "The dog runs.\n\nA child — 🐕 — barks."
    with served(app_of(config, lambda said: None)) as address:
        window = visit(address)
        window.page.select_option("#from", "en")
        window.page.select_option("#to", "de")
        window.page.fill("#source", text)
        window.page.wait_for_selector("#target .other >> nth=1")
        assert window.page.is_hidden("#problem")
        asked = {"text": text, "alignments": True}
        direct, through = (
            httpx.post(f"{address}/v1/translate", json=asked | {"source": source, "target": target}, timeout=60)
            for source, target in (("en", "de"), ("de", "qlo"))
        )
        (answer,) = direct.json()["translations"]
        shows(window, answer["text"])
        window.page.hover("#target .word >> nth=1")
        assert lit(window, "mirror"), "models tell alignments"
        window.page.click("#target .other >> nth=0")
        chosen = menu(window)[0]
        window.page.click("#menu button >> nth=0")
        shows(window, chosen + answer["text"][answer["sentences"][0]["target"][1] :])
        window.page.click("#target .word >> nth=1")
        window.page.wait_for_function("() => document.getElementById('choices-said').textContent !== 'Looking …'")
        window.page.keyboard.press("Escape")
        sent = {"name": "a.txt", "mimeType": "text/plain", "buffer": text.encode()}
        window.page.set_input_files("#files", sent)
        with window.page.expect_download() as waited:
            window.page.click("#uploads >> text=Download")
        waited.value.save_as(tmp_path / "found")
        assert waited.value.suggested_filename == "a_de.txt"
        assert (tmp_path / "found").read_text(encoding="utf-8").count("\n") == 2
        window.page.select_option("#to", "qlo")
        window.page.select_option("#from", "de")  # through English
        shows(window, through.json()["translations"][0]["text"])
        window.page.click("#target .word + .word >> nth=0")  # there is something before it
        window.page.wait_for_selector("#choices-said >> text=`prefix` and `next_words` need one model")


# Files


def test_the_files_load_nothing_from_elsewhere_and_create_no_markup() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function| style=| on\w+=\""
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"https?:[^'\"]+", text) in ([], ["http://www.w3.org/2000/svg"]), path.name
        assert not re.search(markup, text), path.name


@pytest.mark.slow
def test_browsers_get_a_strict_policy_and_each_file_once(serve: Any) -> None:
    client = serve()
    names = {path.name for path in FOLDER.iterdir()}
    for path in ["/", *(f"/{name}" for name in names - {"index.html"})]:
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.content == (FOLDER / (path[1:] or "index.html")).read_bytes()
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers.get_list("cache-control") == ["no-cache"]
        again = client.get(path, headers={"If-None-Match": f'"other", W/{answer.headers["etag"]}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", answer.headers["etag"])
        assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.get("/languages").headers["cache-control"] == "no-store"
    assert serve(page=False).get("/").status_code == 404
