// Read: how well the model expected each character of any text.

import { Failure, json } from "./api.js";
import { $, Editor, Tinted, h, items, later, on, percent, shown } from "./text.js";

const MAX_WITH_ALTERNATIVES = 3000;
const ALIKE = 0.03; // of a loss
let alternatives = 8, losses = {}, heldBack = "text";
const editor = new Editor($("text"), $("read-error")), tinted = new Tinted("Text, by surprise");
$("read-text").append(tinted.root);
const legend = $("legend").cloneNode(true);
legend.removeAttribute("id");
$("read-text").previousElementSibling.append(legend);

async function score(signal) {
  const text = $("text").value, length = [...text].length;
  if (length < 2) { tinted.clear(); $("read-numbers").replaceChildren(); $("read-verdict").textContent = ""; $("read-note").textContent = "Type at least two characters."; editor.fail(null); return; }
  const withOthers = length <= MAX_WITH_ALTERNATIVES;
  try {
    const [scored, echoed] = await Promise.all([
      json("v1/score", { texts: text, unknown_characters: "refuse" }, signal),
      withOthers ? json("generate", { prompt: text, max_tokens: 0, echo: true, logprobs: alternatives, unknown_characters: "refuse" }, signal) : null,
    ]);
    editor.fail(null);
    const { nats, characters, bits_per_character: bits, perplexity, character_nats: each } = scored.data[0];
    const usual = Object.fromEntries(Object.entries(losses).map(([name, loss]) => [name, loss / Math.LN2]));
    const tops = echoed?.choices[0].logprobs.top_logprobs;
    tinted.clear();
    tinted.append(items(text, { token_logprobs: each.map((it) => (it === null ? null : -it)), top_logprobs: tops ?? [] }));
    $("read-numbers").replaceChildren(
      ...row("Bits per character", bits.toFixed(2), "big"),
      ...["whole", "bigram", "kneser_ney"].flatMap((name) => (name in usual ? row(yardstick(name), usual[name].toFixed(2)) : [])),
      ...row("Total", `${(nats / Math.LN2).toFixed(0)} bits for ${characters} characters`),
      ...row("Like a choice among", `${perplexity.toFixed(1)} characters each time`));
    $("read-verdict").textContent = verdict(bits, usual);
    const worst = Math.max(...each), at = each.indexOf(worst), c = [...text][at];
    $("read-note").textContent = `Least expected: ${c === undefined ? "the end" : `“${shown(c)}”`} ${at ? `after “${[...text].slice(Math.max(0, at - 12), at).map(shown).join("")}”` : "at the beginning"}, ${percent(Math.exp(-worst))}.`;
  } catch (error) { editor.fail(Failure.of(error)); }
}

const yardstick = (name) => ({ whole: `Validation ${heldBack}`, bigram: "… by counting pairs", kneser_ney: "… by counting" })[name];

function verdict(bits, { whole, bigram, kneser_ney: counts = bigram }) {
  if (whole === undefined) return "";
  const than = bits < (1 - ALIKE) * whole ? "less than" : bits > (1 + ALIKE) * whole ? "more than" : "about as much as";
  const counted = bits > counts ? ` ${counts === bigram ? "Counting pairs of characters" : "Counting"} predicts the validation ${heldBack} better than the model predicts this one.` : "";
  return `This text surprises the model ${than} its validation ${heldBack}, which it never learned from.${counted}`;
}

const row = (name, value, className = "") => [h("dt", { textContent: name }), h("dd", { textContent: value, className })];

export const read = later(300, score);
on($("text"), "input", read);

export function useModel({ model }, isLinked) {
  losses = Object.fromEntries(Object.entries(model.training.losses ?? {}).filter(([, loss]) => typeof loss === "number"));
  if (model.training.recipe?.mixed && losses.mixed) losses.whole = losses.mixed; // the service means the mixture
  heldBack = model.records ? "records" : "text";
  alternatives = Math.min(8, [...model.vocabulary].length);
  if (!isLinked) editor.suggest(model.example ?? "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\nThe slings and arrows of outrageous fortune.\n");
}
