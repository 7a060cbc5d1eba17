"""``report.html`` in headless Chromium: the page that people see."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from conformance.judging.oracles.mean import mean
from conformance.judging.rule import MUST
from conformance.records.files import DONE
from conformance.records.run import Run
from conformance.scenarios.hook import ORDERED, TRAINING, VALUES
from conformance.session.report import write_report
from conformance.session.session import Session
from tests.judging.test_collective_order import issued
from tests.judging.test_collective_order import run as made_order
from tests.made_runs import event, made_run
from tests.made_sessions import conclusion_of, failed, made_session, with_runs

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
# Headless, and without connections of its own.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SIZES = {"wide": (1280, 900), "narrow": (390, 800)}
LARGEST = 3_000_000
LOADED = """
const entry = performance.getEntriesByType('navigation')[0];
return location.href === arguments[0] && entry.loadEventEnd > 0;
"""

pytestmark = [
    pytest.mark.ranks,  # it starts other processes
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="needs chromium and chromedriver: apt-get install chromium chromium-driver",
    ),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


def half_of(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return mean(run, rank, step, index) * (1 + 2**-12)


def runs() -> list[Run]:
    """Return runs with a result, bytes and losses of each step."""
    values = made_run(half_of, VALUES)
    ordered = made_run(mean, ORDERED)
    for rank in ordered.ranks:
        steps = range(len(ORDERED.steps))
        rank.events += [event("sent", step, collectives=[["allreduce", 200]]) for step in steps]
    training = made_run(mean, replace(TRAINING, steps=("normal",) * 6))
    for rank in training.ranks:
        rank.events += [event("trained", step, loss=2.0 - step / 8) for step in range(6)]
    for run in (values, ordered, training):
        for rank in run.ranks:
            rank.exit = DONE
            rank.events = [one for one in rank.events if one["event"] != "end"]
            rank.events.append(event("end", 9, tensors=len(rank.tensors)))
    return [values, ordered, training]


def parted() -> Run:
    """Return a run in which ranks part in their second collective."""
    one = [issued("barrier"), issued("allreduce SUM 7 float32"), issued("barrier")]
    other = [issued("barrier"), issued("allreduce SUM 1 float32"), issued("barrier")]
    return made_order(one, other, stopped="hang")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Chrome) -> Chrome:
    """A refused subject's report, open in a wide window."""
    monkeypatch.chdir(tmp_path)
    evidence = {"rank 0": {"exit": 70, "traceback": "ValueError: no\n" * 40}}
    session = made_session(failed("2.2", **evidence), failed("8.1"))
    browser.set_window_size(*SIZES["wide"])
    return opened(browser, with_runs(session, runs(), values=parted()))


def opened(browser: Chrome, session: Session) -> Chrome:
    """Write the report of a session and open it."""
    write_report(session, conclusion_of(session))
    address = (session.folder / "report.html").resolve().as_uri()
    browser.get(address)
    # On a busy machine get() returns while a large page is still being read.
    WebDriverWait(browser, 120).until(lambda page: page.execute_script(LOADED, address))
    return browser


def one(page: Chrome, selector: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, selector)


def all_of(page: Chrome, selector: str) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, selector)


def prefer(page: Chrome, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def color(page: Chrome, selector: str, name: str) -> str:
    return one(page, selector).value_of_css_property(name)


def test_the_verdict_the_claims_and_the_coverage_are_on_the_first_screen(page: Chrome) -> None:
    assert one(page, "h1").text == "REFUSED mypkg.hooks:half"
    cards = {card.text.split("\n")[0]: card for card in all_of(page, ".card")}
    assert list(cards) == ["Claims", "Rules", "Coverage", "Profile"]
    assert "rounded(float16)" in cards["Claims"].text
    assert "2 fail" in cards["Rules"].text
    assert all(card.rect["y"] + card.rect["height"] < 900 for card in cards.values())


def test_the_first_failure_is_seen_and_its_evidence_is_folded(page: Chrome) -> None:
    article = one(page, "article")
    assert article.text.startswith("2.2 ")
    assert "Look at" in article.text
    assert "Rerun" in article.text
    assert not one(page, "article .evidence pre").is_displayed()
    assert not any(section.get_attribute("open") for section in all_of(page, "details.section"))


def test_a_timeline_shows_where_ranks_parted(page: Chrome) -> None:
    table = one(page, "#failures article table")
    assert table.is_displayed()
    rows = [
        [cell.text for cell in row.find_elements(By.XPATH, "*")]
        for row in table.find_elements(By.CSS_SELECTOR, "tbody tr")
    ]
    assert rows[1][1:] == [
        "allreduce 7 float32\nstep 1, bucket 0",
        "allreduce 1 float32\nstep 1, bucket 0",
    ]
    parts = table.find_elements(By.CSS_SELECTOR, "tr.parts")
    assert [row.find_element(By.TAG_NAME, "th").text for row in parts] == ["2"]
    # The other rule fails in the same run: its timeline is named, and not repeated.
    assert len(all_of(page, "table")) == 1
    assert "as under 2.2" in all_of(page, "article")[1].text


def test_pictures_are_drawn(page: Chrome) -> None:
    names = [figure.get_attribute("id") for figure in all_of(page, "figure")]
    assert names == ["error-by-step", "error-distribution", "bytes", "loss", "margins", "cost"]
    for figure in all_of(page, "figure"):
        name = figure.get_attribute("id")
        drawing = figure.find_element(By.TAG_NAME, "svg")
        marks = drawing.find_elements(By.CSS_SELECTOR, ".series rect, .series path.line")
        sizes = [mark.rect["width"] * max(1, mark.rect["height"]) for mark in marks]
        assert any(size > 20 for size in sizes), name
        caption = figure.find_element(By.TAG_NAME, "figcaption").text
        assert len(caption) > 40, name
    assert "subject\nvanilla" in one(page, "#bytes .legend").text.replace(" ", "\n")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_have_the_colours_of_the_page(page: Chrome, scheme: str) -> None:
    prefer(page, scheme)
    text = color(page, "body", "color")
    numbers = re.findall(r"\d+", text)[:3]
    assert re.findall(r"\d+", color(page, "figure svg .axis text", "fill"))[:3] == numbers
    assert color(page, "body", "background-color") != text
    assert ("255, 255, 255" in color(page, "body", "background-color")) == (scheme == "light")
    assert color(page, "figure svg .background", "fill") == "none"
    prefer(page, "light")


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_cut_off(page: Chrome, size: str) -> None:
    page.set_window_size(*SIZES[size])
    width, inner = page.execute_script(
        "return [document.documentElement.scrollWidth, window.innerWidth]"
    )
    assert width <= inner
    for element in all_of(page, ".card, figure, figure svg, article"):
        assert element.rect["x"] >= 0
        assert element.rect["x"] + element.rect["width"] <= inner + 1


def test_search_shows_the_rules_that_contain_a_text(page: Chrome) -> None:
    field = one(page, "#search")
    field.send_keys("9.1")
    found = [rule.text for rule in all_of(page, ".rule") if rule.is_displayed()]
    assert found
    assert all("9.1" in text for text in found)
    assert one(page, "#found").text == f"{len(found)} found"
    field.send_keys(Keys.BACKSPACE * 3)
    assert one(page, "article").is_displayed()


def test_links_unfold_the_rule_that_they_lead_to(page: Chrome) -> None:
    target = page.find_element(By.ID, "1.1")
    assert not target.is_displayed()
    page.execute_script("location.hash = '#1.1'")
    deadline = time.monotonic() + 10
    while not target.is_displayed() and time.monotonic() < deadline:
        page.execute_script("return 0")
    assert target.is_displayed()


def test_everything_is_reached_by_the_keyboard(page: Chrome) -> None:
    reached = set()
    body = one(page, "body")
    body.click()
    for _ in range(60):
        page.switch_to.active_element.send_keys(Keys.TAB)
        element = page.switch_to.active_element
        reached.add((element.tag_name, element.get_attribute("class")))
    tags = {tag for tag, _ in reached}
    assert {"input", "a", "summary"} <= tags
    assert ("div", "scroll") in reached
    summary = one(page, "article details.evidence summary")
    page.execute_script("arguments[0].focus()", summary)
    summary.send_keys(Keys.ENTER)
    assert one(page, "article .evidence pre").is_displayed()


def test_print_is_black_on_white_and_unfolded(page: Chrome) -> None:
    prefer(page, "dark")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert not one(page, ".filter").is_displayed()
    assert "0, 0, 0" in color(page, "body", "color")
    assert all(section.get_attribute("open") for section in all_of(page, "details.section"))
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_page_loads_nothing_and_has_no_errors(page: Chrome) -> None:
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert page.get_log("browser") == []


def test_a_report_with_a_hundred_failures_opens_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Chrome
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "  File \"<stdin>\", line 1, in <module> & 'so on'\n"
    session = made_session()
    numbers = [number for number, rule in session.rules.items() if rule.level == MUST][:100]
    for number in numbers:
        kept = {"exit": 70, "traceback": line * 100, "stacks": line * 120}
        evidence = {f"rank {rank}": {**kept, "output": f"{rank}{line * 99}"} for rank in range(4)}
        session.judgements[number] = failed(number, "<actual>" * 1000, **evidence)
    opened(browser, with_runs(session, runs(), values=parted()))
    size = (session.folder / "report.html").stat().st_size
    assert size < LARGEST
    assert len(all_of(browser, "article")) == 100
    ready = browser.execute_script(
        "const entry = performance.getEntriesByType('navigation')[0]; return entry.loadEventEnd"
    )
    print(f"{size} bytes, opened in {ready:.0f} ms")  # pytest -rP shows it
    # Milliseconds of the browser. A busy machine is given more: the page has no verdict.
    assert 0 < ready < 1000 * patience()


def patience() -> float:
    """Return how many times longer than on an idle machine everything may take."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
