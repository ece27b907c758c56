// The page: heading, tools, and sections in their order.

performance.mark("begun");

function heading(run) {
  const { name, head, problems, rows, axis } = run;
  const facts = make("dl", { class: "facts" }, ...head.facts.map(([title, value, note]) => make("div", {}, make("dt", {}, title), make("dd", {}, value, note ? make("small", {}, note) : null))));
  const binned = axis.rows_per_point > 1 ? ` A point stands for up to ${axis.rows_per_point} updates: lines are means, and shades reach from the least to the greatest value.` : "";
  return make("header", { class: "head" }, make("h1", {}, name, make("span", { class: `state ${head.state}` }, head.state)),
    make("p", { class: "note" }, `As of ${content.written}, ${rows.toLocaleString("en")} rows of metrics.csv.${binned}`), facts,
    ...problems.map((sentence) => make("p", { class: "note" }, sentence)));
}

function bar(titles) {
  const links = make("nav", { "aria-label": "Sections" }, ...titles.map((title) => make("a", { href: `#${anchor(title)}` }, title)));
  const tools = make("div", { class: "tools" });
  if (content.comparison) {
    const options = [["", "all compared"], ...content.runs.map((run, index) => [String(index), run.name])];
    tools.append(choice("Run", options, chosen.run ? String(content.runs.indexOf(chosen.run)) : "", (value) => showPage(value === "" ? null : content.runs[Number(value)])));
  }
  const others = axes();
  if (!(chosen.x in others)) chosen.x = "update";
  if (Object.keys(others).length) tools.append(choice("By", [["update", "updates"], ...Object.entries(others)], chosen.x, (value) => { chosen.x = value; drawAll(); }));
  tools.append(choice("Smoothing", [["auto", "smooth"], ["strong", "smoother"], ["none", "not smoothed"]], chosen.smoothing, (value) => { chosen.smoothing = value; drawAll(); }));
  tools.append(make("button", { type: "button", class: "button", id: "theme", onclick: () => setTheme(theme() === "dark" ? "light" : "dark", true) }, ""));
  return make("div", { class: "bar" }, make("div", {}, links, tools));
}

function anchor(title) {
  return title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
}

function metricSection(run, { title, about, panels, table }) {
  const charts = panels.map((panel, index) => new Chart(panel, linesOf(run, panel), `${anchor(title)}-${index}`));
  const parts = title === "Memory" && run.memory ? new MemoryChart(run.memory).figure : null;
  return section(title, about, parts, make("div", { class: "panels" }, ...charts.map((chart) => chart.figure)), values(title, table));
}

function section(title, about, ...children) {
  return make("section", { id: anchor(title), "aria-labelledby": `${anchor(title)}-title` }, make("h2", { id: `${anchor(title)}-title` }, title), about ? make("p", {}, about) : null, ...children);
}

function values(title, rows) {
  const head = make("tr", {}, ...["metric", "last", "least", "mean", "greatest"].map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map(([name, ...numbers]) => make("tr", {}, make("td", {}, name), ...numbers.map((number) => make("td", {}, short(number)))));
  return make("details", {}, make("summary", {}, `All ${rows.length} metrics of ${title} in numbers`), make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))));
}

function timelineSection(run) {
  const shown = run.timelines.length, number = run.num_timelines;
  const some = shown < number ? ` ${shown} of the ${number} recorded ones are here.` : "";
  const about = `Which slot decoded which completion when, and what else the step did (rollout_timeline).${some}`;
  return section("Timeline", about, new SlotTimeline(run.timelines).figure);
}

/** Sentences with a figure and a setting to change. */
function advice(rows) {
  const items = rows.map(({ sentence, page, heading }) => make("li", {}, sentence, " ", make("span", { class: "page" }, `(${page}, ${heading})`)));
  return make("ol", { class: "advice" }, ...items);
}

function settings(run) {
  const parts = [["Settings (config.yaml)", run.config], ["Versions", run.versions]].filter(([, text]) => text);
  return section("Settings", "", ...parts.map(([title, text]) => make("details", {}, make("summary", {}, title), make("div", { class: "scroll", tabindex: 0 }, make("pre", {}, text)))));
}

// ---- light and dark -----------------------------------------------------------------------------------

const preferred = window.matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return document.documentElement.dataset.theme;
}

function setTheme(name, keep = false) {
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  if (button) {
    button.textContent = name === "dark" ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", name === "dark" ? "Light colors" : "Dark colors");
  }
  try {
    if (keep) localStorage.setItem("lit_grpo-theme", name);
  } catch {} // where files may keep nothing
  drawAll();
}

function keptTheme() {
  try {
    return localStorage.getItem("lit_grpo-theme");
  } catch {
    return null;
  }
}

// ---- all of it ----------------------------------------------------------------------------------------

let ready = false;

function drawAll() {
  if (!ready) return;
  for (const each of drawn) each.measure(); // all widths first: the browser lays the page out once
  for (const each of drawn) each.draw();
}

/** The sections of one run: their titles and elements. */
function runParts(run) {
  const made = run.sections.filter((each) => each.table.length).map((each) => [each.title, metricSection(run, each)]);
  const parts = run.advice.length ? [["What to try next", section("What to try next", "", advice(run.advice))]] : [];
  parts.push(...made.filter(([title]) => title !== "Own"));
  if (run.timelines.length) parts.push(["Timeline", timelineSection(run)]);
  if (run.lengths || run.samples.length) {
    const lengths = run.lengths ? new LengthChart(run.lengths).figure : null;
    const about = "What the policy writes, and how well its lengths are predicted.";
    parts.push(["Completions", section("Completions", about, make("div", { class: "pair" }, lengths, run.samples.length ? completions(run) : null))]);
  }
  if (run.held_out.length) parts.push(["Held out", overTime("Held out", HELD_OUT, "validation", run.held_out)]);
  if (run.over_time.length) parts.push(["Over time", overTime("Over time", OVER_TIME, "update", run.over_time)]);
  if (run.evaluation) parts.push(["Before and after", beforeAndAfter(run.evaluation)]);
  parts.push(...made.filter(([title]) => title === "Own"));
  if (run.config || run.versions) parts.push(["Settings", settings(run)]);
  return parts;
}

/** Show the page of a run, or the comparison of all of them. */
function showPage(run) {
  chosen.run = run;
  chosen.pointed = null;
  drawn.length = 0;
  ready = false;
  for (const element of document.querySelectorAll("body > .bar, body > .head, body > main")) element.remove();
  const parts = run ? runParts(run) : comparisonParts();
  const footer = make("footer", {}, "Made by python -m lit_grpo report from the folders of runs; nothing is loaded from elsewhere. With a chart in focus the arrow keys move from value to value.");
  document.body.append(bar(parts.map(([title]) => title)), run ? heading(run) : comparisonHeading(), make("main", {}, ...parts.map(([, element]) => element), footer));
  ready = true;
  window.scrollTo(0, 0);
  setTheme(theme() ?? keptTheme() ?? (preferred.matches ? "dark" : "light"));
}

showPage(chosen.run);

preferred.addEventListener("change", () => { if (!keptTheme()) setTheme(preferred.matches ? "dark" : "light"); });
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) requestAnimationFrame(drawAll);
  width = window.innerWidth;
});
requestAnimationFrame(() => requestAnimationFrame(() => performance.measure("drawn", "begun"))); // once it has been painted
