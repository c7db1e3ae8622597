// Read: how well the model expected each character of any text.

import { Failure, json } from "./api.js";
import { $, Editor, Tinted, h, items, later, on, percent, shown } from "./text.js";

const MAX_WITH_ALTERNATIVES = 3000;
let alternatives = 8;
const editor = new Editor($("text"), $("read-error")), tinted = new Tinted("Text, by surprise");
$("read-text").append(tinted.root);
const legend = $("legend").cloneNode(true);
legend.removeAttribute("id");
$("read-text").previousElementSibling.append(legend);

async function score(signal) {
  const text = $("text").value, length = [...text].length;
  if (length < 2) { tinted.clear(); $("read-numbers").replaceChildren(); $("read-note").textContent = "Type at least two characters."; editor.fail(null); return; }
  const withOthers = length <= MAX_WITH_ALTERNATIVES;
  try {
    const [scored, echoed] = await Promise.all([
      json("v1/score", { texts: text, unknown_characters: "refuse" }, signal),
      withOthers ? json("generate", { prompt: text, max_tokens: 0, echo: true, logprobs: alternatives, unknown_characters: "refuse" }, signal) : null,
    ]);
    editor.fail(null);
    const { nats, characters, bits_per_character: bits, perplexity, character_nats: each } = scored.data[0];
    const tops = echoed?.choices[0].logprobs.top_logprobs;
    tinted.clear();
    tinted.append(items(text, { token_logprobs: each.map((it) => (it === null ? null : -it)), top_logprobs: tops ?? [] }));
    $("read-numbers").replaceChildren(
      ...row("Bits per character", bits.toFixed(2), "big"), ...row("In all", `${(nats / Math.LN2).toFixed(0)} bits for ${characters} characters`),
      ...row("As if choosing among", `${perplexity.toFixed(1)} characters each time`));
    const worst = Math.max(...each), at = each.indexOf(worst), c = [...text][at] ?? "\n"; // which ends a record
    $("read-note").textContent = `Least expected: “${shown(c)}” after “${[...text].slice(Math.max(0, at - 12), at).map(shown).join("")}”, ${percent(Math.exp(-worst))}.`;
  } catch (error) { editor.fail(Failure.of(error)); }
}

const row = (name, value, className = "") => [h("dt", { textContent: name }), h("dd", { textContent: value, className })];

export const read = later(300, score);
on($("text"), "input", read);

export function useModel({ model }, isLinked) {
  alternatives = Math.min(8, [...model.vocabulary].length);
  if (!isLinked) editor.suggest(model.example ?? "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\nThe slings and arrows of outrageous fortune.\n");
}
