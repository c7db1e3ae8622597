// Attend: the causal weights of every head for a short text, and how one row of them comes about.

import { Failure, json } from "./api.js";
import { $, Editor, h, later, on, percent, pressed, shown, sum } from "./text.js";

const STEPS = ["Plain average", "Queries · keys", "Scale", "Mask", "Softmax", "Values", "Heads", "Next character"];
const WEIGHED = "The stronger the colour, the larger the weight. Small weights are shown larger than they are.", FITS = "Green: the two fit. Orange: they do not.";
const MAX_AXIS = 52; // characters beside the map
const editor = new Editor($("short"), $("attend-error")), map = $("map"), looks = $("looks");
let answer = null, characters = [], layer = 3, head = 3, row = 0, step = 4;
let chosen = null; // the weights and scores of one head
let isOver = false; // the map
let nexts = new Map(); // by row: what may come next, the likeliest first

const fixed = (x) => (Math.abs(x) < 0.005 ? 0 : x).toFixed(2).replace("-", "−");
const variance = (xs) => sum(xs.map((x) => (x - sum(xs) / xs.length) ** 2)) / xs.length;

function softmax(xs) {
  const top = Math.max(...xs), es = xs.map((x) => Math.exp(x - top));
  return es.map((e) => e / sum(es));
}

async function ask(signal) {
  try {
    answer = await json("v1/attention", { text: $("short").value }, signal);
    editor.fail(null);
    chosen = null;
    nexts = new Map();
    characters = [...answer.text];
    for (const axis of [$("axis-top"), $("axis-left")]) axis.replaceChildren(...(characters.length > MAX_AXIS ? [] : characters).map((c) => h("span", { textContent: shown(c) })));
    looks.replaceChildren(...characters.map((c, at) => h("span", { textContent: c === "\n" ? "↵\n" : c, at })));
    row = Math.floor(0.8 * (characters.length - 1));
    drawHeads();
    await choose(Math.min(layer, answer.n_layer - 1), Math.min(head, answer.n_head - 1), signal);
  } catch (error) { editor.fail(Failure.of(error)); }
}

async function choose(newLayer, newHead, signal) {
  const { text } = answer;
  const found = await json("v1/attention", { text, layer: newLayer, head: newHead, scores: true, values: true }, signal);
  if (answer.text !== text) return;
  [layer, head, chosen] = [newLayer, newHead, found.data[0]];
  for (const button of $("heads").children) button.ariaPressed = String(button.layer === layer && button.head === head);
  draw();
}

// -- heat maps --

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(" ").map(Number);
const shade = (w) => w ** 0.6; // so that small weights are seen

function paint(canvas, value, rows = characters.length, columns = rows) {
  // A pixel for each pair of characters. value(t, j): −1 to 1, 0 for nothing.
  const cool = colour("--map"), warm = colour("--map-warm");
  Object.assign(canvas, { width: Math.max(1, columns), height: Math.max(1, rows) });
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  for (let t = 0; t < rows; t += 1) for (let j = 0; j < columns; j += 1) {
    const x = value(t, j);
    image.data.set([...(x < 0 ? warm : cool), 255 * Math.min(1, Math.abs(x))], 4 * (t * columns + j));
  }
  context.putImageData(image, 0, 0);
}

function drawHeads() {
  $("heads").style.gridTemplateColumns = `repeat(${Math.max(4, answer.n_head)}, minmax(0, 1fr))`;
  $("heads").replaceChildren(...answer.data.map((it) => {
    const canvas = h("canvas", { ariaHidden: "true" }), ariaLabel = `Layer ${it.layer + 1}, head ${it.head + 1}`;
    paint(canvas, (t, j) => (j > t ? 0 : shade(it.weights[t][j])));
    return Object.assign(pressed(canvas, () => choose(it.layer, it.head).catch((error) => editor.fail(Failure.of(error)))), { ariaLabel, title: ariaLabel, layer: it.layer, head: it.head });
  }));
}

function draw() {
  if (!chosen) return;
  $("mark").hidden = !characters.length;
  if (!characters.length) {
    for (const element of [$("step"), $("row"), $("map-note")]) element.replaceChildren();
    paint(map, () => 0);
    return;
  }
  const { weights, scores } = chosen, largest = Math.max(1e-9, ...scores.flat().map(Math.abs));
  const average = (t) => shade(1 / (t + 1)), product = (t, j) => scores[t][j] / largest, weight = (t, j) => shade(weights[t][j]);
  const value = [average, product, (t, j) => product(t, j) * answer.scale, product, weight, weight, weight, weight][step], isMasked = step !== 1 && step !== 2;
  paint(map, (t, j) => (isMasked && j > t ? 0 : value(t, j) * (isOver && t !== row ? 0.45 : 1)));
  for (const [axis, of] of [[$("axis-top"), (j) => j <= row], [$("axis-left"), (t) => t === row]]) [...axis.children].forEach((it, i) => it.classList.toggle("is", of(i)));
  Object.assign($("mark").style, { top: `${(100 * row) / characters.length}%`, height: `${100 / characters.length}%` });
  $("map-legend").textContent = step > 0 && step < 4 ? FITS : WEIGHED;
  drawRow();
  if (step === 7) foresee();
}

async function foresee() {
  // What the row that is chosen predicts, once.
  const at = row, of = nexts;
  if (of.has(at)) return;
  of.set(at, null);
  try {
    const { data } = await json("v1/next", { prompt: characters.slice(0, at + 1).join("") });
    of.set(at, data[0].distribution);
    if (of === nexts && at === row) drawRow();
  } catch (error) { of.delete(at); editor.fail(Failure.of(error)); }
}

// -- one row --

function drawRow() {
  const w = chosen.weights[row], seen = row + 1, order = [...w.keys()].sort((a, b) => w[b] - w[a]), top = Math.max(w[order[0]], 0.2);
  [...looks.children].forEach((span, j) => {
    const level = j > row ? "after" : w[j] < 0.01 ? "" : `w${Math.min(5, Math.ceil((5 * w[j]) / top))}`;
    span.className = j === row ? `${level} here` : level;
  });
  const best = order.slice(0, 3).filter((j) => w[j] >= 0.01).map((j) => `“${shown(characters[j])}” ${place(j)} (${percent(w[j])})`);
  $("map-note").textContent = `Layer ${layer + 1}, head ${head + 1}: “${shown(characters[row])}” looks at ${best.join(", ")}.`;
  map.ariaLabel = `Heat map of ${STEPS[step].toLowerCase()}. ${$("map-note").textContent}`;
  $("step").replaceChildren(...sentences(w, seen, order).map((parts) => h("p", {}, ...parts)));
  const cell = (textContent) => h("td", { textContent }), title = (textContent, scope) => h("th", { textContent, scope });
  $("row").replaceChildren(
    h("thead", {}, h("tr", {}, ...["", "average", "q · k", "scaled", "masked", "weight"].map((name) => title(name, "col")))),
    h("tbody", {}, ...characters.map((c, j) => {
      const q = chosen.scores[row][j], scaled = fixed(q * answer.scale), isSeen = j < seen;
      return h("tr", {}, title(shown(c), "row"), ...[isSeen ? (1 / seen).toFixed(3) : "0", fixed(q), scaled, isSeen ? scaled : "−∞", isSeen ? w[j].toFixed(3) : "0"].map(cell));
    })));
}

const place = (j) => (j === row ? "itself" : `${row - j} back`);

function sentences(w, seen, order) {
  const b = (x) => h("b", { textContent: x }), quoted = (j) => h("code", { textContent: shown(characters[j]) });
  const c = quoted(row), all = chosen.scores[row], q = all.slice(0, seen), scaled = q.map((x) => x * answer.scale);
  const high = Math.max(...q), size = Math.round(1 / answer.scale ** 2), hidden = characters.length - seen;
  return [
    () => [
      ["The simplest way to look back is a plain average. ", c, " takes the mean of all characters up to itself. Each of these ", b(seen), " characters gets the weight ", b((1 / seen).toFixed(3)), "."],
      ["The weights of a row add up to 1. They do not depend on the text."]],
    () => [
      ["Each character emits a query and a key. The query is what it looks for, and the key is what it holds. The product of a query and a key says how well the two fit."],
      ["Between ", c, " and the characters up to it, the products range from ", b(fixed(Math.min(...q))), " to ", b(fixed(high)), ". The best fit is ", quoted(q.indexOf(high)), "."]],
    () => [
      ["A product adds up ", b(size), " terms, so it grows with their number. It is divided by ", b(`√${size} = ${fixed(1 / answer.scale)}`), " before the softmax. The variance of this row falls from ", b(fixed(variance(q))), " to ", b(fixed(variance(scaled))), "."],
      ["Without scaling, the largest weight would be ", b(percent(Math.max(...softmax(q)))), " instead of ", b(percent(w[order[0]])), ". With scaling after the softmax, the row would add up to ", b(answer.scale.toFixed(3)), " and stay as sharp."]],
    () => [
      ["A character must not see what comes after it, because it has to predict that. The ", b(hidden), " products after ", c, " become −∞."],
      hidden ? ["Without the mask, they would take ", b(percent(sum(softmax(all.map((x) => x * answer.scale)).slice(seen)))), " of the weight."] : ["Choose an earlier character to see what the mask takes from it."]],
    () => [
      ["The softmax turns the products into weights. No weight is negative, and they add up to ", b(sum(w).toFixed(2)), "."],
      ["The largest weights: ", ...order.slice(0, 4).flatMap((j, i) => [i ? ", " : "", quoted(j), " ", b(percent(w[j]))]), `. A plain average gives each ${percent(1 / seen)}.`]],
    () => {
      const { values } = chosen, mix = values[0].map((_, i) => sum(w.map((weight, j) => weight * values[j][i])));
      const most = order.slice(0, 5).filter((j) => j < seen), largest = Math.max(1e-9, ...[mix, ...most.map((j) => values[j])].flat().map(Math.abs));
      const strip = (xs, ariaLabel) => {
        const canvas = h("canvas", { className: "strip", role: "img", ariaLabel });
        paint(canvas, (_, i) => xs[i] / largest, 1, xs.length);
        return canvas;
      };
      return [
        ["Each character also has a value, which it gives to the characters that look at it. In this head a value is ", b(mix.length), " numbers, green above 0 and orange below."],
        ...most.map((j) => [strip(values[j], `Value of ${shown(characters[j])}`), quoted(j), " × ", b(percent(w[j]))]),
        [strip(mix, "The mix"), "Each value is multiplied by its weight. The sum of all ", b(seen), " is the output of this head for ", c, "."]];
    },
    () => [
      ["The heads look at the same text in different ways, each with its own queries and keys. In layer ", b(layer + 1), ", ", c, " looks most at"],
      ...answer.data.filter((it) => it.layer === layer).map((it) => {
        const most = Math.max(...it.weights[row]), j = it.weights[row].indexOf(most);
        return [quoted(j), ` ${place(j)}, `, b(percent(most)), `: head ${it.head + 1}`];
      })],
    () => {
      const found = nexts.get(row) ?? [], came = found.find((it) => it.character === characters[row + 1]);
      return [
        ["Each layer adds what its heads have mixed to the row of ", c, ". From the row after the last layer the model reads a probability for each character of the vocabulary:"],
        ...found.slice(0, 5).map((it) => [h("progress", { max: 1, value: it.probability, ariaHidden: "true" }), " ", h("code", { textContent: shown(it.character) }), " ", b(percent(it.probability))]),
        came ? ["The character that does come, ", quoted(row + 1), ", had ", b(percent(came.probability)), "."] : ["The text ends here. Write draws the next character from these probabilities, and starts again with one more row."]];
    },
  ][step]();
}

// -- what moves --

function look(at) {
  if (at === row || !chosen || !(at >= 0 && at < characters.length)) return;
  row = at;
  draw();
}

on(looks, "pointerover click", ({ target }) => look(target.at));
on(looks, "keydown", (event) => {
  const to = { ArrowRight: row + 1, ArrowLeft: row - 1, Home: 0, End: characters.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  look(to);
  $("said").textContent = $("map-note").textContent;
});
on(map, "pointermove click", (event) => {
  const { top, height } = map.getBoundingClientRect();
  isOver = true;
  look(Math.floor(((event.clientY - top) / height) * characters.length));
});
on(map, "pointerleave", () => { isOver = false; draw(); });
on(matchMedia("(prefers-color-scheme: dark)"), "change", () => { if (chosen) { drawHeads(); choose(layer, head); } });

function setStep(number) {
  step = (number + STEPS.length) % STEPS.length;
  [...$("steps").children].forEach((it, i) => Object.assign(it, { ariaChecked: String(i === step), tabIndex: i === step ? 0 : -1 }));
  draw();
}

$("steps").append(...STEPS.map((name, i) => Object.assign(pressed(`${i + 1} ${name}`, () => setStep(i)), { role: "radio" })));
on($("steps"), "keydown", (event) => {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  setStep(step + by);
  $("steps").children[step].focus();
});
setStep(step);

export const attend = later(300, ask);
on($("short"), "input", attend);

export function useModel({ limits, model }, isLinked) {
  const maxLength = limits.max_attention_characters;
  $("short-note").textContent = maxLength ? `At most ${maxLength} characters.` : "This service does not show attention: it is switched off, or the model is too large.";
  Object.assign($("short"), { maxLength, disabled: !maxLength });
  const example = model.example && [...model.example].slice(0, MAX_AXIS - 4).join("");
  if (!isLinked) editor.suggest(example ?? "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?");
}
