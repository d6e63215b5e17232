// All parameters of a request: what they are called in each API, their fields in the page, and how these are read.

import { literal } from "./code.js";

const STREAMED = "only without streaming";

// native and chat: the names in TGI's API and in OpenAI's; without one, the API does not have it.
// unset: what an empty field means, shown in it; where chat differs, `unsetInChat`.
const GROUPS = [
  ["Model", [
    { native: "adapter_id", chat: "model", label: "Adapter", kind: "name", unset: "none", isOffered: false },
  ]],
  ["Length", [
    { native: "max_new_tokens", chat: "max_tokens", label: "Max new tokens", kind: "integer", min: 1, value: "128", unset: "as many as fit" },
    { native: "min_tokens", chat: "min_tokens", label: "Min tokens", kind: "integer", min: 0, unset: "0" },
    { native: "truncate", label: "Truncate prompt to", kind: "integer", min: 1, unset: "off", unit: "tokens" },
    { native: "stop", chat: "stop", label: "Stop sequences", kind: "lines", unset: "one a line" },
    { native: "stop_token_ids", chat: "stop_token_ids", label: "Stop token ids", kind: "integers", unset: "2, 50256" },
    { native: "speculate", chat: "speculate", label: "Guesses in a step", kind: "integer", min: 0, unset: "as the server" },
    { native: "ignore_eos", chat: "ignore_eos", label: "Ignore end tokens", kind: "switch" },
  ]],
  ["Sampling", [
    { native: "do_sample", label: "Sample", kind: "switch", title: "Draw tokens at random even where none of these is set" },
    { native: "temperature", chat: "temperature", label: "Temperature", kind: "number", min: 0, step: 0.1, unset: "off", unsetInChat: "1" },
    { native: "top_k", chat: "top_k", label: "Top-k", kind: "integer", min: 1, unset: "off" },
    { native: "top_p", chat: "top_p", label: "Top-p", kind: "number", min: 0, max: 1, step: 0.05, unset: "off" },
    { native: "min_p", chat: "min_p", label: "Min-p", kind: "number", min: 0, max: 1, step: 0.05, unset: "off" },
    { native: "typical_p", label: "Typical-p", kind: "number", min: 0, max: 1, step: 0.05, unset: "off" },
    { native: "seed", chat: "seed", label: "Seed", kind: "integer", min: 0, unset: "a new one" },
    { native: "best_of", label: "Best of", kind: "integer", min: 1, unset: "1", note: STREAMED },
  ]],
  ["Penalties", [
    { native: "repetition_penalty", chat: "repetition_penalty", label: "Repetition", kind: "number", min: 0, step: 0.05, unset: "off" },
    { native: "frequency_penalty", chat: "frequency_penalty", label: "Frequency", kind: "number", min: -2, max: 2, step: 0.1, unset: "off" },
    { native: "presence_penalty", chat: "presence_penalty", label: "Presence", kind: "number", min: -2, max: 2, step: 0.1, unset: "off" },
    { native: "logit_bias", chat: "logit_bias", label: "Logit bias", kind: "biases", unset: "token id: bias, one a line" },
    { native: "bad_words", label: "Bad words", kind: "lines", unset: "one a line" },
    { native: "watermark", label: "Watermark", kind: "switch" },
  ]],
  ["Details", [
    { native: "top_n_tokens", chat: "top_logprobs", label: "Alternatives", kind: "integer", min: 0, max: 5, value: "5", unset: "0" },
    { native: "decoder_input_details", label: "Prompt probabilities", kind: "switch", note: STREAMED },
  ]],
  ["Grammar", [
    { native: "grammar", chat: "response_format", label: "Text must be", kind: "grammar" },
  ]],
];

const GRAMMARS = {
  "": { label: "anything" },
  json: { label: "JSON", hint: 'A JSON schema, such as {"type": "object"}' },
  regex: { label: "a regex match", hint: "A regular expression, such as \\d{4}-\\d\\d" },
  lark: { label: "in a language", hint: 'A Lark grammar, such as start: "yes" | "no"' },
};

/** Fields for all parameters inside `form`. */
export class Parameters {
  constructor(form) {
    this.fields = [];
    this.groups = [];
    for (const [name, specs] of GROUPS) {
      const group = document.createElement("fieldset");
      const legend = document.createElement("legend");
      legend.textContent = name;
      group.append(legend, ...specs.map((spec) => this.#add(spec)));
      form.append(group);
      this.groups.push({ group, specs });
    }
  }

  #add(spec) {
    const row = document.createElement("div");
    row.className = `field ${spec.kind}`;
    const label = document.createElement("label");
    const input = document.createElement({ lines: "textarea", biases: "textarea", grammar: "select" }[spec.kind] ?? "input");
    input.id = `parameter-${spec.native}`;
    label.htmlFor = input.id;
    label.textContent = spec.label;
    if (spec.title) label.title = spec.title;
    if (input.localName === "textarea") input.rows = 2;
    else if (input.localName === "input") input.type = spec.kind === "switch" ? "checkbox" : "text";
    if (["integer", "number"].includes(spec.kind)) input.inputMode = spec.min < 0 ? "text" : "decimal";
    input.autocomplete = "off";
    input.spellcheck = false;
    row.append(label, input);
    const field = { spec, row, input };
    if (spec.kind === "grammar") row.append((field.text = grammarText(input)));
    if (spec.kind === "name") row.append((field.names = namesFor(input)));
    if (spec.note) {
      field.note = document.createElement("small");
      field.note.id = `${input.id}-note`;
      field.note.textContent = spec.note;
      label.append(" ", field.note);
    }
    this.fields.push(field);
    input.addEventListener("input", () => input.removeAttribute("aria-invalid"));
    input.addEventListener("keydown", (event) => step(event, spec, input));
    this.#fill(field);
    return row;
  }

  #fill({ spec, input, text }) {
    if (text) text.hidden = true;
    if (spec.kind === "switch") input.checked = false;
    else input.value = spec.value ?? "";
    input.removeAttribute("aria-invalid");
  }

  /** Back to how the page begins. */
  reset() {
    for (const field of this.fields) this.#fill(field);
  }

  /** Show what this API has, streaming or not. */
  show({ isChat, isStream }) {
    for (const { spec, row, input, note } of this.fields) {
      row.hidden = (isChat && !spec.chat) || spec.isOffered === false;
      input.disabled = row.hidden || (Boolean(note) && isStream);
      row.classList.toggle("off", input.disabled);
      if (spec.unset) input.placeholder = (isChat && spec.unsetInChat) || spec.unset;
    }
    for (const { group, specs } of this.groups) group.hidden = specs.every(({ isOffered }) => isOffered === false);
  }

  /** The most alternatives that the server gives with a token. */
  limitAlternatives(most) {
    const field = this.fields.find(({ spec }) => spec.native === "top_n_tokens");
    field.spec.max = most;
    field.spec.value = String(Math.min(5, most));
    if (Number(field.input.value) > most) field.input.value = field.spec.value;
  }

  /** Let one of these adapters be named, or another: the server may find more. */
  offerAdapters(names) {
    const field = this.fields.find(({ spec }) => spec.native === "adapter_id");
    field.spec.isOffered = true;
    field.names.replaceChildren(...names.map((name) => new Option(name, name)));
  }

  /** The parameters that are set, by the names of this API. Throws an Error with a sentence, at the field it is about. */
  read(isChat) {
    const found = {};
    for (const { spec, input, text } of this.fields) {
      const name = isChat ? spec.chat : spec.native;
      if (!name || input.disabled) continue;
      try {
        let value;
        if (spec.kind === "switch") value = input.checked || undefined;
        else if (spec.kind === "grammar") value = grammarOf(input.value, text.value, isChat);
        else value = READERS[spec.kind](input.value, spec);
        if (value !== undefined) found[name] = value;
      } catch (error) {
        const wrong = text ?? input;
        wrong.setAttribute("aria-invalid", "true");
        wrong.closest("details")?.setAttribute("open", "");
        wrong.focus();
        throw error;
      }
    }
    return found;
  }
}

/** Names that a field proposes. */
function namesFor(input) {
  const names = document.createElement("datalist");
  names.id = `${input.id}-names`;
  input.setAttribute("list", names.id);
  return names;
}

/** Where the grammar of the kind that `choice` says is written. */
function grammarText(choice) {
  for (const [value, { label }] of Object.entries(GRAMMARS)) choice.append(new Option(label, value));
  const text = document.createElement("textarea");
  text.rows = 4;
  text.id = `${choice.id}-text`;
  text.spellcheck = false;
  text.setAttribute("aria-label", "Grammar");
  text.addEventListener("input", () => text.removeAttribute("aria-invalid"));
  choice.addEventListener("input", () => {
    text.hidden = !choice.value;
    text.placeholder = GRAMMARS[choice.value].hint ?? "";
  });
  return text;
}

/** A grammar in TGI's words or, for a schema of a chat, in OpenAI's. */
function grammarOf(kind, text, isChat) {
  if (!kind) return undefined;
  if (!text.trim()) throw new Error(`Write the grammar first: ${GRAMMARS[kind].hint}.`);
  if (kind !== "json") return { type: kind, value: text };
  let schema;
  try {
    schema = JSON.parse(text);
  } catch {
    throw new Error("The schema is no JSON: check its quotes, commas and brackets.");
  }
  return isChat ? { type: "json_schema", json_schema: { name: "answer", schema } } : { type: "json", value: schema };
}

/** Arrow keys change a number, as in a number field; those fields would not let 64-bit seeds or half-typed text be read. */
function step(event, spec, input) {
  const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!way || !["integer", "number"].includes(spec.kind) || input.value.length > 15) return;
  event.preventDefault();
  const by = spec.step ?? 1;
  const from = input.value.trim() === "" ? (spec.min > 0 && way > 0 ? spec.min - by : Math.max(spec.min, 0)) : Number(input.value);
  const to = Math.min(spec.max ?? Infinity, Math.max(spec.min, from + way * by));
  if (Number.isFinite(to)) input.value = String(Number(to.toFixed(4)));
  input.dispatchEvent(new Event("input"));
}

const READERS = {
  name(text) {
    return text.trim() || undefined;
  },
  integer(text, spec) {
    const given = text.trim();
    if (!given) return undefined;
    if (!/^-?\d{1,20}$/.test(given)) throw new Error(`${spec.label} is a whole number, not ${shown(given)}.`);
    return Number.isSafeInteger(Number(given)) ? Number(given) : BigInt(given); // a seed has 64 bits
  },
  number(text, spec) {
    const given = text.trim();
    if (!given) return undefined;
    const value = Number(given);
    if (!Number.isFinite(value)) throw new Error(`${spec.label} is a number, not ${shown(given)}.`);
    return value;
  },
  lines(text) {
    const lines = text.split("\n").filter((line) => line !== "");
    return lines.length ? lines.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t")) : undefined;
  },
  integers(text, spec) {
    const parts = text.split(/[\s,]+/).filter(Boolean);
    return parts.length ? parts.map((part) => READERS.integer(part, spec)) : undefined;
  },
  biases(text, spec) {
    const rows = text.split("\n").filter((line) => line.trim());
    if (!rows.length) return undefined;
    return Object.fromEntries(rows.map((row) => {
      const [, id, bias] = /^\s*(\d{1,10})\s*[:=\s]\s*(-?[\d.]+)\s*$/.exec(row) ?? [];
      if (id === undefined || !Number.isFinite(Number(bias))) {
        throw new Error(`${spec.label} has a line that is no token id and a bias, such as 42: -5; it is ${shown(row.trim())}.`);
      }
      return [id, Number(bias)];
    }));
  },
};

function shown(text) {
  return literal(text.length > 40 ? `${text.slice(0, 40)}…` : text);
}
