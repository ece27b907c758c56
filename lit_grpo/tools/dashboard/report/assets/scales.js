"use strict";
// What all drawings share: elements, numbers, axes, and what the reader has chosen.

const content = JSON.parse(document.getElementById("content").textContent);
const chosen = { x: "update", smoothing: "auto", pointed: null, run: content.comparison ? null : content.runs[0] }; // no run: all are compared
const SVG = "http://www.w3.org/2000/svg";
const drawn = []; // everything that draws itself again when the width, the theme or a choice changes

/** Make an element; text is only ever text, so nothing of a run is read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  return fill(element, attributes, children);
}

function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** The text of a number: four digits, and k, M or G where it is large. */
function short(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return trimmed(value / (unit === 1e4 ? 1e3 : unit), 4) + letter;
  }
  if (size > 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("-", "−").replace("e-", "e−");
  return trimmed(value, 4);
}

function trimmed(value, digits) {
  const text = value.toPrecision(digits);
  return (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text).replace("-", "−");
}

function duration(seconds) {
  if (seconds < 120) return `${trimmed(seconds, 3)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Round numbers between two, about as many as asked for. */
function ticks(least, greatest, number) {
  const rough = (greatest - least) / Math.max(number, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const places = [];
  for (let index = Math.ceil(least / step - 1e-9); index * step <= greatest + step * 1e-9; index++) places.push(index * step);
  return places;
}

/** Ticks of a time axis: minutes and hours where seconds would be many. */
function timeTicks(least, greatest, number) {
  const rough = (greatest - least) / Math.max(number, 1);
  if (rough < 30) return ticks(least, greatest, number);
  const sizes = [30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const step = sizes.find((size) => size >= rough) ?? 86400 * Math.ceil(rough / 86400);
  const places = [];
  for (let place = Math.ceil(least / step) * step; place <= greatest; place += step) places.push(place);
  return places;
}

function timeLabel(seconds, span) {
  if (span < 300) return `${trimmed(seconds, 3)} s`;
  if (span < 3 * 3600) return `${Math.round(seconds / 6) / 10} min`;
  return `${Math.round(seconds / 360) / 10} h`;
}

function scale(from, to, begin, end) {
  const factor = (end - begin) / (to - from || 1);
  return (value) => begin + (value - from) * factor;
}

/** The runs that the page is about now. */
function shownRuns() {
  return chosen.run ? [chosen.run] : content.runs.filter((run) => run.rows);
}

/** The axes that all of these runs have, besides updates: their titles by metric. */
function axes() {
  const runs = shownRuns();
  return Object.fromEntries(Object.entries(runs[0]?.axes ?? {}).filter(([name]) => runs.every((run) => name in run.axes)));
}

/** Where the points of a run are on the axis that has been chosen. */
function places(run) {
  const { first, last, others } = run.axis;
  return chosen.x === "update" ? first.map((update, index) => (update + last[index]) / 2) : others[chosen.x];
}

function placeName(run, index) {
  const { first, last, others } = run.axis;
  const update = first[index] === last[index] ? `update ${last[index]}` : `updates ${first[index]} to ${last[index]}`;
  if (chosen.x === "num_tokens") return `${update}, ${short(others.num_tokens[index])} tokens`;
  return chosen.x === "update" ? update : `${update}, ${duration(others[chosen.x][index])}`;
}

function axisTitle() {
  return chosen.x === "update" ? "updates" : axes()[chosen.x];
}

/** An exponential mean over a share of the run, without the pull of its first value; null stays null. */
function smoothed(values) {
  const share = { none: 0, auto: 1 / 15, strong: 1 / 5 }[chosen.smoothing];
  const number = values.reduce((count, value) => count + (value !== null), 0);
  const keep = 1 - 2 / (Math.max(number * share, 1) + 1);
  if (keep <= 0.01) return null;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}

function color(number) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--series-${(number % 6) + 1}`).trim();
}

function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A select with its label; `act` is told what is chosen. */
function choice(label, options, value, act) {
  const select = make("select", { "aria-label": label, onchange: () => act(select.value) });
  for (const [key, title] of options) {
    const option = make("option", { value: key }, title);
    option.selected = key === value;
    select.append(option);
  }
  return make("label", { class: "choice" }, make("span", {}, label), select);
}

/** Put a tip beside a place within a figure, on the side that has room. */
function moveTip(tip, figure, x, y) {
  const width = figure.clientWidth;
  tip.hidden = false;
  const left = x + 14 + tip.offsetWidth > width ? Math.max(x - 14 - tip.offsetWidth, 4) : x + 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${y}px`;
}

/** The index of the number that is nearest to a value, among those that have one in `there`, if it is given; or -1. */
function nearest(numbers, value, there = null) {
  let found = -1;
  numbers.forEach((number, index) => {
    if (there && there[index] === null) return;
    if (found < 0 || Math.abs(number - value) < Math.abs(numbers[found] - value)) found = index;
  });
  return found;
}

/** The name of a place on the axis that several runs share. */
function valueName(value) {
  if (chosen.x === "update") return `update ${short(value)}`;
  return chosen.x === "num_tokens" ? `${short(value)} tokens` : duration(value);
}
