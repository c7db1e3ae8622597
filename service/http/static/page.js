// What the views share: tabs, the model, the status corner, links that restore everything.

import { Failure, call, chosen, json, setKey } from "./api.js";
import { $, h, later, number, on, sum } from "./text.js";
import * as attending from "./attend.js";
import * as reading from "./read.js";
import * as writing from "./write.js";

const POLL_SECONDS = 2.5;
const VIEWS = ["write", "read", "attend"];
const SHARED = [...document.querySelectorAll("main [name]")];
const defaults = new Map(SHARED.map((element) => [element.name, valueOf(element)]));
let view = "write", info = null, isGone = false, isLoading = false, model = null;
const known = new Set(); // checkpoints whose facts were asked for

// -- views --

function open(name, focus = false) {
  view = name;
  for (const it of VIEWS) {
    const tab = $(`tab-${it}`), is = it === name;
    tab.ariaSelected = String(is);
    tab.tabIndex = is ? 0 : -1;
    $(it).hidden = !is;
    if (is && focus) tab.focus();
  }
  begin();
}

function begin() {
  if (!info) return;
  if (view === "read") reading.read();
  if (view === "attend" && info.limits.max_attention_characters) attending.attend();
}

for (const name of VIEWS) on($(`tab-${name}`), "click", () => open(name));
on(document.querySelector("[role=tablist]"), "keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (by) open(VIEWS[(VIEWS.indexOf(view) + by + VIEWS.length) % VIEWS.length], true);
});

// -- links --

function valueOf(element) { return element.type === "checkbox" ? String(element.checked) : element.value; }

function link() {
  const state = new URLSearchParams();
  if (view !== "write") state.set("view", view);
  if (info && info.models.length > 1) state.set("model", info.model.name);
  for (const element of SHARED) if (element.name === "prompt" || valueOf(element) !== defaults.get(element.name)) state.set(element.name, valueOf(element));
  if (!state.has("seed") && writing.lastSeed !== null) state.set("seed", writing.lastSeed);
  return `${location.origin}${location.pathname}#${state}`;
}

function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  if (!state.has("prompt")) return false;
  for (const element of SHARED) {
    const value = state.get(element.name) ?? defaults.get(element.name);
    if (element.type === "checkbox") element.checked = value === "true";
    else element.value = value;
  }
  for (const details of document.querySelectorAll("details.more")) {
    if ([...details.querySelectorAll("[name]")].some((it) => state.has(it.name))) details.open = true;
  }
  model = state.get("model");
  writing.refresh();
  open(VIEWS.includes(state.get("view")) ? state.get("view") : "write");
  return true;
}

async function copy(text, button) {
  const before = button.textContent;
  try { await navigator.clipboard.writeText(text); } catch {
    // Without HTTPS there is no clipboard: the text is shown, selected, to be copied by hand.
    const area = h("textarea", { value: text, readOnly: true, rows: 4, ariaLabel: before });
    button.closest(".sheet").querySelector(".bar").after(area);
    area.select();
    on(area, "blur", () => area.remove());
    return;
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1500);
}

on($("copy-list"), "click", ({ target }) => copy(writing.listed(), target));
on($("copy-curl"), "click", ({ target }) => copy(writing.curl(), target));
on($("copy-python"), "click", ({ target }) => copy(writing.python(), target));
on($("share"), "click", ({ target }) => { history.replaceState(null, "", link()); copy(location.href, target); });
on(window, "hashchange", async () => {
  if (restore()) { await load(); replay(); } else if (!location.hash) location.reload(); // back from a link
});
const replay = () => { if (view === "write" && $("seed").value && $("max_tokens").valueAsNumber <= 4096) writing.run(); };

// -- status --

const facts = { model: [], now: [] };

function show() {
  $("facts").replaceChildren(...[...facts.now, ...facts.model].flatMap(([name, value]) => [h("dt", { textContent: name }), h("dd", { textContent: value })]));
}

async function load() {
  isLoading = true;
  try {
    if (model === null) { // the default is the first
      const served = (await json("v1/models")).data;
      if (served.length > 1) model = served[0].id;
    }
    const found = await json(`info${model ? `?model=${encodeURIComponent(model)}` : ""}`);
    const name = found.models.length > 1 ? found.model.name : undefined; // the only one needs none
    const { example_prompt: begins, records, training: { data: text } } = found.model;
    // What Read and Attend begin with: the page's Shakespeare, or else a text of this model's own.
    const body = { model: name, prompt: begins, max_tokens: Math.min(100, found.limits.max_tokens), seed: 7 };
    found.model.example = text?.name === "tinyshakespeare.txt" && !records ? null : begins + (await json("generate", body)).choices[0].text;
    info = found;
    chosen.model = name;
    known.add(info.model.checkpoint_sha256);
  } catch (error) {
    if (Failure.of(error).param !== "model" || model === null) {
      if (info) { // what it shows stays
        model = chosen.model ?? null;
        $("model").value = info.model.name;
        if (!error.isGone) banner(error.sentence);
      }
      return trouble(error);
    }
    const gone = model;
    model = null;
    await load();
    return banner(`The model ${gone} is not served any more; this is the default one.`);
  } finally { isLoading = false; }
  heal();
  const { config, training, checkpoint_sha256: hash, name, vocabulary } = info.model, { losses = {}, data = {}, parameters } = training;
  $("name").textContent = document.title = name;
  $("model").hidden = info.models.length < 2;
  $("model").replaceChildren(...info.models.map((it) => h("option", { textContent: it, selected: it === name })));
  const loss = (key) => (typeof losses[key] === "number" ? `${losses[key].toFixed(3)} nats · ${(losses[key] / Math.LN2).toFixed(2)} bits` : null);
  facts.model = [
    ["parameters", parameters && number(parameters)],
    ["network", `${config.n_layer} layers of ${config.n_head} heads, sees ${config.block_size} characters`],
    ["vocabulary", `${number([...vocabulary].length)} characters`],
    ["learned from", data.name && `${data.name}, ${data.records ? `${number(data.records)} records` : `${number(data.characters)} characters`}`],
    ["validation loss", (training.recipe?.mixed && loss("mixed")) || loss("whole")],
    ["… of the network alone", training.recipe?.mixed && loss("streamed")],
    ["loss by counting pairs", loss("bigram")], // of runs before kneser_ney
    ["loss by counting", loss("kneser_ney")],
    ["checkpoint", hash.slice(0, 16)],
    ["runs on", `${info.backend}, ${info.dtype}, ${info.devices.join(", ")}`],
  ].filter(([, value]) => value);
  for (const part of [writing, reading, attending]) part.useModel(info, Boolean(location.hash) && part === writing);
  show();
  begin();
}

const samples = (text, name) => [...text.matchAll(new RegExp(`^${name}\\{[^\\n]*\\} (\\S+)$`, "gm"))].map((found) => Number(found[1]));
let before = null;

async function poll() {
  try {
    if (!document.hidden) {
      const text = await (await call("metrics")).text(), now = performance.now();
      const [running, waiting, written] = ["num_requests_running", "num_requests_waiting", "generation_tokens_total"].map((name) => sum(samples(text, `chargpt_${name}`)));
      const rate = before && now > before.now ? Math.max(0, (1000 * (written - before.written)) / (now - before.now)) : 0;
      before = { now, written };
      facts.now = [["running", number(running)], ["waiting", number(waiting)], ["characters per second", number(Math.round(rate))]];
      $("pulse").textContent = running || rate >= 1 ? `${number(running)} running · ${number(Math.round(rate))} chars/s` : `ready · ${info?.backend ?? ""}`;
      $("dot").className = "dot ready";
      if (isGone) { // maybe with another model
        heal();
        await load();
        if ($("banner").hidden) banner("The server is back.", true);
      } else if (!info) await load(); // it was too busy
      show();
    }
  } catch (error) {
    trouble(Failure.of(error));
  }
  setTimeout(poll, 1000 * POLL_SECONDS);
}

function trouble(failure) {
  $("dot").className = failure.isGone ? "dot gone" : "dot";
  if (failure.isGone) {
    isGone = true;
    $("pulse").textContent = "no answer";
    banner(failure.sentence);
  } else if (failure.status === 401) {
    $("pulse").textContent = "key needed";
    if (!info) banner(failure.sentence);
  } else if (failure.status === 503) $("pulse").textContent = "not ready";
}

function heal() {
  isGone = false;
  $("banner").hidden = true;
}

function banner(text, isGood = false) {
  $("banner").textContent = text;
  $("banner").classList.toggle("good", isGood);
  $("banner").hidden = false;
  if (isGood) setTimeout(() => { if (!isGone) $("banner").hidden = true; }, 6000);
}

on(document, "failure", ({ detail }) => trouble(detail));
on(document, "answered", async ({ detail: checkpoint }) => {
  if (!info || isLoading || !checkpoint || known.has(checkpoint)) return;
  await load();
  if ($("banner").hidden) banner("The model was replaced by a newer one.", true);
});
on($("key"), "input", later(400, async () => { setKey($("key").value); await load(); }));
on($("model"), "change", async () => {
  model = $("model").value;
  await load();
  if (view === "write" && $("prompt").value === info?.model.example_prompt) writing.begin(); // its example
});
on(document, "pointerdown", ({ target }) => { if (!$("status").contains(target)) $("status").open = false; });
on($("status"), "keydown", (event) => { if (event.key === "Escape") { $("status").open = false; $("status").firstElementChild.focus(); } });

$("key").value = ""; // a browser may have kept it
const isRestored = restore();
writing.refresh();
await load();
if (isRestored && info) { writing.check(); replay(); } else if (info) writing.begin(); // an example
poll();
