// Texts whose characters are tinted by their probability, and the small window with what else could have come.

export const $ = (id) => document.getElementById(id);
export const on = (target, kinds, work, capture) => { for (const kind of kinds.split(" ")) target.addEventListener(kind, work, capture); };

export function h(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function pressed(content, work, className = "") {
  const button = h("button", { type: "button", className }, content);
  on(button, "click", work);
  return button;
}

export const number = (x) => x.toLocaleString("en", { maximumFractionDigits: x < 100 ? 1 : 0 });
export const sum = (xs) => xs.reduce((a, b) => a + b, 0);
// Characters without a shape of their own: controls have signs in Unicode, the rest are written as numbers.
const code = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
export const shown = (c) => ({ "\n": "↵", " ": "␣", "\t": "⇥", "\x7f": "␡" })[c]
  ?? (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : /^[\p{C}\p{Z}\p{M}\p{Default_Ignorable_Code_Point}]$/u.test(c) ? code(c) : c);
export const percent = (p) => `${p < 0.001 ? "<\u00a00.1" : (100 * p).toFixed(p < 0.0995 ? 1 : 0)}\u00a0%`;
const NAMES = { "\n": "line break", "\r": "carriage return", " ": "space", "\t": "tab", "\x1e": "record separator", "\ufffd": "any other character" };
export const named = (c) => NAMES[c] ?? (shown(c) === c ? c : code(c));
const level = (p) => [0.5, 0.25, 0.1, 0.04, 0.012].filter((bound) => p < bound).length;

const MAX_TINTED = 6000; // later characters are plain: a page of many thousand elements is slow
const peek = $("peek");
let owner = null; // the text whose alternatives are shown
let timer = 0;

function hide() {
  clearTimeout(timer);
  owner?.unmark();
  owner = null;
  peek.hidden = true;
}
const hideSoon = () => { clearTimeout(timer); timer = setTimeout(hide, 260); };

on(peek, "pointerenter", () => clearTimeout(timer));
on(peek, "pointerleave", hideSoon);
on(peek, "keydown", (event) => {
  const buttons = [...peek.querySelectorAll("button")], at = buttons.indexOf(document.activeElement);
  if (event.key === "Escape") { owner?.root.focus(); hide(); }
  else if (event.key === "ArrowDown") buttons[(at + 1) % buttons.length]?.focus();
  else if (event.key === "ArrowUp") buttons[(at - 1 + buttons.length) % buttons.length]?.focus();
  else return;
  event.preventDefault();
});
on(document, "pointerdown", (event) => { if (!peek.contains(event.target) && !owner?.root.contains(event.target)) hide(); });
on(document, "scroll", () => owner?.place(), true);

export class Tinted {
  // onBranch(index, character, logprob): a choice of another character; null: there are none to choose.
  constructor(label, onBranch = null) {
    this.root = h("div", { className: "written", tabIndex: 0, role: "group", ariaLabel: label });
    this.onBranch = onBranch;
    this.cursor = -1;
    this.clear();
    on(this.root, "pointerover click", ({ target, type, pointerType }) => {
      if (target.at === undefined || (type === "pointerover" && pointerType !== "mouse")) return;
      clearTimeout(timer);
      timer = setTimeout(() => this.show(target.at), type === "click" ? 0 : owner ? 30 : 90);
    });
    on(this.root, "pointerleave", hideSoon);
    on(this.root, "keydown", (event) => this.key(event));
    on(this.root, "blur", () => setTimeout(() => { if (owner === this && !peek.contains(document.activeElement) && !peek.matches(":hover")) hide(); }));
  }

  clear(said = "") {
    if (owner === this) hide();
    this.said = said;
    this.characters = [];
    this.spans = [];
    this.tail = null;
    this.root.replaceChildren(...(said ? [h("span", { className: "said", textContent: said })] : []));
  }

  get text() { return this.characters.map((it) => it.c).join(""); }

  // logprob null: unknown; top: {character: logprob} of the likeliest
  append(items) {
    const some = document.createDocumentFragment();
    for (const item of items) {
      const { c, logprob, className = "" } = item;
      this.characters.push(item);
      if (this.spans.length >= MAX_TINTED) {
        if (!this.tail) some.append(this.tail = h("span"));
        this.tail.append(c);
        continue;
      }
      const tint = `s${logprob === null ? 0 : level(Math.exp(logprob))}`;
      const span = h("span", { className: `${tint}${c === "\n" ? " nl" : ""} ${className}`.trim(), textContent: c });
      span.dataset.c = "";
      span.at = this.spans.length;
      this.spans.push(span);
      some.append(span);
    }
    this.root.append(some);
  }

  unmark() { this.spans[this.cursor]?.classList.remove("here"); }

  describe({ c, logprob, top }) {
    const none = top === undefined ? "written without certainty" : "the first character has no prediction";
    const head = logprob === null ? none : `${percent(Math.exp(logprob))} · ${(-logprob / Math.LN2).toFixed(1)} bits`;
    return { c, head, others: Object.entries(top ?? {}).sort((a, b) => b[1] - a[1]) };
  }

  show(at) {
    this.unmark();
    owner = this;
    this.cursor = at;
    const span = this.spans[at], { head, others, c } = this.describe(this.characters[at]);
    span.classList.add("here");
    const rows = others.map(([other, logprob]) => {
      const bar = h("progress", { max: 1, value: Math.exp(logprob), ariaHidden: "true" });
      const parts = [bar, h("span", { textContent: shown(other) }), h("span", { textContent: percent(Math.exp(logprob)) })];
      if (!this.onBranch) return h("div", { className: other === c ? "row is" : "row" }, ...parts);
      const button = h("button", { type: "button", className: other === c ? "is" : "", ariaLabel: `${named(other)}, ${percent(Math.exp(logprob))}: branch from here` }, ...parts);
      on(button, "click", () => { hide(); this.root.focus({ preventScroll: true }); this.onBranch(at, other, logprob, this.characters[at].top); });
      return button;
    });
    const note = this.onBranch && rows.length ? [h("p", { className: "note", textContent: "The model's probabilities, before temperature and other settings." })] : [];
    peek.replaceChildren(h("p", {}, h("b", { textContent: shown(c) }), ` ${head}`), ...rows, ...note);
    peek.hidden = false;
    this.place();
  }

  place() {
    const span = this.spans[this.cursor];
    const box = span.getBoundingClientRect(), own = peek.getBoundingClientRect();
    const below = box.bottom + 6 + own.height < innerHeight || box.top < own.height;
    peek.style.left = `${Math.max(8, Math.min(innerWidth - own.width - 8, box.left - 20))}px`;
    peek.style.top = `${below ? box.bottom + 6 : box.top - own.height - 6}px`;
  }

  key(event) {
    const last = this.spans.length - 1, at = this.cursor;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last, ArrowDown: at + 20, ArrowUp: at - 20 }[event.key];
    if (to !== undefined && last >= 0) {
      const next = Math.max(0, Math.min(last, at < 0 ? 0 : to));
      this.spans[next].scrollIntoView({ block: "nearest" });
      this.show(next);
      const { head, others, c } = this.describe(this.characters[next]);
      $("said").textContent = `${named(c)}, ${head}. ${others.slice(0, 3).map(([o, p]) => `${named(o)} ${percent(Math.exp(p))}`).join(", ")}`;
    } else if (event.key === "Enter" && owner === this) peek.querySelector("button")?.focus();
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  }
}

// The pieces of an answer's `logprobs`, or of its text alone.
export function items(text, logprobs) {
  return [...text].map((c, i) => ({ c, logprob: logprobs?.token_logprobs[i] ?? null, top: logprobs && (logprobs.top_logprobs[i] ?? null) }));
}

// A text area over a copy of its text, in which single characters can be marked, and the place for its errors.
export class Editor {
  constructor(area, error) {
    this.area = area;
    this.error = error;
    this.copy = area.previousElementSibling;
    on(area, "input", () => this.mark([]));
    on(area, "scroll", () => { this.copy.scrollTop = area.scrollTop; });
  }

  fail(failure) {
    const isOurs = failure?.code === "unknown_character" && ["prompt", "text", "texts"].includes(failure.param);
    this.mark(isOurs ? failure.offsets : []);
    this.error.textContent = failure?.sentence ?? "";
    if (failure) document.dispatchEvent(new CustomEvent("failure", { detail: failure }));
  }

  suggest(text) {
    // Unless something else was typed.
    const { area } = this;
    if (area.value && area.value !== this.suggested) return;
    const fits = area.maxLength < 0 ? text : text.slice(0, area.maxLength);
    area.value = fits.isWellFormed?.() === false ? fits.slice(0, -1) : fits; // not half a character
    this.suggested = area.value; // with line breaks as it has them
  }

  set(text) {
    // In place of what is there: of a suggestion it makes another one.
    const { area } = this, isSuggested = area.value === this.suggested;
    area.value = text;
    if (isSuggested) this.suggested = area.value;
    area.scrollTop = area.scrollHeight;
    this.mark([]);
  }

  mark(offsets) {
    const bad = new Set(offsets);
    this.copy.replaceChildren(...(bad.size ? [...this.area.value].map((c, i) => (bad.has(i) ? h("mark", { textContent: c }) : c)) : []));
    this.copy.scrollTop = this.area.scrollTop;
    this.area.ariaInvalid = String(bad.size > 0);
  }
}

export function later(milliseconds, work) {
  // Calls `work` once nothing has asked for it for a while; the signal aborts what the call before has begun.
  let wait = 0, controller = null;
  return () => {
    clearTimeout(wait);
    controller?.abort();
    wait = setTimeout(async () => {
      controller = new AbortController();
      try { await work(controller.signal); } catch (error) { if (error.name !== "AbortError") throw error; }
    }, milliseconds);
  };
}
