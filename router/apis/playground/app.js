// The playground: a completion or a chat with this server, and what happens in it meanwhile.
//
// Nothing here is built and nothing comes from elsewhere. Everything that the server says reaches the page as text.

import { TokenCard, TokenView } from "./answer.js";
import { curl, literal, python } from "./code.js";
import { LiveBatch } from "./live.js";
import { Parameters } from "./parameters.js";
import { ServerError, ask, ended, events, keep, key, messageIn, newRequestId, whyNoKey } from "./server.js";

const byId = (id) => document.getElementById(id);
const work = byId("work");
const prompt = byId("prompt");
const parameters = new Parameters(byId("fields"));
const card = new TokenCard(byId("card"));
const answer = new TokenView(byId("answer"), card);
const ownIds = new Set();
const live = new LiveBatch(ownIds, () => info ?? loadInfo());

let info = null; // what the server says of itself
let isLoadingInfo = false;
let running = null; // the AbortController of the request under way
let lastRequest = null;
let givesChatProbabilities = true; // until the server says that it does not
const conversation = []; // { role, content }
const drafts = { completion: prompt.value, chat: "" };

// --------------------------------------------------------------------------------------------------- one request

/** Ask for what the page says, show it as it comes, and end with a summary or one sentence about what went wrong. */
async function generate() {
  if (running) return;
  showError(null);
  const isChat = mode() === "chat";
  let asked;
  try {
    asked = isChat ? chatRequest() : completionRequest();
  } catch (error) {
    showError(error.message);
    return;
  }
  const run = new Run(isChat ? addMessage("assistant", "") : answer);
  running = run.controller;
  showRunning(true);
  try {
    await (isChat ? runChat(asked, run) : runCompletion(asked, run));
    if (!run.reason) throw new ServerError("The connection to the server was lost before the answer was complete.");
  } catch (error) {
    if (error.name === "AbortError") run.reason = "stopped";
    else showFailure(error, run);
  }
  run.end();
  running = null;
  showRunning(false);
  if (isChat) endMessage(run);
  byId("summary").textContent = run.summary();
  byId("summary").hidden = !run.summary();
  say(byId("error").hidden ? `Done. ${run.summary()}` : "");
}

/** One answer as it comes: where it is shown, and what is known of it. */
class Run {
  constructor(view) {
    this.view = view;
    this.controller = new AbortController();
    this.requestId = newRequestId();
    this.text = "";
    this.numTokens = 0;
    this.reason = "";
    this.facts = [];
    this.began = performance.now();
    this.first = 0;
    this.last = 0;
    this.numGuessed = 0;
    view.clear();
    view.element.setAttribute("aria-busy", "true");
    ownIds.add(this.requestId);
  }

  add(piece) {
    this.last = performance.now();
    this.first ||= this.last;
    this.numTokens += piece.tokens?.length || 1;
    this.numGuessed += piece.tokens?.filter(({ guessed }) => guessed).length ?? 0;
    this.text += piece.tokens?.every(({ special }) => special) && piece.tokens.length ? "" : piece.text;
    this.view.add(piece);
  }

  end() {
    this.view.flush();
    this.view.element.setAttribute("aria-busy", "false");
    ownIds.delete(this.requestId);
  }

  summary() {
    if (!this.first) return this.reason === "stopped" ? "Stopped before the first token" : "";
    const facts = [`${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`];
    const [seconds, count] = this.isStream
      ? [(this.last - this.first) / 1000, this.numTokens - 1]
      : [(this.last - this.began) / 1000, this.numTokens];
    if (seconds > 0 && count > 0) facts.push(`${(count / seconds).toFixed(1)} tokens/s`);
    if (this.numGuessed) facts.push(`${this.numGuessed} guessed ahead`);
    if (this.isStream) facts.push(`first token after ${Math.round(this.first - this.began)} ms`);
    const endings = { stopped: "stopped here", length: "ended by length", stop: "ended by the model or a stop sequence", eos_token: "ended by the model", stop_sequence: "ended by a stop sequence" };
    if (this.reason) facts.push(endings[this.reason] ?? `ended: ${this.reason}`);
    return [...facts, ...this.facts].join(" · ");
  }
}

async function send(path, body, run, isChat) {
  const isStream = byId("stream").checked;
  run.isStream = isStream;
  const url = new URL(path, document.baseURI).href;
  showCode({ url, body, isStream, isChat, hasKey: Boolean(key()) });
  return ask(path, { json: literal(body), signal: run.controller.signal, requestId: run.requestId });
}

// --------------------------------------------------------------------------------------------------- completion

function completionRequest() {
  return { inputs: prompt.value, parameters: { ...parameters.read(false), details: true } };
}

async function runCompletion(body, run) {
  byId("others").replaceChildren();
  const isStream = byId("stream").checked;
  const reply = await send(isStream ? "generate_stream" : "generate", body, run, false);
  if (!isStream) return showWhole(await whole(reply), run);
  for await (const data of events(reply)) {
    const event = parsed(data);
    const problem = messageIn(event);
    if (problem) throw new ServerError(ended(problem));
    run.add(nativePiece(event.token, event.top_tokens));
    if (event.details) noteDetails(event.details, data, run);
    if (typeof event.generated_text === "string") run.reason ||= "complete";
  }
}

function nativePiece(token, top) {
  const alternatives = Array.isArray(top)
    ? top.map(({ id, text, logprob }) => ({ id, text: String(text), logprob: logprob ?? -Infinity })) // JSON has no infinity
    : [];
  const { id, logprob, special, guessed } = token;
  const text = String(token.text);
  return { text, tokens: [{ id, text, logprob, special: special === true, guessed: guessed === true, alternatives }] };
}

function noteDetails(details, raw, run) {
  run.reason = String(details.finish_reason);
  if (details.input_length) run.facts.push(`prompt ${details.input_length} tokens`);
  // JSON.parse would round a 64-bit number; in a string its quotes would be escaped, so this is the field.
  const seed = /"seed":(\d+)/.exec(raw)?.[1];
  if (seed) run.facts.push(`seed ${seed}`);
}

function showWhole({ body, raw }, run) {
  const { details, generated_text: text } = body;
  if (!details) throw new ServerError("The server's answer has no details.");
  for (const token of details.prefill ?? []) {
    run.view.add({ ...nativePiece(token), isPrompt: true });
  }
  addAll(details, (piece) => run.add(piece));
  noteDetails(details, raw, run);
  run.text = String(text);
  for (const [at, other] of (details.best_of_sequences ?? []).entries()) showOther(other, at + 2);
}

function addAll({ tokens, top_tokens: tops }, add) {
  tokens.forEach((token, at) => add(nativePiece(token, tops?.[at])));
}

/** A sample of `best_of` that is not the likeliest. */
function showOther(sequence, number) {
  const box = made("div", "", "other");
  const text = made("div", "", "text");
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", `Sample ${number}`);
  box.append(made("h2", `Sample ${number}, less likely`), text);
  byId("others").append(box);
  const view = new TokenView(text, card);
  addAll(sequence, (piece) => view.add(piece));
  view.flush();
}

// --------------------------------------------------------------------------------------------------------- chat

function chatRequest() {
  const content = prompt.value;
  if (!content.trim()) throw new Error("Write a message first.");
  const given = parameters.read(true);
  const system = byId("system").value.trim();
  conversation.push({ role: "user", content });
  addMessage("user", content);
  prompt.value = "";
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
  return { model: info?.model_id ?? "default", messages, ...given };
}

/** With probabilities where the server gives them; where it refuses, without, and it is not asked again. */
async function runChat(body, run) {
  let reply;
  try {
    reply = await send("v1/chat/completions", chatBody(body), run, true);
  } catch (error) {
    if (!givesChatProbabilities || ![400, 422].includes(error.status) || !/logprobs` is not served/.test(error.message)) throw error;
    givesChatProbabilities = false;
    reply = await send("v1/chat/completions", chatBody(body), run, true);
  }
  if (!givesChatProbabilities) run.facts.push("this server gives no probabilities for chats");
  if (!run.isStream) return showWholeChat((await whole(reply)).body, run);
  for await (const data of events(reply)) {
    if (data === "[DONE]") return;
    const event = parsed(data);
    const problem = messageIn(event);
    if (problem) throw new ServerError(ended(problem));
    if (event.usage) noteUsage(event.usage, run);
    const choice = event.choices?.[0];
    if (!choice) continue;
    chatPieces(choice.delta?.content, choice.logprobs).forEach((piece) => run.add(piece));
    if (choice.finish_reason) run.reason = String(choice.finish_reason);
  }
}

function chatBody({ top_logprobs: top, ...body }) {
  if (byId("stream").checked) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  return givesChatProbabilities ? { ...body, logprobs: true, ...(top ? { top_logprobs: top } : {}) } : body;
}

/** A text with what is known of its tokens, some of which are parts of a character; where it does not add up, the text counts. */
function chatPieces(content, logprobs) {
  const text = typeof content === "string" ? content : "";
  const given = logprobs?.content ?? [];
  const tokens = given.map(({ token, logprob, top_logprobs: top }) => ({
    text: String(token),
    logprob,
    alternatives: (top ?? []).map((one) => ({ text: String(one.token), logprob: one.logprob ?? -Infinity })),
  }));
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const texts = given.map(({ token, bytes }) =>
    Array.isArray(bytes) ? decoder.decode(Uint8Array.from(bytes), { stream: true }) : String(token));
  if (texts.join("") === text) return tokens.map((token, at) => ({ text: texts[at], tokens: [token] }));
  return text || tokens.length ? [{ text, tokens }] : [];
}

function showWholeChat(body, run) {
  const choice = body.choices?.[0];
  if (!choice?.message) throw new ServerError("The server's answer has no message.");
  chatPieces(choice.message.content, choice.logprobs).forEach((piece) => run.add(piece));
  run.reason = String(choice.finish_reason);
  if (body.usage) noteUsage(body.usage, run);
}

function noteUsage(usage, run) {
  if (Number.isInteger(usage.completion_tokens)) run.numTokens = usage.completion_tokens;
  const cached = usage.prompt_tokens_details?.cached_tokens;
  run.facts.push(`prompt ${usage.prompt_tokens} tokens${cached ? `, ${cached} of them from the prefix cache` : ""}`);
}

/** A message in the conversation's list; for an answer, its view. */
function addMessage(role, content) {
  const item = made("li", "", `message ${role}`);
  const said = made("div", content, "said");
  item.append(made("span", role === "user" ? "You" : "Model", "who"), said);
  byId("messages").append(item);
  byId("messages").scrollTop = byId("messages").scrollHeight;
  if (role === "user") return null;
  said.tabIndex = 0;
  said.setAttribute("role", "group");
  said.setAttribute("aria-label", "Answer; with the arrow keys, the probability of each token");
  return new TokenView(said, card);
}

/** What came is part of the conversation. If nothing came, the message goes back to where it was written. */
function endMessage(run) {
  if (!run.view.element.isConnected) return; // a new chat has begun
  if (run.first) {
    conversation.push({ role: "assistant", content: run.text });
    return;
  }
  const [question, reply] = [...byId("messages").children].slice(-2);
  reply.remove();
  question.remove();
  const { content } = conversation.pop();
  if (mode() === "chat") prompt.value ||= content;
  else drafts.chat ||= content;
}

function newChat() {
  running?.abort();
  conversation.length = 0;
  byId("messages").replaceChildren();
  showError(null);
  byId("summary").hidden = true;
  prompt.focus();
}

// ---------------------------------------------------------------------------------------------- answers and errors

async function whole(reply) {
  let raw;
  try {
    raw = await reply.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server was lost before the answer was complete.");
  }
  return { raw, body: parsed(raw) };
}

function parsed(data) {
  try {
    const value = JSON.parse(data);
    if (value !== null && typeof value === "object") return value;
  } catch {
    // told below
  }
  throw new ServerError("The server sent something that is no JSON: is another server at this address?");
}

function showFailure(error, run) {
  const isOurs = error instanceof ServerError;
  if (!isOurs) console.error(error);
  let sentence = isOurs ? error.message : "The server sent an answer of an unknown shape.";
  if (run.first) sentence += run.numTokens === 1 ? " The one token that came is kept." : ` The ${run.numTokens} tokens that came are kept.`;
  showError(sentence);
  if (error.status === 401) askForKey(error.message);
}

function showError(sentence) {
  byId("error").textContent = sentence ?? "";
  byId("error").hidden = !sentence;
}

function showRunning(isRunning) {
  byId("generate").setAttribute("aria-disabled", String(isRunning));
  if (!isRunning && document.activeElement === byId("stop")) byId("generate").focus();
  byId("stop").hidden = !isRunning;
  if (isRunning) {
    byId("summary").hidden = true;
    say("Generating");
  }
}

function say(text) {
  byId("status").textContent = text;
}

// --------------------------------------------------------------------------------------------------------- code

function showCode(request) {
  lastRequest = request;
  byId("code").hidden = false;
  writeCode();
}

function writeCode() {
  const write = chosen("language") === "curl" ? curl : python;
  if (lastRequest) byId("program").textContent = write(lastRequest);
}

/** Browsers lend the clipboard to pages of https and loopback alone; elsewhere the old way still works. */
async function copyCode() {
  let isCopied = false;
  try {
    await navigator.clipboard.writeText(byId("program").textContent);
    isCopied = true;
  } catch {
    getSelection().selectAllChildren(byId("program"));
    isCopied = document.execCommand("copy");
  }
  byId("copy").textContent = isCopied ? "Copied" : "Selected: copy it";
  say(isCopied ? "Copied" : "The code is selected");
  setTimeout(() => (byId("copy").textContent = "Copy"), 2000);
}

// ---------------------------------------------------------------------------------------------------------- key

/** What the server says of itself. Where that fails, the next look at the batch, a second later, tries again. */
async function loadInfo() {
  if (isLoadingInfo) return;
  isLoadingInfo = true;
  try {
    showInfo(await (await ask("info")).json());
    loadAdapters();
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
  }
  isLoadingInfo = false;
}

function showInfo(found) {
  info = found;
  byId("model").textContent = String(found.model_id);
  const shards = `${found.num_shard} ${found.num_shard === 1 ? "shard" : "shards"}`;
  const dtype = String(found.model_dtype).replace("torch.", "");
  byId("limits").textContent = `${dtype}, ${shards}, prompts to ${found.max_input_length} of ${found.max_total_tokens} tokens`;
  if (Number.isInteger(found.max_top_n_tokens)) parameters.limitAlternatives(found.max_top_n_tokens);
}

/** Which adapters there are to name; without an answer, any may still be written. */
async function loadAdapters() {
  if (!Number.isInteger(info.adapters)) return;
  let names = [];
  try {
    const { data } = await (await ask("v1/models")).json();
    names = data.filter(({ parent }) => parent).map(({ id }) => String(id));
  } catch (error) {
    if (!(error instanceof ServerError)) console.error(error);
  }
  parameters.offerAdapters(names);
  showMode();
}

function askForKey(why) {
  const dialog = byId("key-dialog");
  byId("key-why").textContent = `${why && !key() ? `${why} ` : ""}Every request of this tab then carries it, and it is forgotten when the tab is closed.`;
  showKeyError(key() ? why : null);
  byId("key-forget").hidden = !key();
  byId("key-text").value = "";
  if (!dialog.open) dialog.showModal();
  byId("key-text").focus();
}

function showKeyError(sentence) {
  byId("key-error").textContent = sentence ?? "";
  byId("key-error").hidden = !sentence;
}

/** A key is kept once the server has accepted it. */
async function useKey() {
  const given = byId("key-text").value.trim();
  const problem = whyNoKey(given);
  if (problem) return showKeyError(problem);
  try {
    showInfo(await (await ask("info", { withKey: given })).json());
  } catch (error) {
    return showKeyError(error.message);
  }
  keep(given);
  loadAdapters();
  byId("key-dialog").close();
  showError(null);
  live.start();
}

// ------------------------------------------------------------------------------------------------- the page's parts

function made(name, text, className = "") {
  const element = document.createElement(name);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
const mode = () => chosen("mode");

function showMode() {
  const isChat = mode() === "chat";
  work.classList.toggle("is-chat", isChat);
  byId("prompt-label").textContent = isChat ? "Message" : "Prompt";
  byId("generate").textContent = isChat ? "Send" : "Generate";
  prompt.rows = isChat ? 3 : 5;
  parameters.show({ isChat, isStream: byId("stream").checked });
}

function changeMode() {
  const isChat = mode() === "chat";
  running?.abort();
  drafts[isChat ? "completion" : "chat"] = prompt.value;
  prompt.value = drafts[isChat ? "chat" : "completion"];
  byId("summary").hidden = true;
  showError(null);
  showMode();
}

work.addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("fields").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey();
});
document.addEventListener("keydown", (event) => {
  if (byId("key-dialog").open) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    generate();
  } else if (event.key === "Escape" && running) {
    running.abort();
  }
});
for (const input of document.querySelectorAll("input[name=mode]")) input.addEventListener("change", changeMode);
for (const input of document.querySelectorAll("input[name=language]")) input.addEventListener("change", writeCode);
byId("stop").addEventListener("click", () => running?.abort());
byId("new-chat").addEventListener("click", newChat);
byId("stream").addEventListener("change", showMode);
byId("tint").addEventListener("change", () => work.classList.toggle("tinted", byId("tint").checked));
byId("copy").addEventListener("click", copyCode);
byId("reset").addEventListener("click", () => parameters.reset());
byId("key").addEventListener("click", () => askForKey(null));
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-forget").addEventListener("click", () => {
  keep(null);
  info = null;
  byId("key-dialog").close();
  loadInfo();
  live.start();
});
card.serve(byId("answer"));
card.serve(byId("others"));
card.serve(byId("messages"));
if (matchMedia("(max-width: 820px)").matches) byId("parameters").removeAttribute("open");
showMode();
loadInfo();
live.start();
