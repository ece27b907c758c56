// Several runs beside each other: final figures, settings that differ, and one chart a metric.

function comparisonHeading() {
  const names = content.runs.map((run, index) => make("button", { type: "button", class: "run", onclick: () => showPage(run) }, swatch(style(index)), run.name, make("span", { class: `state ${run.head.state}` }, run.head.state)));
  return make("header", { class: "head" }, make("h1", {}, `${content.runs.length} runs`),
    make("p", { class: "note" }, `As of ${content.written}. Press a run's name for its own page.`), make("div", { class: "runs" }, ...names));
}

function comparisonParts() {
  const { figures, settings, versions, without_settings: without, sections } = content.comparison;
  const parts = [["Final figures", section("Final figures", "", table(["run", ...figures.columns], content.runs.map((run, index) => [runName(run, index), ...figures.rows[index].map((cell) => (cell ? make("span", {}, cell[0], cell[1] ? make("small", {}, cell[1]) : null) : "–"))])))]];
  const missing = without.map((index) => content.runs[index].name).join(", ");
  const about = [settings.length ? "Only settings that differ. A dash means that the run's config.yaml has no such setting." : "The runs have the same settings.", missing ? `Not recorded: the settings of ${missing}.` : ""].join(" ");
  const rows = [...settings, ...versions.map(([name, values]) => [`version of ${name}`, values])];
  const cells = rows.map(([field, values]) => [field, ...values.map((value) => (value === null ? "–" : value))]);
  parts.push(["Settings that differ", section("Settings that differ", about, rows.length ? table(["setting", ...content.runs.map(runName)], cells) : null)]);
  const advised = content.runs.flatMap((run, index) => (run.advice.length ? [make("h3", { class: "advised" }, runName(run, index)), advice(run.advice)] : []));
  if (advised.length) parts.push(["What to try next", section("What to try next", "", ...advised)]);
  for (const { title, about: text, metrics } of sections) {
    const charts = metrics.map((panel, index) => new Chart(panel, linesOfRuns(panel.title), `${anchor(title)}-${index}`));
    parts.push([title, section(title, text, make("div", { class: "panels" }, ...charts.map((chart) => chart.figure)))]);
  }
  return parts;
}

function runName(run, index) {
  return make("span", { class: "name" }, swatch(style(index)), run.name);
}

function table(titles, rows) {
  const head = make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title)));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))));
  return make("div", { class: "scroll texts", tabindex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}
