// Write: a prompt, how to sample, and the texts as they come.

import { call, chosen, events, json, Failure, hasKey } from "./api.js";
import { $, Editor, Tinted, h, items, later, number, on, percent, pressed, sum } from "./text.js";

let alternatives = 8; // of each character, or as many as there are
let most = 20; // records at a time
// field -> label, sentence, value, and of a slider its least, greatest and step
const KNOBS = {
  max_tokens: ["Length", "The most characters it may write.", 400],
  temperature: ["Temperature", "Low is careful, high is bold; at 0 always the likeliest character.", 0.8, 0, 2, 0.05],
  top_p: ["Top-p", "Only the likeliest characters that together reach this probability.", 1, 0.05, 1, 0.05],
  seed: ["Seed", "The same seed gives the same text. Empty: a new one each time.", ""],
  n: ["Samples", "Texts side by side, each from the next seed.", 1, 1, 4, 1],
};
const MORE = {
  top_k: ["Top-k", "Only this many of the likeliest characters; 0: all of them.", 0, 0, 65, 1],
  min_p: ["Min-p", "Only characters at least this likely, measured against the likeliest.", 0, 0, 0.5, 0.01],
  typical_p: ["Typical-p", "Only the characters whose surprise is closest to the expected one.", 1, 0.05, 1, 0.05],
  repetition_penalty: ["Repetition penalty", "Above 1, characters that were used become less likely.", 1, 0.8, 1.6, 0.02],
  stop_text: ["Stop before", "The text ends before these characters; \\n is a line break.", ""],
};
const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, typical_p: 1, repetition_penalty: 1, n: 1 };

for (const [place, knobs] of [["knobs", KNOBS], ["more-knobs", MORE]]) {
  for (const [id, [label, note, value, min, max, step]] of Object.entries(knobs)) {
    const type = max ? "range" : value === "" ? "text" : "number";
    const input = h("input", { id, name: id, type, ...(max ? { min, max, step } : {}), autocomplete: "off" });
    input.defaultValue = value;
    input.setAttribute("aria-describedby", `${id}-note`);
    const output = max ? [h("output")] : [];
    $(place).append(h("div", { className: "knob" }, h("label", { htmlFor: id, textContent: label }), ...output, input, h("p", { className: "note", id: `${id}-note`, textContent: note })));
  }
}
Object.assign($("max_tokens"), { min: 1, step: 1, required: true });
Object.assign($("seed"), { inputMode: "numeric", pattern: "[0-9]{1,16}", placeholder: "a new one" });

const editor = new Editor($("prompt"), $("write-error"));
export let lastSeed = null;
let writer = null; // the checkpoint whose text it gave
let panes = [], running = null, written = []; // the stream, and the panes that it writes to

// -- the request --

function fields() {
  const body = { prompt: $("prompt").value, max_tokens: $("max_tokens").valueAsNumber || undefined };
  for (const [name, neutral] of Object.entries(NEUTRAL)) if ($(name).valueAsNumber !== neutral) body[name] = $(name).valueAsNumber;
  const seed = $("seed").value.trim();
  if (seed) body.seed = Number(seed);
  const kind = $("constraint").value;
  if (kind === "regex") body.regex = $("regex").value;
  if (kind === "choice") body.choice = $("choice").value.split("\n").filter(Boolean);
  if (kind && $("exact").checked) body.exact = true;
  if (!kind && $("stop_text").value) body.stop = $("stop_text").value.replaceAll("\\n", "\n");
  return body;
}

// Of exact answers: how many candidates they took.
const acceptance = (exact) => exact ? ` ${percent(exact.acceptance)} of ${number(exact.candidates)} candidates matched.` : "";

const isConstrained = () => $("constraint").value !== "";

function reproducible() {
  const body = { ...chosen, ...fields() };
  if (lastSeed !== null) body.seed ??= Number(lastSeed);
  return body;
}

export function curl() {
  const body = JSON.stringify(reproducible()).replaceAll("'", "'\\''");
  const auth = hasKey() ? ' -H "Authorization: Bearer $CHARGPT_API_KEY"' : "";
  return `curl -s ${new URL("generate", document.baseURI)}${auth} -d '${body}'`;
}

export function python() {
  const auth = hasKey() ? `, "Authorization": "Bearer " + os.environ["CHARGPT_API_KEY"]` : "";
  return `import json, os
from urllib.request import Request, urlopen

body = ${JSON.stringify(reproducible())}
headers = {"Content-Type": "application/json"${auth}}
request = Request("${new URL("generate", document.baseURI)}", json.dumps(body).encode(), headers)
for choice in json.load(urlopen(request))["choices"]:
    print(choice["text"])
`;
}

// -- running it --

function newPane(ariaLabel) {
  const pane = { seed: null, before: null, checkpoint: null };
  pane.tinted = new Tinted(ariaLabel, (...other) => branch(pane, ...other));
  pane.foot = h("div", { className: "foot" });
  pane.root = h("div", {}, pane.tinted.root, pane.foot);
  return pane;
}

function footer(pane) {
  const parts = [];
  if (pane.seed !== null) {
    parts.push(h("span", { textContent: `seed ${pane.seed}` }));
    if (!pane.before) parts.push(pressed("Replay", () => { $("seed").value = pane.seed; $("n").value = 1; refresh(); run(); }, "quiet"));
  }
  parts.push(h("span", { textContent: `${number(pane.tinted.characters.length)} characters` }));
  if (pane.before) parts.push(pressed("Undo the branch", () => undo(pane), "quiet"));
  pane.foot.replaceChildren(...parts);
}

async function stream(body, into) {
  // Into the panes, by the events' index, until the end, whatever it is; returns the seed.
  running?.abort();
  const controller = running = new AbortController();
  const started = performance.now();
  let first = 0, last = 0, count = 0, ending = null, seed = null, hasFailed = false, exact = null;
  written = into;
  editor.fail(null);
  $("summary").textContent = "Writing…";
  $("stop").disabled = false;
  for (const pane of into) pane.root.classList.add("writing");
  try {
    const response = await call("generate", { ...body, stream: true, ...($("certainty").checked ? { logprobs: alternatives } : {}) }, controller.signal);
    seed = response.headers.get("X-Seed");
    const checkpoint = response.headers.get("X-Checkpoint");
    if (into.some((pane) => (pane.checkpoint ??= checkpoint) !== checkpoint)) {
      undo(into[0]);
      throw new Failure(409, { message: "this text is of a model that is not served any more: it cannot be branched" });
    }
    for await (const event of events(response)) {
      if (controller.signal.aborted) break;
      if (event.chargpt) { exact = event.chargpt.exact; continue; }
      last = performance.now();
      if (first) count += [...event.text].length; // those that came with the first took no time of their own
      first ||= last;
      const pane = into[event.index];
      pane.seed = event.seed;
      pane.tinted.append(items(event.text, event.logprobs));
      if (event.finish_reason) { ending = event.finish_reason; pane.root.classList.remove("writing"); footer(pane); }
    }
  } catch (error) {
    if (error.name !== "AbortError") { hasFailed = true; fail(Failure.of(error)); }
  }
  if (controller.signal.aborted && !hasFailed) ending = "stopped";
  if (running !== controller) { // another has begun, maybe in one of these panes
    for (const pane of into) if (!written.includes(pane)) { pane.root.classList.remove("writing"); footer(pane); }
    return seed;
  }
  running = null;
  $("stop").disabled = true;
  for (const pane of into) { pane.root.classList.remove("writing"); footer(pane); }
  if (first) {
    const seconds = (last - first) / 1000, rate = seconds > 0.005 ? `, then ${number(count / seconds)} characters per second` : "";
    const how = { stopped: "Stopped. ", stop: "Done. ", length: "Done: the length is reached. " }[ending] ?? "";
    $("summary").textContent = `${how}First character after ${number(first - started)} ms${rate}.${acceptance(exact)}`;
  } else if (ending) $("summary").textContent = "Stopped before the first character.";
  return seed;
}

export async function run() {
  for (const name of ["max_tokens", "seed"]) if (!$(name).reportValidity()) return;
  const body = fields();
  panes = Array.from({ length: body.n ?? 1 }, (_, i) => newPane(`Text ${i + 1}`));
  for (const pane of panes) pane.tinted.clear(body.prompt);
  $("panes").replaceChildren(...panes.map((pane) => pane.root));
  $("panes").className = `panes of${panes.length}`;
  view();
  lastSeed = await stream(body, panes);
}

async function branch(pane, at, c, logprob, top) {
  if (isConstrained()) { $("summary").textContent = "A constrained text is one piece: it cannot be branched."; return; }
  running?.abort();
  pane.before = { characters: pane.tinted.characters, seed: pane.seed, before: pane.before };
  pane.tinted.truncate(at);
  pane.tinted.append([{ c, logprob, top }], "branch");
  const { seed, n, ...body } = fields();
  const prompt = (pane.tinted.root.querySelector(".said")?.textContent ?? "") + pane.tinted.text;
  await stream({ ...body, prompt }, [pane]);
}

function undo(pane) {
  running?.abort();
  const { characters, seed, before } = pane.before;
  pane.tinted.truncate(0);
  for (const it of characters) pane.tinted.append([it], it.className);
  Object.assign(pane, { seed, before });
  footer(pane);
}

function fail(failure) {
  editor.fail(failure);
  if (failure.status === 401) { $("status").open = true; $("key").focus(); }
  for (const pane of panes) if (!pane.tinted.characters.length) pane.root.remove();
  $("summary").textContent = "";
}

// -- a list of records --

let list = []; // of {text, certainty}
let cost = null; // of the last ones, if they are exact

async function more() {
  for (const name of ["max_tokens", "seed"]) if (!$(name).reportValidity()) return;
  const body = { ...fields(), n: most, logprobs: 1 }, into = list; // another model begins another list
  if (body.seed !== undefined) body.seed += list.length;
  $("twenty").disabled = true;
  try {
    const { choices, chargpt } = await json("generate", body);
    editor.fail(null);
    cost = chargpt.exact;
    for (const { text, logprobs } of choices) {
      const each = logprobs.token_logprobs;
      into.push({ text: (body.prompt + text).replaceAll("\n", " "), certainty: Math.exp(sum(each) / Math.max(1, each.length)) });
    }
    showList();
  } catch (error) { fail(Failure.of(error)); }
  $("twenty").disabled = false;
}

export const listed = () => list.map((it) => `${it.text}\n`).join("");

function showList() {
  let pattern = null, fault = "";
  if ($("matching").value) try { pattern = new RegExp(`^(?:${$("matching").value})$`, "u"); } catch (error) { fault = ` ${error.message}.`; }
  const seen = new Set(), matching = list.filter((it) => pattern?.test(it.text)).length;
  $("records").replaceChildren(...list.map(({ text, certainty }) => {
    const again = seen.has(text) ? " · again" : "";
    seen.add(text);
    const note = h("span", { className: "note", textContent: `${percent(certainty)}${again}`, title: "probability per character" });
    return h("li", { className: pattern?.test(text) ? "match" : "" }, h("code", { textContent: text || "∅" }), " ", note);
  }));
  $("list").hidden = !list.length;
  $("list-note").textContent = `${number(list.length)} records, ${number(list.length - seen.size)} repeated${pattern ? `, ${number(matching)} match` : ""}.${acceptance(cost)}${fault}`;
}

// -- constraints, checked as they are typed --

export const check = later(350, async (signal) => {
  const note = $("constraint-note"), { exact, ...body } = fields();
  note.className = "note";
  if (!isConstrained() || (!body.regex && !body.choice?.length)) { note.textContent = ""; return; }
  try {
    const answer = await json("generate", { ...body, n: 1, max_tokens: Math.min(body.max_tokens, 400) }, signal);
    note.textContent = `For example: ${answer.choices[0].text}`;
  } catch (error) {
    note.className = Failure.of(error).status === 400 ? "error" : "note";
    note.textContent = error.sentence;
  }
});

export function refresh() {
  const isExact = Number.isSafeInteger(Number($("seed").value) + $("n").valueAsNumber);
  $("seed").setCustomValidity(isExact ? "" : "At most 9007199254740991, the seeds of further samples included.");
  for (const output of document.querySelectorAll(".knob output")) output.value = output.nextSibling.value;
  $("regex-field").hidden = $("constraint").value !== "regex";
  $("choice-field").hidden = $("constraint").value !== "choice";
  $("exact-field").hidden = !isConstrained();
  if (isConstrained()) $("more-constraint").open = true;
  view();
}

function view() {
  $("legend").hidden = !$("certainty").checked;
  for (const pane of panes) pane.tinted.root.classList.toggle("plain", !$("certainty").checked);
}

export function useModel({ limits, model }, isLinked) {
  alternatives = Math.min(8, [...model.vocabulary].length);
  $("max_tokens").max = limits.max_tokens;
  if (!isLinked && $("max_tokens").valueAsNumber > limits.max_tokens) $("max_tokens").value = limits.max_tokens;
  most = Math.min(20, limits.max_prompts);
  $("twenty").textContent = `${most} more`;
  $("top_k").max = [...model.vocabulary].length;
  if (!isLinked) editor.suggest(model.example_prompt);
  $("prompt").labels[0].textContent = model.records ? "Begin a record with" : "Begin with";
  $("twenty").hidden = !model.records;
  list = [];
  cost = null;
  showList();
  if (writer !== model.checkpoint_sha256) lastSeed = null;
  writer = model.checkpoint_sha256;
}

on($("write-form"), "submit", (event) => { event.preventDefault(); run(); });
on($("write"), "keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey || event.target.matches(".knob input"))) { event.preventDefault(); run(); }
});
on($("write"), "input", ({ target }) => {
  refresh();
  if (["regex", "choice", "constraint", "prompt"].includes(target.id)) check();
});
on($("twenty"), "click", more);
on($("matching"), "input", showList);
on($("certainty"), "change", view);
on($("stop"), "click", () => running?.abort());
