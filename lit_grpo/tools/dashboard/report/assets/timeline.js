// The timeline of one update: slots over time, with everything else that the step did.

const LANES = { left: 46, right: 10, phases: 20, gap: 6, curve: 64, axis: 22 };
const PHASES = [["rollout", "rollout"], ["reward_wait", "reward wait"], ["update", "update"], ["weight_sync", "weight sync"]];

class SlotTimeline {
  constructor(rows) {
    this.rows = rows;
    this.canvas = make("canvas", { tabindex: 0, role: "img", "aria-describedby": "timeline-caption" });
    this.tip = make("div", { class: "tip", hidden: "" });
    this.caption = make("figcaption", { id: "timeline-caption" });
    const updates = rows.map((row, index) => [String(index), `update ${row.step}`]);
    const buttons = [["Zoom in", "+", () => this.zoom(1.6)], ["Zoom out", "−", () => this.zoom(1 / 1.6)], ["Show all", "all", () => this.reset()]];
    const tools = make("div", { class: "tools" }, choice("Update", updates, String(rows.length - 1), (value) => this.take(Number(value))),
      ...buttons.map(([label, text, act]) => make("button", { type: "button", class: "button", "aria-label": label, title: label, onclick: act }, text)));
    this.figure = make("figure", { id: "timeline-chart", class: "wide" }, make("header", {}, make("h3", {}, "Who decodes when"), tools), this.canvas, keys(), this.caption, this.tip);
    this.listen();
    drawn.push(this);
    this.take(rows.length - 1);
  }

  /** Compute, of an update, its bars in seconds and its phases. */
  take(index) {
    const row = (this.row = this.rows[index]);
    this.timed = row.clock.length > 1;
    const at = this.timed ? clockOf(row.clock) : (step) => step;
    this.bars = row.spans.map(([completion, slot, start, end]) => ({ completion, slot, start: at(start), end: at(end), steps: [start, end] }));
    this.bars.sort((one, other) => one.slot - other.slot || one.start - other.start);
    this.phases = [];
    let now = 0;
    for (const [key, title] of this.timed ? PHASES : []) {
      const seconds = (row.seconds[key] ?? 0) - (key === "rollout" ? row.seconds.reward_wait ?? 0 : 0);
      if (seconds > 0) this.phases.push({ title, start: now, end: now + seconds });
      now += Math.max(seconds, 0);
    }
    this.end = Math.max(now, ...this.bars.map((bar) => bar.end), 1e-6);
    this.slots = row.slots_kept;
    this.caption.textContent = this.describe();
    this.canvas.setAttribute("aria-label", `Timeline of update ${row.step}. ${this.describe()}`);
    this.reset();
  }

  describe() {
    const { row } = this;
    const busy = this.bars.reduce((sum, bar) => sum + bar.end - bar.start, 0);
    const decoded = Math.max(...this.bars.map((bar) => bar.end), 1e-6);
    const kept = row.slots_kept < row.slots ? `; the first ${row.slots_kept} of ${row.slots} slots are kept` : "";
    const phases = this.phases.map((phase) => `${phase.title} ${duration(phase.end - phase.start)}`).join(", ");
    const peak = Math.max(0, ...row.clock.map((moment) => moment[2]));
    const memory = peak ? ` At most ${short(peak)} KV tokens were held${row.kv_limit ? `, of ${short(row.kv_limit)} that there is memory for` : ""}.` : "";
    const share = Math.round((100 * busy) / (decoded * Math.max(this.slots, 1)));
    const prefilled = row.prefills.reduce((sum, prefill) => sum + prefill[2], 0);
    const prefill = prefilled ? ` ${short(prefilled)} prompt tokens were prefilled.` : "";
    return `${row.completions.length} completions of ${row.prompts.length} prompts in ${row.slots} slots${kept}: slots were in use ${share}% of the time. ${phases}.${prefill}${memory}`;
  }

  reset() {
    this.view = { from: 0, to: this.end, first: 0, last: Math.max(this.slots, 1) };
    if (this.width) this.draw();
  }

  // ---- drawing --------------------------------------------------------------------------------------

  measure() {
    this.width = Math.max(this.figure.clientWidth - 26, 120);
  }

  draw() {
    const { width } = this;
    const rows = Math.min(Math.max(this.slots * 6, 120), 400);
    const { left, right, phases, gap, curve, axis } = LANES;
    const height = phases + gap + rows + gap + curve + axis;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = (this.pen = this.canvas.getContext("2d"));
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    this.area = { left, right: width - right, top: phases + gap, bottom: phases + gap + rows };
    this.xs = scale(this.view.from, this.view.to, left, width - right);
    this.ys = scale(this.view.first, this.view.last, this.area.top, this.area.bottom);
    this.colors = { ink: token("ink"), soft: token("soft"), faint: token("faint"), band: token("band"), edge: token("band-edge"), grid: token("grid"), panel: token("panel"), series: [0, 1, 2, 3, 4, 5].map(color) };
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - right - left, height);
    pen.clip();
    this.drawPhases(height - axis);
    this.drawBars();
    this.drawMemory(this.area.bottom + gap, curve);
    pen.restore();
    this.drawAxes(width, height);
  }

  drawPhases(bottom) {
    const { pen, colors, area } = this;
    pen.textBaseline = "middle";
    for (const [index, phase] of this.phases.entries()) {
      const begin = this.xs(phase.start), end = this.xs(phase.end);
      const size = Math.max(end - begin, 0.5);
      pen.fillStyle = colors.band;
      if (index > 0) pen.fillRect(begin, area.top, size, bottom - area.top);
      pen.fillRect(begin, 0, size, LANES.phases - 2);
      if (phase.title !== "rollout") this.hatch(begin, 0, size, LANES.phases - 2, phase.title === "update" ? 6 : 3);
      pen.fillStyle = colors.edge;
      pen.fillRect(begin, 0, 1, bottom);
      const text = `${phase.title} ${duration(phase.end - phase.start)}`;
      const from = Math.max(begin, area.left), room = Math.min(end, area.right) - from;
      if (pen.measureText(text).width + 10 < room) {
        pen.fillStyle = colors.band;
        pen.fillRect(from + 3, 2, pen.measureText(text).width + 5, LANES.phases - 6);
        pen.fillStyle = colors.ink;
        pen.fillText(text, from + 5, LANES.phases / 2 - 1);
      }
    }
    pen.fillStyle = colors.soft; // prompts that went through the model: a mark under the rollout's lane
    for (const [start, end] of this.timed ? this.row.prefills : []) {
      pen.fillRect(this.xs(start), LANES.phases - 2, Math.max(this.xs(end) - this.xs(start), 2), 4);
    }
  }

  hatch(x, y, width, height, step) {
    const { pen, colors } = this;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    pen.strokeStyle = colors.edge;
    pen.globalAlpha = 0.45;
    pen.beginPath();
    const from = Math.max(x, this.area.left), to = Math.min(x + width, this.area.right);
    for (let place = from - height - ((from - x) % step); place < to; place += step) {
      pen.moveTo(place, y + height);
      pen.lineTo(place + height, y);
    }
    pen.stroke();
    pen.restore();
  }

  drawBars() {
    const { pen, colors, area, row, pointed } = this;
    pen.save();
    pen.beginPath();
    pen.rect(area.left, area.top, area.right - area.left, area.bottom - area.top);
    pen.clip();
    const thick = this.ys(1) - this.ys(0);
    for (const bar of this.bars) {
      const x = this.xs(bar.start), end = this.xs(bar.end), y = this.ys(bar.slot);
      if (end < area.left || x > area.right || y + thick < area.top || y > area.bottom) continue;
      const group = row.completions[bar.completion][0];
      const size = end - x;
      pen.globalAlpha = pointed && row.completions[pointed.completion][0] !== group ? 0.3 : [1, 0.72, 0.5][Math.floor(group / 6) % 3];
      pen.fillStyle = colors.series[group % 6];
      pen.fillRect(x, y, Math.max(size - (size > 3 ? 1 : 0), 0.6), Math.max(thick - (thick > 3 ? 1 : 0), 0.6));
    }
    pen.globalAlpha = 1;
    if (pointed) {
      pen.strokeStyle = colors.ink;
      pen.lineWidth = 1.5;
      for (const bar of this.bars.filter((each) => each.completion === pointed.completion)) {
        pen.strokeRect(this.xs(bar.start), this.ys(bar.slot), this.xs(bar.end) - this.xs(bar.start), Math.max(thick - 1, 1));
      }
    }
    pen.restore();
  }

  drawMemory(top, height) {
    const { pen, colors, row } = this;
    if (!this.timed) return;
    const peak = Math.max(1, ...row.clock.map((moment) => moment[2]));
    const near = row.kv_limit && row.kv_limit <= 3 * peak;
    const most = (near ? Math.max(row.kv_limit, peak) : peak) * (near || !row.kv_limit ? 1.08 : 1.45); // room for the words
    const ys = scale(0, most, top + height, top);
    this.kv = { peak, top, at: ys(peak) };
    pen.beginPath();
    row.clock.forEach(([, seconds, tokens], index) => pen[index ? "lineTo" : "moveTo"](this.xs(seconds), ys(tokens)));
    pen.strokeStyle = colors.ink;
    pen.lineWidth = 1.25;
    pen.stroke();
    pen.textBaseline = "top";
    pen.fillStyle = colors.soft;
    if (near) {
      pen.setLineDash([5, 4]);
      pen.strokeStyle = colors.soft;
      pen.beginPath();
      pen.moveTo(this.area.left, ys(row.kv_limit));
      pen.lineTo(this.area.right, ys(row.kv_limit));
      pen.stroke();
      pen.setLineDash([]);
    }
    const text = row.kv_limit ? `memory for ${short(row.kv_limit)} KV tokens${near ? "" : ", above the chart"}` : "";
    pen.textAlign = "right";
    pen.fillText(text, this.area.right - 4, near ? ys(row.kv_limit) + 4 : top + 2);
    pen.textAlign = "left";
  }

  drawAxes(width, height) {
    const { pen, colors, area, view } = this;
    pen.fillStyle = colors.faint;
    pen.strokeStyle = colors.grid;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const slots = ticks(view.first, view.last - 1, 4).filter(Number.isInteger);
    for (const slot of slots) pen.fillText(String(slot), area.left - 6, Math.max(this.ys(slot + 0.5), area.top + 5));
    pen.fillText("slot", area.left - 6, LANES.phases / 2 - 1);
    if (this.kv) {
      pen.fillText("KV", area.left - 6, this.kv.top + 50);
      pen.fillText(short(this.kv.peak), area.left - 6, Math.min(this.kv.at + 2, this.kv.top + 36));
    }
    pen.textBaseline = "bottom";
    for (const tick of ticks(view.from, view.to, Math.max(2, Math.floor(width / 110)))) {
      pen.textAlign = this.xs(tick) > width - 30 ? "right" : "center";
      pen.fillText(this.timed ? `${trimmed(tick, 4)} s` : short(tick), this.xs(tick), height - 4);
      pen.fillRect(this.xs(tick), height - LANES.axis, 1, 4);
    }
    pen.textAlign = "left";
  }

  // ---- moving ---------------------------------------------------------------------------------------

  /** Zoom around a place (a share of the picture's width); with `rows` also around a share of its height. */
  zoom(factor, at = 0.5, rows = null) {
    const { view } = this;
    const span = Math.min((view.to - view.from) / factor, this.end);
    const place = view.from + (view.to - view.from) * at;
    view.from = place - span * at;
    view.to = view.from + span;
    if (rows !== null) {
      const tall = Math.min(Math.max((view.last - view.first) / factor, 2), Math.max(this.slots, 1));
      const slot = view.first + (view.last - view.first) * rows;
      view.first = slot - tall * rows;
      view.last = view.first + tall;
    }
    this.pan(0, 0);
  }

  /** Move by shares of what is shown, and never beyond the ends. */
  pan(across, down) {
    const { view } = this;
    const span = Math.max(view.to - view.from, this.end * 1e-4), tall = view.last - view.first;
    view.from = Math.min(Math.max(view.from + across * span, 0), this.end - span);
    view.to = view.from + span;
    view.first = Math.min(Math.max(view.first + down * tall, 0), Math.max(this.slots, 1) - tall);
    view.last = view.first + tall;
    this.draw();
  }

  listen() {
    const { canvas } = this;
    const pointers = new Map();
    const share = (event) => {
      const box = canvas.getBoundingClientRect();
      return [(event.clientX - box.left - this.area.left) / (this.area.right - this.area.left), (event.clientY - box.top - this.area.top) / (this.area.bottom - this.area.top)];
    };
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, share(event));
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId), now = share(event);
      if (!before) return this.point(now, event);
      const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      pointers.set(event.pointerId, now);
      if (others.length) this.zoom(Math.abs(now[0] - others[0][0]) / Math.max(Math.abs(before[0] - others[0][0]), 0.01), (now[0] + others[0][0]) / 2);
      else this.pan(before[0] - now[0], before[1] - now[1]);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return; // the page scrolls
      event.preventDefault();
      const [across, down] = share(event);
      this.zoom(Math.exp(-event.deltaY * 0.002), Math.min(Math.max(across, 0), 1), event.shiftKey ? Math.min(Math.max(down, 0), 1) : null);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const act = { ArrowLeft: () => this.pan(-0.2, 0), ArrowRight: () => this.pan(0.2, 0), ArrowUp: () => this.pan(0, -0.2), ArrowDown: () => this.pan(0, 0.2),
        "+": () => this.zoom(1.6, 0.5, 0.5), "=": () => this.zoom(1.6, 0.5, 0.5), "-": () => this.zoom(1 / 1.6, 0.5, 0.5), 0: () => this.reset() }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
  }

  /** Say which completion is under the pointer, and show those of its prompt. */
  point(shares, event) {
    const { view, row } = this;
    let found = null;
    const phase = shares && shares[1] < 0 ? this.phaseAt(view.from + (view.to - view.from) * shares[0]) : null;
    if (shares && shares[1] >= 0 && shares[1] < 1) {
      const time = view.from + (view.to - view.from) * shares[0];
      const slot = Math.floor(view.first + (view.last - view.first) * shares[1]);
      found = this.bars.find((bar) => bar.slot === slot && bar.start <= time && time < bar.end) ?? null;
    }
    if (found !== (this.pointed ?? null)) {
      this.pointed = found;
      this.draw();
    }
    this.tip.hidden = !found && !phase;
    if (this.tip.hidden) return;
    this.tip.replaceChildren(...(found ? this.words(found) : [`${phase.title}, ${duration(phase.end - phase.start)}`]));
    const box = this.figure.getBoundingClientRect();
    moveTip(this.tip, this.figure, event.clientX - box.left, event.clientY - box.top + 14);
  }

  phaseAt(time) {
    return this.phases.find((each) => each.start <= time && time < each.end) ?? null;
  }

  words(found) {
    const { row } = this;
    const [prompt, sample, tokens, predicted, finish] = row.completions[found.completion];
    const time = this.timed ? `${trimmed(found.start, 4)} to ${trimmed(found.end, 4)} s, ` : "";
    const length = tokens === null ? "not finished" : `${tokens} tokens (predicted ${short(predicted)}), ended by ${finish}`;
    const where = `slot ${found.slot}, ${time}steps ${found.steps[0]} to ${found.steps[1]}`;
    return [make("b", {}, `prompt ${row.prompts[prompt]}, sample ${sample}`), make("div", {}, length), make("div", {}, where)];
  }
}

/** A function that tells when a decode step was reached. */
function clockOf(clock) {
  return (step) => {
    let low = 0, high = clock.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (clock[middle][0] <= step) low = middle;
      else high = middle;
    }
    const [from, to] = [clock[low], clock[high]];
    return to[0] === from[0] ? to[1] : from[1] + ((to[1] - from[1]) * Math.min(Math.max(step - from[0], 0), to[0] - from[0])) / (to[0] - from[0]);
  };
}

function keys() {
  const swatch = (style) => make("span", { style: `width: 14px; height: 10px; border-radius: 2px; flex: none; ${style}` });
  const hatched = "background: repeating-linear-gradient(135deg, var(--band) 0 3px, var(--band-edge) 3px 4px)";
  return make("div", { class: "keys" },
    make("span", {}, swatch("background: var(--series-1)"), "a completion; its color is its prompt"),
    make("span", {}, swatch("border: 1px solid var(--edge)"), "an idle slot"),
    make("span", {}, swatch("height: 4px; background: var(--soft)"), "a step that prefilled prompts too"),
    make("span", {}, swatch(hatched), "nothing decodes: reward wait, update, weight sync"),
    make("span", {}, "Drag to move; + and − zoom, the wheel too once the picture is clicked (with Shift also rows); 0 shows all."));
}
