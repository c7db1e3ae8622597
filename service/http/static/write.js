// Write: a prompt, how to sample, and the texts as they come.

import { call, events, json, Failure, hasKey } from "./api.js";
import { $, Editor, Tinted, h, items, later } from "./text.js";

const ALTERNATIVES = 8;
const NUMBERS = { max_tokens: 400, temperature: 1, top_p: 1, top_k: 0, min_p: 0, typical_p: 1, repetition_penalty: 1, n: 1 };
const number = (x) => x.toLocaleString("en", { maximumFractionDigits: x < 100 ? 1 : 0 });

const form = $("write-form"), editor = new Editor($("prompt"));
let panes = [], running = null, lastSeed = null;

// -- the request --

const unescaped = (text) => text.replace(/\\([nt\\])/g, (_, c) => ({ n: "\n", t: "\t", "\\": "\\" })[c]);

function fields() {
  const body = { prompt: $("prompt").value };
  for (const [name, neutral] of Object.entries(NUMBERS)) {
    const value = $(name).valueAsNumber;
    if (name === "max_tokens" || (Number.isFinite(value) && value !== neutral)) body[name] = value;
  }
  const seed = $("seed").value.trim();
  if (seed) body.seed = Number(seed);
  const kind = $("constraint").value;
  if (kind === "regex") body.regex = $("regex").value;
  if (kind === "choice") body.choice = $("choice").value.split("\n").filter(Boolean);
  else if (!kind && $("stop_text").value) body.stop = unescaped($("stop_text").value);
  return body;
}

const isConstrained = () => $("constraint").value !== "";

function reproducible() {
  const body = fields();
  if (body.seed === undefined && lastSeed !== null) body.seed = lastSeed;
  return body;
}

export function curl() {
  const body = JSON.stringify(reproducible()).replaceAll("'", "'\\''");
  const auth = hasKey() ? " -H \"Authorization: Bearer $CHARGPT_API_KEY\"" : "";
  return `curl -s ${new URL("generate", document.baseURI)}${auth} -d '${body}'`;
}

export function python() {
  const literal = JSON.stringify(reproducible()).replace(/("(?:[^"\\]|\\.)*")|\b(true|false|null)\b/g, (_, text, word) => text ?? { true: "True", false: "False", null: "None" }[word]);
  const auth = hasKey() ? ", \"Authorization\": \"Bearer \" + os.environ[\"CHARGPT_API_KEY\"]" : "";
  return `import json${auth ? "\nimport os" : ""}
from urllib.request import Request, urlopen

body = ${literal}
headers = {"Content-Type": "application/json"${auth}}
request = Request("${new URL("generate", document.baseURI)}", json.dumps(body).encode(), headers)
for choice in json.load(urlopen(request))["choices"]:
    print(choice["text"])
`;
}

// -- running it --

function newPane(number, count) {
  const pane = { seed: null, before: null };
  pane.tinted = new Tinted(count > 1 ? `Text ${number + 1}` : "Text", (at, c, logprob, top) => branch(pane, at, c, logprob, top));
  pane.foot = h("div", { className: "foot" });
  pane.root = h("div", {}, pane.tinted.root, pane.foot);
  return pane;
}

function footer(pane) {
  const parts = [];
  if (pane.seed !== null) {
    parts.push(h("span", { textContent: `seed ${pane.seed}` }));
    if (!pane.before) parts.push(action("Replay", () => { $("seed").value = pane.seed; $("n").value = 1; refresh(); run(); }));
  }
  parts.push(h("span", { textContent: `${number(pane.tinted.characters.length)} characters` }));
  if (pane.before) parts.push(action("Undo the branch", () => undo(pane)));
  pane.foot.replaceChildren(...parts);
}

const action = (text, work) => { const button = h("button", { type: "button", className: "quiet", textContent: text }); button.addEventListener("click", work); return button; };

async function stream(body, chosen) {
  // Into the panes by the events' index; resolves when the stream has ended, in whatever way.
  running?.abort();
  const controller = running = new AbortController();
  const started = performance.now();
  let first = 0, last = 0, count = 0, ending = null;
  fail(null);
  $("go").disabled = true;
  $("stop").disabled = false;
  for (const pane of chosen) pane.root.classList.add("writing");
  try {
    const response = await call("generate", { ...body, stream: true, ...($("certainty").checked ? { logprobs: ALTERNATIVES } : {}) }, controller.signal);
    if (!body.seed) lastSeed = Number((response.headers.get("X-Seed") ?? "").split(",")[0]) || null;
    for await (const event of events(response)) {
      if (event.chargpt) { lastSeed = event.chargpt.seeds[0]; continue; }
      last = performance.now();
      first ||= last;
      count += [...event.text].length;
      const pane = chosen[event.index];
      pane.seed = event.seed;
      pane.tinted.append(items(event.text, event.logprobs));
      if (event.finish_reason) { ending = event.finish_reason; pane.root.classList.remove("writing"); footer(pane); }
    }
  } catch (error) {
    if (error.name === "AbortError") ending = "stopped";
    else if (error instanceof Failure) fail(error);
    else throw error;
  }
  if (running !== controller) return; // another has begun
  running = null;
  $("go").disabled = false;
  $("stop").disabled = true;
  for (const pane of chosen) { pane.root.classList.remove("writing"); footer(pane); }
  if (first) {
    const seconds = (last - first) / 1000, rate = seconds > 0.001 ? `, then ${number(count / seconds)} characters per second` : "";
    const how = { stopped: "Stopped. ", stop: "Done. ", length: "Done: the length is reached. " }[ending] ?? "";
    $("summary").textContent = `${how}First character after ${number(first - started)} ms${rate}; ${number(count)} in all${lastSeed === null ? "" : `, seed ${lastSeed}`}.`;
  } else if (ending === "stopped") $("summary").textContent = "Stopped before the first character.";
}

export async function run() {
  for (const name of ["max_tokens", "seed"]) if (!$(name).reportValidity()) return;
  const body = fields();
  lastSeed = body.seed ?? null;
  panes = Array.from({ length: body.n ?? 1 }, (_, i) => newPane(i, body.n ?? 1));
  for (const pane of panes) pane.tinted.clear(body.prompt);
  $("panes").replaceChildren(...panes.map((pane) => pane.root));
  view();
  await stream(body, panes);
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
  editor.mark(failure?.code === "unknown_character" && failure.param === "prompt" ? failure.offsets : []);
  $("write-error").textContent = failure?.sentence ?? "";
  if (failure) {
    if (failure.status === 401) { $("status").open = true; $("key").focus(); }
    for (const pane of panes) if (!pane.tinted.characters.length) pane.root.remove();
    $("summary").textContent = "";
    document.dispatchEvent(new CustomEvent("failure", { detail: failure }));
  }
}

// -- constraints, checked as they are typed --

const check = later(350, async (signal) => {
  const note = $("constraint-note"), body = fields();
  note.className = "note";
  if (!isConstrained() || (!body.regex && !body.choice?.length)) { note.textContent = ""; return; }
  try {
    const answer = await json("generate", { ...body, n: 1, max_tokens: Math.min(body.max_tokens, 400) }, signal);
    note.textContent = `For example: ${answer.choices[0].text}`;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    note.className = error.status === 400 ? "error" : "note";
    note.textContent = error.sentence;
  }
});

export function refresh() {
  for (const output of form.querySelectorAll("output")) output.value = $(output.htmlFor.value).value;
  $("regex-field").hidden = $("constraint").value !== "regex";
  $("choice-field").hidden = $("constraint").value !== "choice";
  if (isConstrained()) $("more-constraint").open = true;
  view();
}

function view() {
  $("legend").hidden = !$("certainty").checked;
  for (const pane of panes) pane.tinted.root.classList.toggle("plain", !$("certainty").checked);
}

export function useModel({ limits, model }, isFirst) {
  $("max_tokens").max = limits.max_tokens;
  $("top_k").max = [...model.vocabulary].length;
  if (isFirst && !$("prompt").value && [..."ROMEO:\n"].every((c) => model.vocabulary.includes(c))) $("prompt").value = "ROMEO:\n";
}

form.addEventListener("submit", (event) => { event.preventDefault(); run(); });
form.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); } });
form.addEventListener("input", ({ target }) => {
  refresh();
  if (["regex", "choice", "constraint", "prompt"].includes(target.id)) check();
});
$("certainty").addEventListener("change", view);
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && $("peek").hidden) running?.abort(); });
export const seedOfLast = () => lastSeed;
export const checkConstraint = check;
