// What the policy wrote: predicted against actual lengths, and texts.

class LengthChart {
  constructor({ rollouts, number, without, correlation }) {
    this.svg = makeSvg("svg", { role: "img", height: 320 });
    this.caption = make("figcaption", {});
    const drawable = rollouts.filter((each) => each.points.length).reverse();
    this.rollout = drawable[0];
    const all = rollouts.length > 1 && correlation !== null ? ` Over all ${rollouts.length} rollouts, ${number.toLocaleString("en")} completions, it is ${correlation.toFixed(2)} on average.` : "";
    const unknown = without ? ` ${without.toLocaleString("en")} completions had no prediction yet and are left out.` : "";
    this.about = `${all}${unknown} On the diagonal a length was predicted exactly; predicted is what was expected before the first token.`;
    const options = drawable.slice(0, 100).map((each) => [String(each.step), `update ${each.step}`]);
    const chooser = choice("Rollout", options, String(this.rollout.step), (value) => {
      this.rollout = drawable.find((each) => String(each.step) === value);
      this.draw();
    });
    this.figure = make("figure", { id: "lengths-chart" }, make("header", {}, make("h3", {}, "Predicted against actual length (tokens)"), options.length > 1 ? chooser : null), this.svg, this.caption);
    drawn.push(this);
  }

  describe() {
    const { step, number, correlation, points } = this.rollout;
    const some = points.length < number ? `; ${points.length.toLocaleString("en")} of them are drawn` : "";
    const rank = correlation === null ? "There is no rank correlation, for one of the two is constant." : `Rank correlation (Spearman) ${correlation.toFixed(2)}.`;
    return `${number.toLocaleString("en")} completions of the rollout of update ${step}${some}. ${rank}${this.about}`;
  }

  measure() {
    this.width = Math.max(this.figure.clientWidth - 26, 120);
  }

  draw() {
    const { width } = this, height = 320, { points } = this.rollout;
    this.caption.textContent = this.describe();
    const all = points.flatMap(([predicted, actual]) => [Math.max(predicted, 1), actual]);
    const least = Math.log(Math.min(...all) * 0.85), greatest = Math.log(Math.max(...all) * 1.2);
    const [left, right, top, bottom] = [46, 12, 8, 38];
    const xs = scale(least, greatest, left, width - right), ys = scale(least, greatest, height - bottom, top);
    const group = makeSvg("g", { class: "grid", "aria-hidden": "true" });
    for (const tick of logTicks(Math.exp(least), Math.exp(greatest), width < 420)) {
      const [x, y] = [xs(Math.log(tick)), ys(Math.log(tick))];
      group.append(makeSvg("line", { x1: left, x2: width - right, y1: y, y2: y }), makeSvg("line", { x1: x, x2: x, y1: top, y2: height - bottom }),
        makeSvg("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, short(tick)), makeSvg("text", { x, y: height - bottom + 14, "text-anchor": "middle" }, short(tick)));
    }
    group.append(makeSvg("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "predicted"), makeSvg("text", { x: 0, y: top + 4 }, "actual"));
    const diagonal = makeSvg("line", { class: "limit", x1: xs(least), x2: xs(greatest), y1: ys(least), y2: ys(greatest) });
    const path = points.map(([predicted, actual]) => `M${xs(Math.log(Math.max(predicted, 1))).toFixed(1)} ${ys(Math.log(actual)).toFixed(1)}h0`).join("");
    const dots = makeSvg("path", { d: path, style: "stroke: var(--series-1); stroke-width: 5; stroke-linecap: round; opacity: 0.5; fill: none" });
    this.svg.replaceChildren(makeSvg("title", {}, this.caption.textContent), group, diagonal, dots);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  }
}

function logTicks(least, greatest, few) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(least)); power <= greatest; power *= 10) {
    for (const factor of greatest / least > (few ? 50 : 500) ? [1] : [1, 2, 5]) if (factor * power >= least && factor * power <= greatest) found.push(factor * power);
  }
  return found;
}

/** Texts of an update, or the best and the worst of all, best first. */
function completions(run) {
  const { samples, num_samples: number } = run;
  const steps = [...new Set(samples.map((row) => row.step))];
  const list = make("div", { class: "samples" });
  const show = (value) => {
    const ranked = samples.filter((row) => value === "all" || String(row.step) === value).sort((one, other) => (other.reward ?? -Infinity) - (one.reward ?? -Infinity));
    const rows = value === "all" && ranked.length > 12 ? [...ranked.slice(0, 6), ...ranked.slice(-6)] : ranked;
    list.replaceChildren(...rows.map((row, index) => sample(row, rows.length < 2 || rows[0].reward === rows[rows.length - 1].reward ? "" : index === 0 ? "best" : index === rows.length - 1 ? "worst" : "")));
  };
  const last = String(steps[steps.length - 1]);
  const options = [["all", "the best and worst of all"], ...steps.reverse().slice(0, 100).map((step) => [String(step), `update ${step}`])];
  const note = number > samples.length ? `The newest ${samples.length} of ${number} are here.` : "";
  show(last);
  const about = make("p", { class: "note" }, `Sampled now and then (sample_logger), best reward first. ${note}`);
  return make("div", { class: "texts" }, choice("Update", options, last, show), about, list);
}

function sample(row, rank) {
  const marks = [`update ${row.step}`, rank, row.advantage === null ? "" : `advantage ${short(row.advantage)}`, `${row.tokens} tokens`, row.finish ? `ended by ${row.finish}` : "", row.prompt_id ?? ""];
  const card = make("article", { class: "sample" }, make("header", {}, make("b", {}, `reward ${short(row.reward)}`), ...marks.filter(Boolean).map((text) => make("span", {}, String(text)))));
  for (const [title, text] of [["Prompt", row.prompt], ["Completion", row.completion]]) {
    card.append(make("h4", {}, title), ...(title === "Prompt" ? pictures(row.images) : []), textBox(title, text));
  }
  if (String(row.completion ?? "").length < row.characters) card.append(make("p", { class: "note" }, `Cut here; ${row.characters.toLocaleString("en")} characters stand in samples.jsonl.`));
  for (const [title, values] of [["Rewards by function", row.rewards], ["Of the data", row.columns], ["Logged by rewards", row.extra]]) {
    const entries = Object.entries(values);
    if (!entries.length) continue;
    const rows = entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, typeof value === "number" ? short(value) : String(value))]);
    card.append(make("h4", {}, title), make("dl", {}, ...rows));
  }
  return card;
}

/** The images of a prompt, in small and beside each other. */
function pictures(url) {
  return url ? [make("img", { src: url, alt: "images of the prompt" })] : [];
}

function textBox(label, text) {
  return make("pre", { class: "text", tabindex: 0, "aria-label": label }, text === null || text === "" ? "(empty)" : String(text));
}

const OVER_TIME = "Prompts that samples.jsonl has at several updates: the samples of the first, the middle and the last one, with the highest and the lowest reward.";
const HELD_OUT = "Held-out prompts: their completions at the first, the middle and the last validation (val_samples.jsonl). Prompts whose reward changed come first.";

/** Prompts with samples of several updates: what the policy wrote to each at the first, the middle and the last one. */
function overTime(title, about, noun, prompts) {
  const rows = prompts.map(({ prompt_id: id, prompt, images, num_updates: number, moments }) => promptRow(id, `${number} ${noun}${number === 1 ? "" : "s"}`, prompt,
    moments.map(({ step, number: samples, shown }) => shown.map(({ completion, reward }, index) => {
      const rank = shown.length < 2 ? "" : index ? `lowest of ${samples}` : `highest of ${samples}`;
      return [`update ${step}`, `reward ${short(reward)}`, rank, completion];
    })), images));
  return section(title, about, ...rows);
}

/** Prompts with the completions of several policies, the first and the last of which are before and after. */
function beforeAndAfter({ policies, counts, num_prompts: number, prompts }) {
  const judged = counts.gained + counts.lost + counts.both + counts.neither;
  const changes = judged ? ` Of ${judged} prompts, ${counts.gained} are answered correctly only after, ${counts.lost} only before, ${counts.both} by both and ${counts.neither} by neither.` : "";
  const about = `Completions of the same held-out prompts by ${policies[0]} (before) and ${policies[policies.length - 1]} (after), from evaluation/completions.jsonl.${changes} ${prompts.length} of ${number} prompts are shown, those that changed first.`;
  const words = { gained: "correct only after", lost: "correct only before", both: "correct in both", neither: "wrong in both" };
  const rows = prompts.map(({ prompt_id: id, prompt, kind, cells }) => promptRow(id, words[kind] ?? "", prompt,
    cells.map((cell, index) => (cell ? [[policies[index], `reward ${short(cell.reward)}`, cell.correct === null || cell.correct === undefined ? "" : cell.correct ? "correct" : "wrong", cell.completion]] : []))));
  return section("Before and after", about, ...rows);
}

/** A prompt, and beside each other its completions: of each column a title, a reward, a note and a text. */
function promptRow(id, note, prompt, columns, images) {
  const cells = columns.map((column) => make("div", { class: "column" }, ...column.map(([title, reward, rank, text]) => make("div", {},
    make("header", {}, make("b", {}, title), make("span", {}, reward), rank ? make("span", {}, rank) : null), textBox(title, text)))));
  return make("article", { class: "sample prompt" }, make("header", {}, make("b", {}, id ?? "prompt"), note ? make("span", {}, note) : null),
    ...pictures(images), textBox("Prompt", prompt), make("div", { class: "columns" }, ...cells));
}
