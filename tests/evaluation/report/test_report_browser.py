"""Test the report in a real browser: no errors, all figures, filters, tooltips and printing."""

import shutil

import pytest
from helpers.report_results import many, results

from rope_patch.evaluation import write_report

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
playwright = pytest.importorskip("playwright.sync_api")

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium in PATH")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    first, second = results(), results()
    second["run"] |= {"name": "Other-2B", "weights": "others"}
    second["methods"] = second["methods"][:2]
    second["retrieval"] = second["retrieval"][:1]
    return write_report([first, second], tmp_path_factory.mktemp("report")).as_uri()


@pytest.fixture(scope="module")
def many_methods(tmp_path_factory):
    return write_report(many(), tmp_path_factory.mktemp("many")).as_uri()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, address):
    """Open the report; fail at the end if the page had errors or requests."""
    contexts = []
    errors = []

    def open_with(address=address, unfolded=True, **options):
        options.setdefault("viewport", {"width": 1200, "height": 900})
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda r: None if r.url == address else errors.append(r.url))
        page.goto(address)
        if unfolded:
            page.evaluate("document.querySelectorAll('.part').forEach((e) => { e.open = true; })")
        return page

    yield open_with
    for context in contexts:
        context.close()
    assert errors == []


@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_and_nothing_overflows(open_page, width, scheme):
    page = open_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    kind = "wide" if width > 640 else "narrow"
    boxes = [figure.bounding_box() for figure in page.locator(f"figure .{kind} svg").all()]
    assert len(boxes) == 10
    assert all(box["width"] > 300 and box["height"] > 150 for box in boxes)
    paths = "e => e.querySelectorAll('path').length"
    assert all(f.evaluate(paths) > 5 for f in page.locator(f"figure .{kind} svg").all())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) > 384
    assert light == (scheme == "light")


def test_filters_hide_methods_and_tasks_everywhere(open_page):
    page = open_page()
    status = page.locator("[role=status]")
    assert status.text_content() == "Showing 3 of 3 methods and 3 of 3 tasks."

    def count_visible(selector):
        return sum(element.is_visible() for element in page.locator(selector).all())

    rows = page.locator("tr", has_text="yarn ×2").first
    before = count_visible("svg [data-method]")
    assert rows.is_visible()
    page.get_by_text("Show only some methods and tasks").click()
    page.get_by_label("yarn ×2").uncheck()
    assert status.inner_text() == "Showing 2 of 3 methods and 3 of 3 tasks."
    assert not rows.is_visible()
    assert count_visible("svg [data-method]") < before
    assert page.locator("tr", has_text="linear ×2").first.is_visible()

    head = page.locator("tr.rows", has_text="vt")
    assert head.is_visible()
    page.get_by_label("vt", exact=True).uncheck()
    assert not head.is_visible()
    maps = page.get_by_role("heading", name="niah_single_1")
    assert maps.first.is_visible()
    page.get_by_label("niah_single_1").focus()
    page.keyboard.press("Space")
    assert not maps.first.is_visible()
    page.get_by_role("button", name="Show all").click()
    page.wait_for_function("document.querySelectorAll('.filtered').length === 0")
    assert status.inner_text() == "Showing 3 of 3 methods and 3 of 3 tasks."


def test_tooltips_follow_pointer_and_keyboard(open_page):
    page = open_page()
    tip = page.get_by_role("tooltip")
    cell = page.locator(".heat td[data-tip]").first
    assert not tip.is_visible()
    cell.scroll_into_view_if_needed()
    page.wait_for_timeout(100)  # scrolling hides tooltips
    cell.hover()
    assert "right at depth 10% of 2,048 tokens" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.mouse.move(0, 0)

    cell.focus()
    assert tip.is_visible()
    assert cell.get_attribute("aria-describedby") == tip.get_attribute("id")
    page.keyboard.press("ArrowRight")
    assert "of 4,096 tokens" in tip.inner_text()
    page.keyboard.press("ArrowDown")
    assert "at depth 50% of 4,096 tokens" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.keyboard.press("ArrowUp")
    assert "at depth 10% of 4,096 tokens" in tip.inner_text()
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1200


def test_each_table_is_one_tab_stop(open_page):
    page = open_page()
    stops = "t => t.querySelectorAll('[tabindex=\"0\"]').length"
    assert {table.evaluate(stops) for table in page.locator(".heat").all()} == {1}
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"


def test_without_scripts_all_content_is_visible(open_page):
    page = open_page(unfolded=False, java_script_enabled=False)
    assert page.locator("form").count() == 1
    assert not page.locator("form").is_visible()
    assert "right at depth 10%" in page.locator(".heat td[title]").first.get_attribute("title")
    assert page.locator("tr", has_text="yarn ×2").first.is_visible()


def test_the_report_prints(open_page, tmp_path):
    page = open_page(color_scheme="dark")
    page.emulate_media(media="print")
    assert not page.locator("form").is_visible()
    width = page.evaluate("document.querySelector('main').clientWidth")
    assert width > 500
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    pages = pdf.count(b"/Type /Page\n") or pdf.count(b"/Type /Page ") or pdf.count(b"/Type/Page")
    assert pages > 3
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_eight_rows_are_shown_and_the_rest_folds_open(open_page, many_methods):
    page = open_page(many_methods, unfolded=False)
    assert [part.get_attribute("open") for part in page.locator(".part").all()] == [None] * 13
    assert sum(table.is_visible() for table in page.locator("table").all()) == 1
    assert page.locator("figure").count() > 1
    (picture,) = (each for each in page.locator("figure").all() if each.is_visible())
    tops = [page.locator(".verdict"), picture, page.locator(".first table").first]
    tops = [part.bounding_box()["y"] for part in tops]
    assert tops == sorted(tops)
    rows = page.locator(".first tbody tr")
    assert rows.count() == 14
    assert sum(row.is_visible() for row in rows.all()) == 8
    page.get_by_text("6 more rows").first.click()
    assert sum(row.is_visible() for row in rows.all()) == 14
    top = page.locator(".verdict").bounding_box()["y"]
    assert top < 200  # nothing but the title stands above the sentence


def test_all_folds_are_open_in_print(open_page, many_methods):
    page = open_page(many_methods, unfolded=False)
    page.emulate_media(media="print")
    folded = page.locator(".fold tbody tr, .part li")
    assert folded.count() > 20
    assert all(row.bounding_box()["height"] > 0 for row in folded.all()[:20])
    assert not page.get_by_text("6 more rows").first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_cut_on_a_phone_has_a_sign_that_it_scrolls(open_page, many_methods, scheme):
    page = open_page(many_methods, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # Whatever is wider than the page is within a part that scrolls.
    out = """() => [...document.querySelectorAll("body *")].filter((e) =>
        e.getBoundingClientRect().right > 391 && !e.closest(".scroll") && e.checkVisibility()
        && !e.closest(".skip")).map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(out) == []
    sign = """(e) => [e.scrollWidth > e.clientWidth + 1, ...["::before", "::after"].map(
        (part) => getComputedStyle(e.parentElement, part).content !== "none")]"""
    visible = [scroll for scroll in page.locator(".scroll").all() if scroll.is_visible()]
    signs = [scroll.evaluate(sign) for scroll in visible]
    assert all(left is False and right == cut for cut, left, right in signs)
    first = page.locator(".first .scroll").first
    assert first.evaluate(sign) == [True, False, True]
    first.evaluate("e => e.scrollTo(50, 0)")
    page.wait_for_function("document.querySelector('.first .more-left')")
    first.evaluate("e => e.scrollTo(9999, 0)")
    page.wait_for_function("!document.querySelector('.first .more-right')")
    assert first.evaluate(sign) == [True, True, False]


def test_a_row_of_several_methods_goes_with_the_last_of_them(open_page, many_methods):
    page = open_page(many_methods)
    page.get_by_text("Show only some methods").click()
    row = page.locator("tr", has_text="method 0 = method 13").first
    page.get_by_label("method 0", exact=True).uncheck()
    assert row.is_visible()
    page.get_by_label("method 13", exact=True).uncheck()
    assert not row.is_visible()
