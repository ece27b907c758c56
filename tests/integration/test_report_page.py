"""The report as a browser draws it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import HOSTILE, make_run

from lit_grpo.tools.dashboard.report import read_folder, write_report
from lit_grpo.tools.dashboard.report.content import report_content


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "made")
    write_report(folder)
    return folder


DRAWN_ONCE = "performance.getEntriesByName('drawn').length > 0"


def wait_until(page: Any, condition: str) -> None:
    """Wait until a condition holds; the page's policy lets no script evaluate text, as playwright's wait does."""
    deadline = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


class Visit:
    """A page, and what it said and asked for on the way."""

    def __init__(self, browser: Any, file: Path, width: int = 1360, theme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        wait_until(self.page, DRAWN_ONCE)

    def pixels(self) -> str:
        return self.page.locator("canvas").evaluate("canvas => canvas.toDataURL()")


@pytest.fixture(scope="module")
def visit(browser: Any, run: Path) -> Iterator[Visit]:
    opened = Visit(browser, run / "report.html")
    yield opened
    assert opened.said == [] and opened.requests == [(run / "report.html").as_uri()]


def num_panels(run: Path) -> int:
    return sum(len(section["panels"]) for section in report_content(read_folder(run))["sections"])


# What draws nothing has no path with a length, or a canvas of one color.
DRAWN = """() => [...document.querySelectorAll('figure')].filter(figure => {
  const canvas = figure.querySelector('canvas');
  if (canvas) {
    const pixels = new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    return new Set(pixels).size > 8;
  }
  return [...figure.querySelectorAll('path')].some(path => path.getAttribute('d').length > 20);
}).length"""


def test_every_panel_with_data_is_drawn_and_nothing_of_a_completion_runs(visit: Visit, run: Path) -> None:
    page = visit.page
    assert page.evaluate(DRAWN) == num_panels(run) + 2  # the timeline, and foretold lengths
    assert page.locator("figure").count() == num_panels(run) + 2
    assert page.title() == "made · lit_grpo" and page.locator("img").count() == 0
    assert "</script><script>document.title" in page.locator(".sample pre").last.text_content()
    assert page.locator("h1").text_content() == "madeended"
    assert page.get_by_text("mine/<b>bold</b>").first.is_visible()


@pytest.mark.nightly
def test_axis_smoothing_and_legend_change_what_is_drawn(visit: Visit) -> None:
    page, chart = visit.page, visit.page.locator("#learning-0")

    def line() -> str:
        return chart.locator("path.line").last.get_attribute("d")

    smooth = line()
    assert chart.locator("path.raw").count() == 1  # of reward; the few validations are not smoothed
    page.get_by_label("Smoothing").select_option("none")
    assert line() != smooth and chart.locator("path.raw").count() == 0
    page.get_by_label("By", exact=True).select_option("time/total_s")
    assert "min" in chart.locator("svg").text_content()
    assert "num_tokens" in page.get_by_label("By", exact=True).evaluate("each => [...each.options].map(o => o.value)")
    chart.get_by_role("button", name="val/reward").click()
    assert chart.locator("path.line").count() == 1
    assert page.locator("#throughput-0 path.area").count() == 5


def test_values_at_an_update_are_told_to_the_pointer_and_to_the_keyboard(visit: Visit) -> None:
    page, chart = visit.page, visit.page.locator("#learning-0")
    tip = chart.locator(".tip")
    chart.locator("svg").hover()
    assert tip.is_visible() and "update" in tip.text_content() and "reward" in tip.text_content()
    page.mouse.move(0, 0)
    assert not tip.is_visible()
    chart.locator("svg").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert "update 1" in tip.text_content()
    reward = report_content(read_folder(Path(page.url.removeprefix("file://")).parent))["metrics"]["reward"]["mean"][1]
    assert f"{reward:.4g}".rstrip("0") in tip.text_content()


@pytest.mark.nightly
def test_the_timeline_zooms_moves_and_comes_back(visit: Visit) -> None:
    page, canvas = visit.page, visit.page.locator("canvas")
    whole = visit.pixels()
    page.get_by_role("button", name="Zoom in").click()
    near = visit.pixels()
    canvas.focus()
    page.keyboard.press("ArrowRight")
    moved = visit.pixels()
    canvas.hover()
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(50)
    wheeled = visit.pixels()
    assert len({whole, near, moved, wheeled}) == 4
    page.mouse.move(0, 0)
    page.get_by_role("button", name="Show all").click()
    assert visit.pixels() == whole
    page.mouse.move(
        *canvas.evaluate("each => { const b = each.getBoundingClientRect(); return [b.left + 80, b.top + 60]; }")
    )
    assert "prompt train/" in page.locator("#timeline-chart .tip").text_content()
    page.locator("#timeline-chart select").select_option("0")
    assert "update 1." in canvas.get_attribute("aria-label")


@pytest.mark.nightly
def test_the_theme_follows_the_system_and_the_button(browser: Any, run: Path) -> None:
    grounds = []
    for theme in ("light", "dark"):
        visit = Visit(browser, run / "report.html", theme=theme)
        ground = "getComputedStyle(document.body).backgroundColor"
        grounds.append(visit.page.evaluate(ground))
        before = visit.pixels()
        visit.page.locator("#theme").click()
        assert visit.page.evaluate(ground) != grounds[-1] and visit.pixels() != before
        assert visit.said == []
        visit.page.close()
    assert grounds[0] != grounds[1]


def test_nothing_sticks_out_of_a_phone_or_a_desktop(visit: Visit) -> None:
    page = visit.page
    for width in (360, 800, 1360):
        page.set_viewport_size({"width": width, "height": 900})
        wait_until(page, f"drawn[0].width + 26 <= {width} && window.innerWidth === {width}")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        rights = "[...document.querySelectorAll('figure, figure *')].map(each => each.getBoundingClientRect().right)"
        assert max(page.evaluate(rights)) <= width


@pytest.mark.nightly
def test_ten_thousand_updates_are_a_small_file_that_is_drawn_at_once(browser: Any, run: Path, tmp_path: Path) -> None:
    """1.4 MB. As the reader sees it, it is drawn in 0.35 to 0.85 s on two shared cores; held here is what the
    page computes, 0.21 s, whatever else the machine does."""
    path = write_report(make_run(tmp_path / "long", updates=10_000))
    assert path.stat().st_size < 5e6
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(path.as_uri())
    wait_until(page, DRAWN_ONCE)
    figures = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
    assert 0 < figures["TaskDuration"] < 2
    assert page.evaluate(DRAWN) == num_panels(run) + 2
    assert "A point stands for up to 21 updates" in page.locator(".head").text_content()
    page.close()


# ---- several runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    """Two whole runs and one that has logged the reward alone."""
    folder = tmp_path_factory.mktemp("several")
    runs = [make_run(folder / "one"), make_run(folder / "other", updates=25), make_run(folder / "short", 9, ["reward"])]
    settings = (runs[1] / "config.yaml").read_text()
    (runs[1] / "config.yaml").write_text(settings.replace("my/policy", "<img src=x>"))
    (runs[0] / "memory.json").write_text(json.dumps(MEMORY))
    (runs[0] / "evaluation").mkdir()
    rows = [
        {"prompt_id": f"held_out/{number}", "prompt": HOSTILE, "policy": policy, "greedy": True, "sample": 0}
        | {"completion": f"{policy}: {HOSTILE}", "reward": 1.0, "correct": policy == "new" or number == 0}
        for policy in ("base", "new")
        for number in range(3)
    ]
    (runs[0] / "evaluation" / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened = Visit(browser, write_report(runs))
    yield opened
    assert opened.said == [] and opened.requests == [(folder / "report.html").as_uri()]


MEMORY = {
    "device": "cpu",
    "measured": {"weights": 2**28, "gradients": 2**28, "optimizer": 2**29, "other": 2**29, "kv_token": 2**10},
    "forecast": {"rollout": {"weights": 2**28, "keys and values": 2**27}, "update": {"weights": 2**28, "head": 2**24}},
}


def show(page: Any, name: str) -> None:
    page.get_by_label("Run", exact=True).select_option(label=name)


def test_runs_have_a_line_each_in_common_charts_and_their_own_pages(several: Visit) -> None:
    page = several.page
    show(page, "all compared")
    assert page.locator("h1").text_content() == "3 runs" and page.locator("img").count() == 0
    chart = page.locator("#learning-0")
    assert chart.locator("h3").text_content() == "reward" and chart.locator("path.line").count() == 3
    assert chart.locator(".legend").text_content() == "oneothershort"
    strokes = page.evaluate(
        "[...document.querySelectorAll('figure .legend button')].map(b => b.textContent + b.firstChild.style.cssText)"
    )
    assert len(set(strokes)) == 3 and len(strokes) > 100  # a run has the same color in all charts
    assert page.locator("#settings-that-differ table").text_content().count("<img src=x>") == 1
    assert page.locator("#final-figures tbody tr").count() == 3
    assert page.locator("#what-to-try-next ol").count() == 2  # nothing is wrong with the short one
    show(page, "other")
    assert page.locator("h1").text_content() == "otherended"
    assert page.evaluate(DRAWN) > 50 and page.locator("#timeline-chart").count() == 1
    page.get_by_label("By", exact=True).select_option("num_tokens")
    show(page, "short")
    assert page.locator("#learning-0 path.line").count() == 1  # it has no other axis than updates
    show(page, "all compared")
    page.locator("#final-figures").get_by_text("one").first.is_visible()


def test_values_of_several_runs_are_told_at_the_same_place(several: Visit) -> None:
    page = several.page
    show(page, "all compared")
    chart = page.locator("#learning-0")
    chart.locator("svg").focus()
    page.keyboard.press("End")
    tip = chart.locator(".tip").text_content()
    assert tip.startswith("update 40one") and "update 25" in tip and "update 9" in tip
    page.keyboard.press("Home")
    assert chart.locator(".tip").text_content().startswith("update 0one")


def test_memory_prompts_over_time_and_before_and_after_are_on_the_page_of_a_run(several: Visit) -> None:
    page = several.page
    show(page, "one")
    parts = page.locator("#memory-chart path.part")
    num_parts = parts.count()
    page.locator("#memory-chart").get_by_role("button", name="everything else").click()
    assert num_parts >= 9 and parts.count() == num_parts + 2  # of the process, in both measured bars
    assert "update, measured" in page.locator("#memory-chart svg").text_content()
    over_time = page.locator("#over-time article")
    assert over_time.count() == 4 and over_time.first.locator(".column").count() == 3
    changed = page.locator("#before-and-after")
    assert "2 are answered correctly only after, 0 only before, 1 by both" in changed.text_content()
    assert changed.locator("article").first.locator(".column").count() == 2
    assert (
        HOSTILE[:30] in changed.locator("pre").first.text_content()
        and page.title() == "3 runs: one, other, short · lit_grpo"
    )
    assert 1 <= page.locator("#what-to-try-next li").count() <= 5


@pytest.mark.parametrize("name", ["all compared", "one"])
def test_several_runs_fit_a_phone_and_a_desktop(several: Visit, name: str) -> None:
    page = several.page
    show(page, name)
    for width in (360, 1360):
        page.set_viewport_size({"width": width, "height": 900})
        wait_until(page, f"drawn[0].width + 26 <= {width} && window.innerWidth === {width}")
        assert page.evaluate("document.documentElement.scrollWidth") == width
