// Write: a prompt, how to sample, and the texts as they come.

import { call, chosen, events, json, Failure, hasKey } from "./api.js";
import { $, Editor, Tinted, h, items, later, named, number, on, percent, pressed, shown, sum } from "./text.js";

let alternatives = 8; // of each character, or as many as there are
let most = 20; // records at a time
// field -> label, sentence, value, and of a slider its least, greatest and step
const KNOBS = {
  max_tokens: ["Length", "The model writes at most this many characters.", 400],
  temperature: ["Temperature", "Low values are careful, high values are bold. 0 always takes the likeliest character.", 0.8, 0, 2, 0.05],
  second: ["Second temperature", "Writes the text again from the same seed, side by side.", ""],
  top_p: ["Top-p", "Draws from the likeliest characters that together reach this probability.", 1, 0.05, 1, 0.05],
  seed: ["Seed", "The same seed gives the same text. Leave it empty for a new one each time.", ""],
  n: ["Samples", "Writes this many texts side by side, each from the next seed.", 1, 1, 4, 1],
};
const MORE = {
  top_k: ["Top-k", "Draws from this many of the likeliest characters. 0 draws from all.", 0, 0, 65, 1],
  min_p: ["Min-p", "Leaves out characters less likely than this share of the likeliest one's probability.", 0, 0, 0.5, 0.01],
  typical_p: ["Typical-p", "Draws from the characters of nearly average surprise that together reach this probability.", 1, 0.05, 1, 0.05],
  repetition_penalty: ["Repetition penalty", "Values above 1 make characters less likely that the text already has.", 1, 0.8, 1.6, 0.02],
  stop_text: ["Stop before", "The text ends before these characters. Type \\n for a line break.", ""],
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
Object.assign($("second"), { type: "number", min: 0, max: 2, step: "any", placeholder: "none" });
Object.assign($("seed"), { inputMode: "numeric", pattern: "[0-9]{1,16}", placeholder: "a new one" });

const editor = new Editor($("prompt"), $("write-error"));
export let lastSeed = null;
let writer = null; // the checkpoint whose text it gave
let panes = [], running = null; // the controller of what is being written
const past = []; // what Undo goes back to, the latest at the end
const MAX_PAST = 20;

// -- the request --

const isValid = () => ["max_tokens", "second", "seed"].every((name) => $(name).reportValidity());

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

// A body, or two that differ in their temperature.
function bodies() {
  const { n, ...body } = fields();
  return $("second").value ? [body, { ...body, temperature: $("second").valueAsNumber }] : [n ? { ...body, n } : body];
}

// How many candidates exact answers took.
const acceptance = (exact) => exact ? ` ${percent(exact.acceptance)} of ${number(exact.candidates)} candidates matched.` : "";

const isConstrained = () => $("constraint").value !== "";

const reproducible = () => bodies().map((body) => ({ ...chosen, ...(lastSeed === null ? {} : { seed: Number(lastSeed) }), ...body }));

export function curl() {
  const auth = hasKey() ? ' -H "Authorization: Bearer $CHARGPT_API_KEY"' : "";
  return reproducible().map((body) => `curl -s ${new URL("generate", document.baseURI)}${auth} -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`).join("\n");
}

const literal = (value) => (value === true ? "True" : JSON.stringify(value)); // of Python
const dictionary = (body) => `{${Object.entries(body).filter(([, value]) => value !== undefined).map(([name, value]) => `"${name}": ${literal(value)}`).join(", ")}}`;

export function python() {
  const auth = hasKey() ? `, "Authorization": "Bearer " + os.environ["CHARGPT_API_KEY"]` : "";
  return `import json, os
from urllib.request import Request, urlopen

headers = {"Content-Type": "application/json"${auth}}
for body in [${reproducible().map(dictionary).join(", ")}]:
    request = Request("${new URL("generate", document.baseURI)}", json.dumps(body).encode(), headers)
    for choice in json.load(urlopen(request))["choices"]:
        print(choice["text"])
`;
}

// -- running it --

function newPane(ariaLabel, said, kept, which = 0) {
  // kept: characters that it begins with; which: the number of the body that writes it
  const pane = { seed: null, ending: null, checkpoint: null, isBranch: false, which, kept: kept.length };
  pane.tinted = new Tinted(ariaLabel, (...other) => branch(pane, ...other));
  pane.tinted.clear(said);
  pane.tinted.append(kept);
  pane.foot = h("div", { className: "foot" });
  pane.root = h("div", {}, pane.tinted.root, pane.foot);
  return pane;
}

const hasText = () => panes.some((pane) => pane.tinted.characters.length > pane.kept);

function place(its) {
  panes = its;
  $("panes").replaceChildren(...panes.map((pane) => pane.root));
  $("panes").className = `panes of${panes.length}`;
  $("undo").disabled = !past.length;
  view();
}

function footer(pane) {
  const parts = [];
  if (pane.ending !== "stop" || !hasEnds) parts.push(pressed("Continue", () => goOn(pane), "quiet"));
  if (pane.seed !== null) {
    parts.push(h("span", { textContent: `seed ${pane.seed}` }));
    if (!pane.isBranch) parts.push(pressed("Replay", () => run({ seed: pane.seed, n: 1 }), "quiet"));
  }
  parts.push(h("span", { textContent: `${number(pane.tinted.characters.length)} characters` }));
  pane.foot.replaceChildren(...parts);
}

function keep(changes = {}) {
  // Before another text takes the place of this one, and fields get new values: all that Undo brings back.
  if (hasText()) {
    past.push({ panes, lastSeed, summary: $("summary").textContent, fields: Object.keys(changes).map((name) => [name, $(name).value]) });
    if (past.length > MAX_PAST) past.shift();
  }
  put(Object.entries(changes));
}

function put(fields) {
  for (const [name, value] of fields) name === "prompt" ? editor.set(value) : ($(name).value = value);
  refresh();
}

function undo() {
  running?.abort();
  running = null;
  $("stop").disabled = true;
  const last = past.pop() ?? { panes: [], lastSeed: null, summary: "", fields: [] };
  lastSeed = last.lastSeed;
  $("summary").textContent = last.summary;
  place(last.panes);
  put(last.fields);
}

async function stream(requests) {
  // requests: of {body, panes}. Asks for all at once, and writes into the panes by the events' index, until the end, whatever it is.
  running?.abort();
  const controller = running = new AbortController(), { signal } = controller, into = requests.flatMap((part) => part.panes);
  const started = performance.now();
  let first = 0, last = 0, count = 0, ending = null, seed = null, failure = null, costs = "";
  editor.fail(null);
  $("summary").textContent = "Writing…";
  $("stop").disabled = false;
  for (const pane of into) pane.root.classList.add("writing");
  const end = (pane) => { pane.root.classList.remove("writing"); footer(pane); };

  async function receive({ body, panes: its }) {
    try {
      const response = await call("generate", { ...body, stream: true, ...($("certainty").checked ? { logprobs: alternatives } : {}) }, signal);
      seed ??= response.headers.get("X-Seed");
      const checkpoint = response.headers.get("X-Checkpoint");
      if (its.some((pane) => (pane.checkpoint ??= checkpoint) !== checkpoint)) {
        throw new Failure(409, { message: "the model of this text is not served any more, so the text cannot be branched" });
      }
      for await (const event of events(response)) {
        if (signal.aborted) break;
        if (event.chargpt) { costs += acceptance(event.chargpt.exact); continue; }
        last = performance.now();
        if (first) count += [...event.text].length; // those that came with the first took no time of their own
        first ||= last;
        const pane = its[event.index];
        pane.seed = event.seed;
        pane.tinted.append(items(event.text, event.logprobs));
        if (event.finish_reason) { ending = pane.ending = event.finish_reason; end(pane); }
      }
    } catch (error) {
      if (error.name !== "AbortError") failure = Failure.of(error);
    }
  }

  await Promise.all(requests.map(receive));
  for (const pane of into) if (pane.root.classList.contains("writing")) end(pane);
  if (running !== controller) return; // another has begun
  running = null;
  $("stop").disabled = true;
  if (!into[0].isBranch) lastSeed = seed; // of a link and of copies
  if (first) {
    if (signal.aborted) ending = "stopped";
    const seconds = (last - first) / 1000, rate = seconds > 0.005 ? `, then ${number(count / seconds)} characters per second` : "";
    const how = failure ? "" : { stopped: "Stopped. ", stop: "Done. ", length: "Done: the length is reached. " }[ending] ?? "";
    $("summary").textContent = `${how}First character after ${number(first - started)} ms${rate}.${costs}`;
  } else {
    undo(); // the last text stays
    if (!failure) $("summary").textContent = "Stopped before the first character.";
  }
  if (failure) fail(failure);
}

export async function run(changes, from = null) {
  // from: the pane whose text is the prompt
  if (!isValid()) return;
  keep(changes);
  const asked = bodies(), [{ prompt }] = asked, isSame = from && from.tinted.said + from.tinted.text === prompt;
  const [said, kept] = isSame ? [from.tinted.said, from.tinted.characters] : [prompt, []];
  const requests = asked.map((body, which) => ({ body, panes: Array.from({ length: body.n ?? 1 }, (_, i) => newPane(`Text ${which + i + 1}`, said, kept, which)) }));
  if (requests.length > 1) {
    const seed = Math.floor(Math.random() * 2 ** 32);
    for (const { body, panes: [pane] } of requests) {
      body.seed ??= seed;
      pane.root.prepend(h("p", { className: "note", textContent: `Temperature ${body.temperature ?? 1}` }));
    }
  }
  place(requests.flatMap((part) => part.panes));
  if (from) panes[0].tinted.root.focus({ preventScroll: true });
  await stream(requests);
}

function goOn(pane) {
  const { tinted } = pane, seed = $("seed").value && Number($("seed").value) + panes.length; // other draws than before
  run({ prompt: tinted.said + tinted.text, seed }, pane);
}

async function branch(pane, at, c, logprob, top) {
  if (isConstrained()) { $("summary").textContent = "A constrained answer cannot be branched, because all of it has to match."; return; }
  if (!isValid()) return;
  const { tinted, checkpoint, which } = pane, kept = [...tinted.characters.slice(0, at), { c, logprob, top, className: "branch" }];
  const fresh = Object.assign(newPane(tinted.root.ariaLabel, tinted.said, kept, which), { checkpoint, isBranch: true });
  if (pane.root.firstChild !== tinted.root) fresh.root.prepend(pane.root.firstChild.cloneNode(true));
  keep();
  place(panes.map((it) => (it === pane ? fresh : it)));
  fresh.tinted.root.focus({ preventScroll: true });
  const { seed, n, ...body } = bodies()[which] ?? fields();
  await stream([{ body: { ...body, prompt: tinted.said + fresh.tinted.text }, panes: [fresh] }]);
}

function fail(failure) {
  editor.fail(failure);
  if (failure.status === 401) { $("status").open = true; $("key").focus(); }
}

// -- a list of records --

let list = []; // of {text, certainty}
let cost = null; // of the last ones, if they are exact
let request = ""; // the fields that gave it
let hasEnds = false; // a record ends by itself

async function more() {
  if (!isValid()) return;
  const body = { ...fields(), n: most, logprobs: 1 }, its = JSON.stringify(body), before = list, into = its === request ? list : [];
  if (body.seed !== undefined) body.seed += into.length;
  $("twenty").disabled = true;
  try {
    const { choices, chargpt } = await json("generate", body);
    editor.fail(null);
    if (list === before) { // and not another model's
      [list, request, cost] = [into, its, chargpt.exact];
      for (const { text, logprobs } of choices) {
        const each = logprobs.token_logprobs;
        list.push({ text: body.prompt + text, certainty: Math.exp(sum(each) / Math.max(1, each.length)) });
      }
      showList();
    }
  } catch (error) { fail(Failure.of(error)); }
  $("twenty").disabled = false;
}

// What the page opens with.
export function begin() {
  if (!hasEnds) return run();
  running?.abort();
  keep();
  place([]);
  $("summary").textContent = "Press Write for one record whose characters you can point at.";
  return more();
}

// A blank line follows each record if some have several lines.
export const listed = () => {
  const end = list.some((it) => it.text.includes("\n")) ? "\n\n" : "\n";
  return list.map((it) => it.text + end).join("");
};

function parts(text, pattern) {
  // The text, those pieces marked that match.
  const pieces = [];
  let at = 0;
  for (const { 0: found, index } of pattern ? text.matchAll(pattern) : []) {
    if (!found) continue;
    pieces.push(text.slice(at, index), h("mark", { textContent: found }));
    at = index + found.length;
  }
  return [...pieces, text.slice(at)];
}

function showList() {
  let pattern = null, fault = "";
  if ($("matching").value) try { pattern = new RegExp($("matching").value, "gmu"); } catch (error) { fault = ` ${error.message}.`; }
  const seen = new Set();
  let matching = 0;
  $("records").replaceChildren(...list.map(({ text, certainty }) => {
    const again = seen.has(text) ? " · again" : "";
    seen.add(text);
    const note = h("span", { className: "note", textContent: `${percent(certainty)}${again}`, title: "mean probability of a character" });
    const pieces = parts(text, pattern);
    if (pieces.length > 1) matching += 1;
    return h("li", {}, h("code", {}, ...(text ? pieces : ["∅"])), " ", note);
  }));
  $("list").hidden = !list.length;
  $("list-note").textContent = `${number(list.length)} records, ${number(list.length - seen.size)} repeated${pattern ? `, ${number(matching)} with a match` : ""}.${acceptance(cost)}${fault}`;
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
  $("n").disabled = $("second").value !== "";
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
  const { vocabulary } = model;
  $("more-vocabulary").firstElementChild.textContent = `The ${number([...vocabulary].length)} characters that the model knows`;
  $("vocabulary").replaceChildren(...[...vocabulary].map((c) => h("span", { textContent: [...new Set([shown(c), named(c)])].join(" ") })));
  hasEnds = model.records;
  if (!isLinked) editor.suggest(model.example_prompt);
  $("prompt").labels[0].textContent = model.records ? "Begin a record with" : "Begin with";
  $("twenty").hidden = !hasEnds;
  [list, request, cost] = [[], "", null];
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
on($("undo"), "click", () => {
  editor.fail(null);
  undo();
  if ($("undo").disabled) $("go").focus();
});
