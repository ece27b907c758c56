// Charts of metrics: lines with their raw values behind them, stacked areas, limits.

const CHART = { height: 176, left: 46, right: 10, top: 8, bottom: 22 };

class Chart {
  constructor(panel, id) {
    this.panel = panel;
    this.hidden = new Set();
    this.farNotes = new Map(); // in the legend, by metric: a limit far above the values is no line in the chart
    this.lines = panel.metrics.filter((name) => !panel.limits.includes(name));
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

  colorOf(name) {
    return `var(--series-${(this.lines.indexOf(name) % 6) + 1})`;
  }

  makeLegend() {
    for (const name of this.panel.metrics) {
      const limit = this.panel.limits.includes(name);
      const swatch = make("span", { class: limit ? "swatch dashed" : "swatch", style: limit ? null : `--color: ${this.colorOf(name)}` });
      const note = make("span", { class: "far" });
      this.farNotes.set(name, note);
      const label = make("span", {}, name, note);
      const button = make("button", { type: "button", "aria-pressed": "true", title: "Show or hide" }, swatch, label);
      button.addEventListener("click", () => {
        this.hidden[this.hidden.has(name) ? "delete" : "add"](name);
        button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
        this.draw();
      });
      this.legend.append(make("li", {}, button));
    }
  }

  /** The visible lines: what is logged, and the smoothed values; of a stack each with what is under it. */
  series() {
    const below = new Array(content.axis.first.length).fill(0);
    return this.lines.filter((name) => !this.hidden.has(name)).map((name) => {
      const { mean, min, max } = content.metrics[name];
      const line = { name, raw: mean, min, max, smooth: smoothed(mean), color: this.colorOf(name) };
      if (this.panel.stacked) {
        line.base = [...below];
        (line.smooth ?? mean).forEach((value, index) => { below[index] += Math.max(value ?? 0, 0); });
        line.top = [...below];
      }
      return line;
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
    for (const name of this.panel.limits.filter((each) => !this.hidden.has(each))) {
      const limit = Math.max(...content.metrics[name].mean.filter((value) => value !== null));
      if (limit <= 3 * greatest) greatest = Math.max(greatest, limit);
      else this.far.set(name, limit);
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
    const x = places(), series = (this.now = this.series());
    const [least, greatest] = this.range(series);
    const xs = scale(x[0], x[x.length - 1] === x[0] ? x[0] + 1 : x[x.length - 1], left, width - right);
    const ys = scale(least, greatest, height - bottom, top);
    this.place = x.map((value) => Math.round(xs(value) * 10) / 10);
    this.ys = ys;
    const parts = [this.grid(x, xs, ys, least, greatest, width)];
    for (const line of [...series].reverse()) parts.push(...(line.top ? this.area(line, ys) : this.line(line, ys)));
    for (const name of this.panel.limits) parts.push(...this.limit(name, ys));
    this.cross = makeSvg("line", { class: "cross", y1: top, y2: height - bottom, x1: -9, x2: -9, visibility: "hidden" });
    this.dots = makeSvg("g", {});
    this.svg.replaceChildren(makeSvg("title", {}, this.summary()), ...parts, this.cross, this.dots);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  }

  grid(x, xs, ys, least, greatest, width) {
    const { height, left, right, bottom } = CHART;
    const group = makeSvg("g", { class: "grid", "aria-hidden": "true" });
    for (const tick of ticks(least, greatest, 5)) {
      const y = Math.round(ys(tick)) + 0.5;
      group.append(makeSvg("line", { x1: left, x2: width - right, y1: y, y2: y }), makeSvg("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, short(tick)));
    }
    const from = x[0], to = x[x.length - 1], number = Math.max(2, Math.floor(width / 65));
    const seconds = chosen.x === "time/total_s";
    const found = to > from ? (seconds ? timeTicks : ticks)(from, to, number) : [from];
    for (const tick of found.filter((each) => chosen.x !== "update" || Number.isInteger(each))) {
      const anchor = xs(tick) > width - 24 ? "end" : "middle";
      group.append(makeSvg("text", { x: xs(tick), y: height - 6, "text-anchor": anchor }, seconds ? timeLabel(tick, to - from) : short(tick)));
    }
    const base = height - bottom + 0.5;
    group.append(makeSvg("line", { class: "axis-line", x1: left, x2: width - right, y1: base, y2: base }));
    return group;
  }

  /** A line through what is there; gaps of other updates are bridged, for a validation comes now and then. */
  path(values, ys) {
    let path = "";
    values.forEach((value, index) => {
      if (value !== null) path += `${path ? "L" : "M"}${this.place[index]} ${ys(value).toFixed(1)}`;
    });
    return path;
  }

  line(line, ys) {
    const parts = [], style = `stroke: ${line.color}`;
    const there = line.raw.reduce((count, value) => count + (value !== null), 0);
    if (line.max && there > 1) parts.push(makeSvg("path", { class: "spread", style: `fill: ${line.color}`, d: this.spread(line, ys) }));
    if (line.smooth) parts.push(makeSvg("path", { class: "raw", style, d: this.path(line.raw, ys) }));
    parts.push(makeSvg("path", { class: "line", style, d: this.path(line.smooth ?? line.raw, ys) }));
    if (there <= 24) {
      line.raw.forEach((value, index) => {
        if (value !== null) parts.push(makeSvg("circle", { cx: this.place[index], cy: ys(value).toFixed(1), r: there === 1 ? 3.5 : 2.2, style: `fill: ${line.color}` }));
      });
    }
    return parts;
  }

  spread(line, ys) {
    const there = line.raw.map((value, index) => (value === null ? -1 : index)).filter((index) => index >= 0);
    const upper = there.map((index) => `${this.place[index]} ${ys(line.max[index]).toFixed(1)}`);
    const lower = there.reverse().map((index) => `${this.place[index]} ${ys(line.min[index]).toFixed(1)}`);
    return `M${upper.concat(lower).join("L")}Z`;
  }

  area(line, ys) {
    const upper = line.top.map((value, index) => `${this.place[index]} ${ys(value).toFixed(1)}`);
    const lower = line.base.map((value, index) => `${this.place[index]} ${ys(value).toFixed(1)}`).reverse();
    return [makeSvg("path", { class: "area", style: `fill: ${line.color}`, d: `M${upper.concat(lower).join("L")}Z` })];
  }

  /** The line of a limit, or a note in the legend where it is far above the chart. */
  limit(name, ys) {
    const far = this.far.get(name);
    this.farNotes.get(name).textContent = far === undefined ? "" : ` ${short(far)}, above the chart`;
    if (far !== undefined || this.hidden.has(name)) return [];
    return [makeSvg("path", { class: "limit", d: this.path(content.metrics[name].mean, ys) })];
  }

  summary() {
    const says = this.panel.metrics.map((name) => {
      const there = content.metrics[name].mean.filter((value) => value !== null);
      return `${name} ${short(there[there.length - 1])} at last, between ${short(Math.min(...there))} and ${short(Math.max(...there))}`;
    });
    return `${this.panel.title}, by ${axisTitle()}: ${says.join("; ")}.`;
  }

  // ---- the values at a place ------------------------------------------------------------------------

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * (this.svg.viewBox.baseVal.width / box.width);
    let nearest = 0;
    this.place.forEach((place, index) => { if (Math.abs(place - at) < Math.abs(this.place[nearest] - at)) nearest = index; });
    this.show(nearest);
  }

  key(event) {
    const last = this.place.length - 1, from = chosen.pointed ?? last;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.leave();
    if (to === undefined) return;
    event.preventDefault();
    this.show(Math.min(Math.max(to, 0), last));
  }

  show(index) {
    chosen.pointed = index;
    for (const other of drawn) other.mark?.(index);
    const names = [...this.panel.metrics].filter((name) => !this.hidden.has(name));
    const rows = names.map((name) => {
      const { mean, min, max } = content.metrics[name];
      const limit = this.panel.limits.includes(name);
      const swatch = make("span", { class: limit ? "swatch dashed" : "swatch", style: `display: inline-block; vertical-align: middle; --color: ${this.colorOf(name)}` });
      const line = this.now.find((each) => each.name === name);
      const extra = min && min[index] !== max[index] && mean[index] !== null ? `${short(min[index])} to ${short(max[index])}` : line?.smooth ? `smooth ${short(line.smooth[index])}` : "";
      return make("tr", {}, make("td", {}, swatch), make("td", {}, name), make("td", { class: "number" }, make("b", {}, short(mean[index]))), make("td", { class: "number soft" }, extra));
    });
    this.tip.replaceChildren(placeName(index), make("table", {}, ...rows));
    this.dots.replaceChildren(...this.now.flatMap((line) => {
      const value = line.top ? line.top[index] : (line.smooth ?? line.raw)[index];
      return value === null ? [] : [makeSvg("circle", { class: "dot", r: 4, cx: this.place[index], cy: this.ys(value), style: `fill: ${line.color}` })];
    }));
    moveTip(this.tip, this.figure, this.place[index] + 12, this.legend.offsetTop - 2); // over the legend, which it repeats
  }

  mark(index) {
    this.cross.setAttribute("visibility", index === null ? "hidden" : "visible");
    if (index === null) return;
    this.cross.setAttribute("x1", this.place[index]);
    this.cross.setAttribute("x2", this.place[index]);
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
  document.addEventListener("pointerdown", (event) => {
    if (!box.hidden && !box.contains(event.target) && event.target !== button) open(false);
  });
  return { button, box };
}
