// Attend: the causal weights of every head for a short text, and how one row of them comes about.

import { Failure, json } from "./api.js";
import { $, Editor, h, later, percent, shown } from "./text.js";

const editor = new Editor($("short")), map = $("map"), looks = $("looks");
let answer = null, characters = [], layer = 0, head = 0, row = 0, step = 4, scores = null, over = null;
const product = (t, j) => scores.scores[t][j];
const fixed = (x) => (Math.abs(x) < 0.005 ? 0 : x).toFixed(2).replace("-", "−");
const quoted = (c) => h("code", { textContent: shown(c) });
const weights = () => answer.data.find((it) => it.layer === layer && it.head === head).weights;

const STEPS = ["Plain average", "Queries · keys", "Scale", "Mask", "Softmax", "Heads"];

// -- asking --

async function ask(signal) {
  const text = $("short").value;
  try {
    const found = await json("v1/attention", { text }, signal);
    fail(null);
    answer = found;
    characters = [...answer.text];
    layer = Math.min(layer, answer.n_layer - 1);
    head = Math.min(head, answer.n_head - 1);
    row = characters.length - 1;
    drawHeads();
    await choose(layer, head, signal);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    fail(error);
  }
}

async function choose(newLayer, newHead, signal) {
  const text = answer.text;
  const found = await json("v1/attention", { text, layer: newLayer, head: newHead, scores: true }, signal);
  if (answer.text !== text) return;
  [layer, head, scores] = [newLayer, newHead, found.data[0]];
  for (const button of $("heads").children) button.setAttribute("aria-pressed", String(button.layer === layer && button.head === head));
  draw();
}

function fail(failure) {
  editor.mark(failure?.code === "unknown_character" ? failure.offsets : []);
  $("attend-error").textContent = failure?.sentence ?? "";
  if (failure) document.dispatchEvent(new CustomEvent("failure", { detail: failure }));
}

// -- heat maps --

const colours = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(/\s+/).map(Number);

function paint(canvas, value) {
  // value(t, j): −1 to 1, or null for nothing; a pixel for each pair of characters
  const T = characters.length, cool = colours("--map"), warm = colours("--map-warm");
  canvas.width = canvas.height = Math.max(1, T);
  const context = canvas.getContext("2d"), image = context.createImageData(Math.max(1, T), Math.max(1, T));
  for (let t = 0; t < T; t += 1) for (let j = 0; j < T; j += 1) {
    const x = value(t, j);
    if (x === null) continue;
    image.data.set([...(x < 0 ? warm : cool), 255 * Math.min(1, Math.abs(x))], 4 * (t * T + j));
  }
  context.putImageData(image, 0, 0);
}

const shade = (w) => w ** 0.6; // so that small weights are seen

function drawHeads() {
  const grid = $("heads");
  grid.style.gridTemplateColumns = `repeat(${Math.max(4, answer.n_head)}, minmax(0, 1fr))`;
  grid.replaceChildren(...answer.data.map((it) => {
    const canvas = h("canvas");
    canvas.setAttribute("aria-hidden", "true");
    const button = h("button", { type: "button", title: `layer ${it.layer + 1}, head ${it.head + 1}` }, canvas);
    Object.assign(button, { layer: it.layer, head: it.head });
    button.setAttribute("aria-label", `Layer ${it.layer + 1}, head ${it.head + 1}`);
    button.addEventListener("click", () => choose(it.layer, it.head).catch((error) => { if (error instanceof Failure) fail(error); else throw error; }));
    paint(canvas, (t, j) => (j > t ? null : shade(it.weights[t][j])));
    return button;
  }));
}

function valueOf() {
  const w = weights(), all = scores.scores.flat(), largest = Math.max(1e-9, ...all.map(Math.abs));
  const signed = (t, j) => product(t, j) / largest;
  return [
    (t, j) => (j > t ? null : shade(1 / (t + 1))), signed, (t, j) => signed(t, j) * answer.scale,
    (t, j) => (j > t ? null : signed(t, j)), (t, j) => (j > t ? null : shade(w[t][j])), (t, j) => (j > t ? null : shade(w[t][j])),
  ][step];
}

function draw() {
  if (!characters.length) {
    for (const element of [looks, $("step"), $("row")]) element.replaceChildren();
    $("map-note").textContent = "";
    paint(map, () => null);
    return;
  }
  const value = valueOf(), dim = over !== null;
  paint(map, (t, j) => { const x = value(t, j); return x === null ? null : dim && t !== row ? x * 0.45 : x; });
  drawRow();
}

// -- one row --

function drawRow() {
  const w = weights()[row], c = characters[row], T = characters.length, seen = row + 1;
  const most = w.map((x, j) => [x, j]).sort((a, b) => b[0] - a[0]);
  const largest = most[0][0];
  if (looks.children.length !== T || looks.textContent !== answer.text) {
    looks.replaceChildren(...characters.map((it, at) => Object.assign(h("span", { textContent: it === "\n" ? "↵\n" : it }), { at })));
  }
  [...looks.children].forEach((span, j) => {
    span.className = j > row ? "after" : `w${w[j] < 0.01 ? 0 : Math.min(5, Math.ceil((5 * w[j]) / Math.max(largest, 0.2)))}`;
    if (j === row) span.classList.add("here");
  });
  const named = (j) => `“${shown(characters[j])}”${j === row ? " (itself)" : ` ${row - j} back`}`;
  $("map-note").textContent = `Layer ${layer + 1}, head ${head + 1}: “${shown(c)}” looks at ${most.slice(0, 3).filter(([x]) => x >= 0.01).map(([x, j]) => `${named(j)} (${percent(x)})`).join(", ")}.`;
  map.setAttribute("aria-label", `Heat map of ${STEPS[step].toLowerCase()}, ${T} by ${T}. ${$("map-note").textContent}`);
  $("step").replaceChildren(...sentences(w, c, seen, most));
  const products = characters.map((_, j) => product(row, j)), head_ = ["", "plain average", "q · k", "scaled", "masked", "weight"];
  $("row").replaceChildren(
    h("thead", {}, h("tr", {}, ...head_.map((name) => Object.assign(h("th", { textContent: name }), { scope: "col" })))),
    h("tbody", {}, ...characters.map((it, j) => h("tr", {}, Object.assign(h("th", { textContent: shown(it) }), { scope: "row" }),
      ...[j < seen ? (1 / seen).toFixed(3) : "0", fixed(products[j]), fixed(products[j] * answer.scale), j < seen ? fixed(products[j] * answer.scale) : "−∞", j < seen ? w[j].toFixed(3) : "0"].map((x) => h("td", { textContent: x }))))));
}

function softmax(xs) {
  const top = Math.max(...xs), es = xs.map((x) => Math.exp(x - top)), sum = es.reduce((a, b) => a + b);
  return es.map((e) => e / sum);
}
const variance = (xs) => { const mean = xs.reduce((a, b) => a + b, 0) / xs.length; return xs.reduce((a, x) => a + (x - mean) ** 2, 0) / xs.length; };

function sentences(w, c, seen, most) {
  const b = (x) => h("b", { textContent: x }), p = (...parts) => h("p", {}, ...parts);
  const products = characters.slice(0, seen).map((_, j) => product(row, j)), scaled = products.map((x) => x * answer.scale);
  const low = Math.min(...products), high = Math.max(...products), best = products.indexOf(high), size = Math.round(1 / answer.scale ** 2);
  switch (step) {
    case 0: return [
      p("The simplest way to look back: ", quoted(c), " takes the mean of all it has seen, itself included. That is ", b(`${seen}`), seen === 1 ? " character, with weight " : " characters, each with weight ", b((1 / seen).toFixed(3)), "."),
      p("It is a row of a triangular matrix whose rows add up to 1. Nothing here depends on the text.")];
    case 1: return [
      p("Each character emits a query, what it looks for, and a key, what it holds. The product of the two says how well they fit."),
      p("For ", quoted(c), " the products with what it has seen go from ", b(fixed(low)), " to ", b(fixed(high)), "; the best fit is ", quoted(characters[best]), ".")];
    case 2: return [
      p("A product of ", b(`${size}`), " numbers grows with their count, so it is divided by ", b(`√${size} = ${fixed(1 / answer.scale)}`), " before the softmax. The variance of this row goes from ", b(fixed(variance(products))), " to ", b(fixed(variance(scaled))), "."),
      p("Without the scale, the largest weight would be ", b(percent(Math.max(...softmax(products)))), "; with it, it is ", b(percent(most[0][0])), ". Scaled afterwards instead, the row would add up to ", b(answer.scale.toFixed(3)), " and be as sharp.")];
    case 3: {
      const all = softmax(characters.map((_, j) => product(row, j) * answer.scale)), future = all.slice(seen).reduce((x, y) => x + y, 0);
      return [
        p("A character may not see what comes after it: that is what it is to predict. The ", b(`${characters.length - seen}`), " products after ", quoted(c), " become −∞."),
        p(characters.length > seen ? "Unmasked, they would have taken " : "This is the last character: nothing is hidden from it. An earlier one would show how much of the weight is kept from the future, here ", b(percent(future)), characters.length > seen ? " of the weight." : ".")];
    }
    case 4: return [
      p("Softmax turns the products into weights: none is negative, and they add up to ", b(w.reduce((x, y) => x + y, 0).toFixed(2)), ". The output for ", quoted(c), " is the mean of the values with these weights."),
      p(...most.slice(0, 4).flatMap(([x, j], i) => [i ? ", " : "Most of it: ", quoted(characters[j]), " ", b(percent(x))]), `. A plain average would give each ${percent(1 / seen)}.`)];
    default: return [
      p("Several heads look at the same text in different ways, each with queries and keys of its own. In layer ", b(`${layer + 1}`), ", ", quoted(c), " looks most at:"),
      p(...answer.data.filter((it) => it.layer === layer).flatMap((it, i) => { const best_ = Math.max(...it.weights[row]), j = it.weights[row].indexOf(best_); return [i ? ", " : "", `head ${it.head + 1} at `, quoted(characters[j]), ` ${j === row ? "itself" : `${row - j} back`} `, b(percent(best_))]; }), ".")];
  }
}

function look(at) {
  if (at === row || !scores || at < 0 || at >= characters.length) return;
  row = at;
  draw();
}

looks.addEventListener("pointerover", ({ target }) => { if (target.at !== undefined) look(target.at); });
looks.addEventListener("click", ({ target }) => { if (target.at !== undefined) look(target.at); });
looks.addEventListener("keydown", (event) => {
  const to = { ArrowRight: row + 1, ArrowLeft: row - 1, Home: 0, End: characters.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  look(to);
  $("said").textContent = $("map-note").textContent;
});
for (const kind of ["pointermove", "click"]) map.addEventListener(kind, (event) => {
  const box = map.getBoundingClientRect();
  over = Math.floor(((event.clientY - box.top) / box.height) * characters.length);
  look(over);
});
map.addEventListener("pointerleave", () => { over = null; if (scores) draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (scores) { drawHeads(); choose(layer, head); } });

STEPS.forEach((name, number) => {
  const button = h("button", { type: "button", textContent: `${number + 1} ${name}`, tabIndex: number === step ? 0 : -1 });
  button.setAttribute("role", "radio");
  button.setAttribute("aria-checked", String(number === step));
  button.addEventListener("click", () => setStep(number));
  $("steps").append(button);
});
$("steps").addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  setStep((step + by + STEPS.length) % STEPS.length);
  $("steps").children[step].focus();
});

function setStep(number) {
  step = number;
  [...$("steps").children].forEach((button, i) => { button.setAttribute("aria-checked", String(i === step)); button.tabIndex = i === step ? 0 : -1; });
  if (scores) draw();
}

export const attend = later(300, ask);
$("short").addEventListener("input", attend);

export function useModel({ limits, model }, isFirst) {
  const limit = limits.max_attention_characters, text = "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?";
  $("short-note").textContent = limit ? `At most ${limit} characters.` : "This service does not show attention: it is switched off, or the model is too large.";
  $("short").maxLength = limit;
  $("short").disabled = !limit;
  if (isFirst && limit >= text.length && !$("short").value && [...text].every((c) => model.vocabulary.includes(c))) $("short").value = text;
}
