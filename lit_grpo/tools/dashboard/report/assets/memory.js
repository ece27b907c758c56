// The memory of rollout and update by part: as forecast, and as measured.

const ELSE = "everything else";

class MemoryChart {
  constructor(memory) {
    this.memory = memory;
    const { parts, bars, device, why } = memory;
    const onCPU = device === "cpu" && bars.some((bar) => bar.kind === "forecast");
    this.hidden = new Set(onCPU ? [ELSE] : []); // the process itself, beside which nothing else could be seen
    this.svg = makeSvg("svg", { role: "img" });
    const legend = make("ul", { class: "legend" }, ...parts.map((part, index) => make("li", {}, this.button(part, index))));
    const head = make("tr", {}, ...["GiB", ...parts, "peak"].map((name) => make("th", { scope: "col" }, name)));
    const rows = bars.map((bar) => make("tr", {}, make("td", {}, `${bar.phase}, ${bar.kind}`), ...[...bar.gib, bar.total].map((value) => make("td", {}, short(value)))));
    const numbers = make("details", {}, make("summary", {}, "In numbers"), make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
    const other = device === "cpu" ? "Everything else is what the process held before the first rollout, such as libraries, which the forecast leaves out." : "Everything else was in use before the first rollout, such as a reference model.";
    const text = `Measured are the largest peaks of the run; activations are these peaks minus all other parts. ${other} Press a name to show or hide the part. The forecast is that of fit-check.${why ? ` There is none, because ${why}.` : ""}`;
    this.figure = make("figure", { id: "memory-chart", class: "wide stacked" }, make("header", {}, make("h3", {}, "Memory by part (GiB)")), this.svg, legend, make("figcaption", {}, text), numbers);
    drawn.push(this);
  }

  button(part, index) {
    const button = make("button", { type: "button", "aria-pressed": String(!this.hidden.has(part)), title: "Show or hide" }, swatch(style(index)), part);
    button.addEventListener("click", () => {
      this.hidden[this.hidden.has(part) ? "delete" : "add"](part);
      button.setAttribute("aria-pressed", String(!this.hidden.has(part)));
      this.draw();
    });
    return button;
  }

  measure() {
    this.width = Math.max(this.figure.clientWidth - 26, 120);
  }

  draw() {
    const { width, memory: { parts, bars } } = this;
    const [left, right, tall, gap] = [126, 64, 22, 8];
    const height = bars.length * (tall + gap) + 22;
    const shown = bars.map((bar) => bar.gib.map((value, index) => (this.hidden.has(parts[index]) ? 0 : value)));
    const totals = shown.map((gib) => gib.reduce((sum, value) => sum + value, 0));
    const greatest = Math.max(...totals, 1e-9);
    const xs = scale(0, greatest, left, width - right);
    const group = makeSvg("g", { class: "grid", "aria-hidden": "true" });
    for (const tick of ticks(0, greatest, Math.max(2, Math.floor((width - left - right) / 70)))) {
      group.append(makeSvg("line", { x1: xs(tick), x2: xs(tick), y1: 0, y2: height - 20 }), makeSvg("text", { x: xs(tick), y: height - 6, "text-anchor": "middle" }, short(tick)));
    }
    const boxes = bars.flatMap((bar, place) => {
      const y = place * (tall + gap);
      let from = 0;
      const pieces = shown[place].map((value, index) => {
        const path = `M${xs(from).toFixed(1)} ${y}H${xs((from += value)).toFixed(1)}V${y + tall}H${xs(from - value).toFixed(1)}Z`;
        return value > 0 ? makeSvg("path", { class: bar.kind === "forecast" ? "part forecast" : "part", style: `fill: ${style(index).color}`, d: path }, makeSvg("title", {}, `${bar.phase}, ${bar.kind}: ${parts[index]} ${short(value)} GiB`)) : null;
      });
      const name = makeSvg("text", { x: left - 8, y: y + tall / 2 + 4, "text-anchor": "end" }, `${bar.phase}, ${bar.kind}`);
      const total = makeSvg("text", { class: "total", x: xs(from) + 6, y: y + tall / 2 + 4 }, totals[place].toPrecision(3));
      return [...pieces.filter(Boolean), name, total];
    });
    const summary = bars.map((bar) => `${bar.phase}, ${bar.kind} ${short(bar.total)} GiB`).join("; ");
    this.svg.replaceChildren(makeSvg("title", {}, `Memory by part: ${summary}.`), group, ...boxes);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
  }
}
