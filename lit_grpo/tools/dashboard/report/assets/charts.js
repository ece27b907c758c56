// Charts of metrics: lines with their raw values behind them, stacked areas, limits.

const CHART = { height: 176, left: 46, right: 10, top: 8, bottom: 22 };

/** The lines of a panel of one run: a metric each. */
function linesOf(run, panel) {
  const drawn = panel.metrics.filter((name) => !panel.limits.includes(name));
  return panel.metrics.map((name) => ({ name, run, values: run.metrics[name], limit: panel.limits.includes(name), ...style(Math.max(drawn.indexOf(name), 0)) }));
}

/** The lines of a metric of several runs: a run each, which has its color in all charts. */
function linesOfRuns(metric) {
  return content.runs.map((run, index) => ({ name: run.name, run, values: run.metrics[metric], limit: false, ...style(index) })).filter((line) => line.values);
}

function style(index) {
  return { color: `var(--series-${(index % 6) + 1})`, broken: index > 5 };
}

function swatch(line) {
  return make("span", { class: line.limit ? "swatch dashed" : line.broken ? "swatch broken" : "swatch", style: line.limit ? null : `--color: ${line.color}` });
}

class Chart {
  constructor(panel, lines, id) {
    this.panel = panel;
    this.lines = lines;
    this.hidden = new Set();
    this.farNotes = new Map(); // in the legend, by line: a limit far above the values is no line in the chart
    this.svg = makeSvg("svg", { tabindex: 0, role: "img", height: CHART.height });
    this.tip = make("div", { class: "tip", role: "status", hidden: "" });
    this.legend = make("ul", { class: "legend" });
    this.about = about(panel, `${id}-about`);
    this.figure = make("figure", { id, class: panel.stacked ? "stacked" : null },
      make("header", {}, make("h3", {}, panel.title), this.about.button), this.svg, this.legend, this.about.box, this.tip);
    for (const [name, act] of [["pointermove", "point"], ["pointerleave", "leave"], ["keydown", "key"], ["blur", "leave"]]) {
      this.svg.addEventListener(name, (event) => this[act](event));
    }
    this.makeLegend();
    drawn.push(this);
  }

  makeLegend() {
    for (const line of this.lines) {
      const note = make("span", { class: "far" });
      this.farNotes.set(line, note);
      const button = make("button", { type: "button", "aria-pressed": "true", title: "Show or hide" }, swatch(line), make("span", {}, line.name, note));
      button.addEventListener("click", () => {
        this.hidden[this.hidden.has(line) ? "delete" : "add"](line);
        button.setAttribute("aria-pressed", String(!this.hidden.has(line)));
        this.draw();
      });
      this.legend.append(make("li", {}, button));
    }
  }

  visible(limits) {
    return this.lines.filter((line) => line.limit === limits && !this.hidden.has(line));
  }

  /** What is drawn of the visible lines: what is logged, and the smoothed values; of a stack each with what is under it. */
  series() {
    const lines = this.visible(false);
    const below = new Array(lines[0]?.values.mean.length ?? 0).fill(0);
    return lines.map((line) => {
      const { mean, min, max } = line.values;
      const made = { ...line, raw: mean, min, max, smooth: smoothed(mean), x: places(line.run) };
      if (this.panel.stacked) {
        made.base = [...below];
        (made.smooth ?? mean).forEach((value, index) => { below[index] += Math.max(value ?? 0, 0); });
        made.top = [...below];
      }
      return made;
    });
  }

  /** From which value to which the chart reaches; limits count where they are near. */
  range(series) {
    let least = Infinity, greatest = -Infinity;
    for (const line of series) {
      for (const values of line.top ? [line.base, line.top] : [line.min ?? line.raw, line.max ?? line.raw]) {
        for (const value of values) {
          if (value === null) continue;
          if (value < least) least = value;
          if (value > greatest) greatest = value;
        }
      }
    }
    if (least > greatest) [least, greatest] = [0, 1];
    this.far = new Map();
    for (const line of this.visible(true)) {
      const limit = Math.max(...line.values.mean.filter((value) => value !== null));
      if (limit <= 3 * greatest) greatest = Math.max(greatest, limit);
      else this.far.set(line, limit);
    }
    if (least === greatest) [least, greatest] = least === 0 ? [0, 1] : [least - Math.abs(least) * 0.1, greatest + Math.abs(greatest) * 0.1];
    if (least > 0 && least < 0.5 * greatest) least = 0;
    if (greatest < 0 && greatest > 0.5 * least) greatest = 0;
    const room = (greatest - least) * 0.05;
    return [least === 0 ? 0 : least - room, greatest === 0 ? 0 : greatest + room];
  }

  measure() {
    this.width = Math.max(this.figure.clientWidth - 26, 120); // less its padding and edges
  }

  draw() {
    const { width } = this;
    const { height, left, right, top, bottom } = CHART;
    const series = (this.now = this.series());
    const [least, greatest] = this.range(series);
    const ends = shownRuns().map(places).filter((x) => x.length).flatMap((x) => [x[0], x[x.length - 1]]);
    const from = Math.min(...ends), to = Math.max(...ends);
    this.xs = scale(from, to === from ? from + 1 : to, left, width - right);
    this.from = from;
    this.perPixel = ((to === from ? 1 : to - from)) / (width - right - left);
    const ys = (this.ys = scale(least, greatest, height - bottom, top));
    const place = (x) => x.map((value) => Math.round(this.xs(value) * 10) / 10);
    for (const line of series) line.place = place(line.x);
    this.stops = [...new Set(series.flatMap((line) => (chosen.run ? line.x : line.x.filter((_, index) => line.raw[index] !== null))))].sort((one, other) => one - other);
    const parts = [this.grid(from, to, ys, least, greatest, width)];
    for (const line of [...series].reverse()) parts.push(...(line.top ? this.area(line, ys) : this.line(line, ys)));
    for (const line of this.lines.filter((each) => each.limit)) parts.push(...this.limit(line, place(places(line.run)), ys));
    this.cross = makeSvg("line", { class: "cross", y1: top, y2: height - bottom, x1: -9, x2: -9, visibility: "hidden" });
    this.dots = makeSvg("g", {});
    this.svg.replaceChildren(makeSvg("title", {}, this.summary()), ...parts, this.cross, this.dots);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  }

  grid(from, to, ys, least, greatest, width) {
    const { height, left, right, bottom } = CHART;
    const group = makeSvg("g", { class: "grid", "aria-hidden": "true" });
    for (const tick of ticks(least, greatest, 5)) {
      const y = Math.round(ys(tick)) + 0.5;
      group.append(makeSvg("line", { x1: left, x2: width - right, y1: y, y2: y }), makeSvg("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, short(tick)));
    }
    const number = Math.max(2, Math.floor(width / 65));
    const seconds = chosen.x === "time/total_s";
    const found = to > from ? (seconds ? timeTicks : ticks)(from, to, number) : [from];
    for (const tick of found.filter((each) => chosen.x !== "update" || Number.isInteger(each))) {
      const anchor = this.xs(tick) > width - 24 ? "end" : "middle";
      group.append(makeSvg("text", { x: this.xs(tick), y: height - 6, "text-anchor": anchor }, seconds ? timeLabel(tick, to - from) : short(tick)));
    }
    const base = height - bottom + 0.5;
    group.append(makeSvg("line", { class: "axis-line", x1: left, x2: width - right, y1: base, y2: base }));
    return group;
  }

  /** A line through what is there; gaps of other updates are bridged, for a validation comes now and then. */
  path(values, place, ys) {
    let path = "";
    values.forEach((value, index) => {
      if (value !== null) path += `${path ? "L" : "M"}${place[index]} ${ys(value).toFixed(1)}`;
    });
    return path;
  }

  line(line, ys) {
    const parts = [], style = `stroke: ${line.color}`;
    const there = line.raw.reduce((count, value) => count + (value !== null), 0);
    if (line.max && there > 1) parts.push(makeSvg("path", { class: "spread", style: `fill: ${line.color}`, d: this.spread(line, ys) }));
    if (line.smooth) parts.push(makeSvg("path", { class: "raw", style, d: this.path(line.raw, line.place, ys) }));
    parts.push(makeSvg("path", { class: line.broken ? "line broken" : "line", style, d: this.path(line.smooth ?? line.raw, line.place, ys) }));
    if (there <= 24) {
      line.raw.forEach((value, index) => {
        if (value !== null) parts.push(makeSvg("circle", { cx: line.place[index], cy: ys(value).toFixed(1), r: there === 1 ? 3.5 : 2.2, style: `fill: ${line.color}` }));
      });
    }
    return parts;
  }

  spread(line, ys) {
    const there = line.raw.map((value, index) => (value === null ? -1 : index)).filter((index) => index >= 0);
    const upper = there.map((index) => `${line.place[index]} ${ys(line.max[index]).toFixed(1)}`);
    const lower = there.reverse().map((index) => `${line.place[index]} ${ys(line.min[index]).toFixed(1)}`);
    return `M${upper.concat(lower).join("L")}Z`;
  }

  area(line, ys) {
    const upper = line.top.map((value, index) => `${line.place[index]} ${ys(value).toFixed(1)}`);
    const lower = line.base.map((value, index) => `${line.place[index]} ${ys(value).toFixed(1)}`).reverse();
    return [makeSvg("path", { class: "area", style: `fill: ${line.color}`, d: `M${upper.concat(lower).join("L")}Z` })];
  }

  /** The line of a limit, or a note in the legend where it is far above the chart. */
  limit(line, place, ys) {
    const far = this.far.get(line);
    this.farNotes.get(line).textContent = far === undefined ? "" : ` ${short(far)}, above the chart`;
    if (far !== undefined || this.hidden.has(line)) return [];
    return [makeSvg("path", { class: "limit", d: this.path(line.values.mean, place, ys) })];
  }

  summary() {
    const says = this.lines.map(({ name, values }) => {
      const there = values.mean.filter((value) => value !== null);
      return `${name} ${short(there[there.length - 1])} at last, between ${short(Math.min(...there))} and ${short(Math.max(...there))}`;
    });
    return `${this.panel.title}, by ${axisTitle()}: ${says.join("; ")}.`;
  }

  // ---- the values at a place ------------------------------------------------------------------------

  point(event) {
    if (!this.stops.length) return;
    const box = this.svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * (this.svg.viewBox.baseVal.width / box.width);
    this.show(this.stops[nearest(this.stops, this.from + (at - CHART.left) * this.perPixel)]);
  }

  key(event) {
    const last = this.stops.length - 1, from = chosen.pointed === null ? last : nearest(this.stops, chosen.pointed);
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.leave();
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.show(this.stops[Math.min(Math.max(to, 0), last)]);
  }

  /** Tell the values at a place of the axis; of several runs, each at its nearest point with a value. */
  show(at) {
    chosen.pointed = at;
    for (const other of drawn) other.mark?.(at);
    const dots = [];
    const rows = this.lines.filter((line) => !this.hidden.has(line)).map((line) => {
      const { mean, min, max } = line.values, x = places(line.run);
      const index = nearest(x, at, chosen.run ? null : mean);
      const made = this.now.find((each) => each.name === line.name && !line.limit);
      const value = made?.top ? made.top[index] : (made?.smooth ?? mean)[index];
      if (made && index >= 0 && value !== null) dots.push(makeSvg("circle", { class: "dot", r: 4, cx: made.place[index], cy: this.ys(value), style: `fill: ${line.color}` }));
      const extra = index < 0 ? "" : x[index] !== at ? placeName(line.run, index) : min && min[index] !== max[index] && mean[index] !== null ? `${short(min[index])} to ${short(max[index])}` : made?.smooth ? `smooth ${short(made.smooth[index])}` : "";
      const mark = swatch(line);
      mark.style.display = "inline-block";
      mark.style.verticalAlign = "middle";
      return make("tr", {}, make("td", {}, mark), make("td", {}, line.name), make("td", { class: "number" }, make("b", {}, short(mean[index] ?? null))), make("td", { class: "number soft" }, extra));
    });
    const title = chosen.run ? placeName(chosen.run, nearest(places(chosen.run), at)) : valueName(at);
    this.tip.replaceChildren(title, make("table", {}, ...rows));
    this.dots.replaceChildren(...dots);
    moveTip(this.tip, this.figure, this.xs(at) + 12, this.legend.offsetTop - 2); // over the legend, which it repeats
  }

  mark(at) {
    this.cross.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at === null) return;
    this.cross.setAttribute("x1", this.xs(at));
    this.cross.setAttribute("x2", this.xs(at));
  }

  leave() {
    chosen.pointed = null;
    this.tip.hidden = true;
    this.dots.replaceChildren();
    for (const other of drawn) other.mark?.(null);
  }
}

/** The (i) of a chart: a button, and the box that it opens. */
function about(panel, id) {
  const box = make("div", { class: "about", id, hidden: "", role: "region", "aria-label": `About ${panel.title}`, tabindex: 0 });
  for (const metric of panel.about) {
    const list = make("dl", {});
    for (const key of ["means", "normal", "otherwise"]) {
      if (metric[key]) list.append(make("dt", {}, key), make("dd", {}, metric[key]));
    }
    box.append(make("h4", {}, metric.name), list);
  }
  const button = make("button", { type: "button", class: "info", "aria-expanded": "false", "aria-controls": id, "aria-label": `About ${panel.title}` }, "i");
  const open = (opened) => {
    box.hidden = !opened;
    button.setAttribute("aria-expanded", String(opened));
  };
  const close = (event) => {
    if (event.key !== "Escape") return;
    open(false);
    button.focus();
  };
  button.addEventListener("click", () => open(box.hidden));
  button.addEventListener("keydown", close);
  box.addEventListener("keydown", close);
  return { button, box };
}

document.addEventListener("pointerdown", (event) => { // a press beside an open box closes it
  for (const box of document.querySelectorAll(".about:not([hidden])")) {
    const button = document.querySelector(`[aria-controls="${box.id}"]`);
    if (box.contains(event.target) || button === event.target) continue;
    box.hidden = true;
    button.setAttribute("aria-expanded", "false");
  }
});
