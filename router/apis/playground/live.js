// The running batch, once a second while the page is looked at: who is in it, tokens a step, KV blocks, prefix hits.

import { ask } from "./server.js";

const EVERY_MS = 1000;
const AGAIN_MS = 3000; // after a failure
const NUM_BARS = 64;
const STATES = {
  serving: "Serving",
  restarting: "Model restarting",
  stopping: "Stopping",
  lost: "Not reachable",
  locked: "Key needed",
};

const byId = (id) => document.getElementById(id);

export class LiveBatch {
  #timer = 0;
  #isAsking = false;
  #seen = null; // the decoded tokens at the last look, and when
  #ownIds;
  #onAnswer;

  /** ownIds: of the requests of this page. onAnswer is called whenever the server has answered. */
  constructor(ownIds, onAnswer) {
    this.#ownIds = ownIds;
    this.#onAnswer = onAnswer;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  start() {
    this.stop();
    if (!document.hidden) this.#look();
  }

  stop() {
    clearTimeout(this.#timer);
  }

  async #look() {
    if (this.#isAsking) return;
    this.#isAsking = true;
    let wait = EVERY_MS;
    try {
      const signal = AbortSignal.timeout(10_000);
      const answer = await ask("playground/batch", { signal });
      this.#show(await answer.json());
      this.#onAnswer();
    } catch (error) {
      wait = error.status === 401 ? null : AGAIN_MS; // a key that comes starts it again
      this.#seen = null;
      this.#showState(error.status === 401 ? "locked" : "lost");
    }
    this.#isAsking = false;
    this.stop();
    if (wait !== null && !document.hidden) this.#timer = setTimeout(() => this.#look(), wait);
  }

  #showState(state) {
    byId("live").dataset.state = state;
    byId("state").textContent = STATES[state] ?? STATES.serving;
  }

  #show(batch) {
    this.#showState(batch.state);
    const { running, waiting, kv_blocks: blocks, prefix_cache: prefix } = batch;
    byId("running").textContent = `${count(running.count)} / ${count(batch.max_running)}`;
    byId("waiting").textContent = count(waiting.count);
    byId("waiting-tokens").textContent = waiting.count ? `${count(batch.waiting_tokens)} tokens` : "";
    this.#showSteps(batch);
    const used = blocks.total - blocks.free;
    byId("blocks").textContent = `${count(used)} / ${count(blocks.total)}`;
    byId("blocks-bar").style.setProperty("--p", share(used, blocks.total));
    const prompts = prefix.hit_tokens + prefix.computed_tokens;
    const hits = share(prefix.hit_tokens, prompts);
    byId("prefix").textContent = prefix.is_on ? `${(100 * hits).toFixed(0)} %` : "off";
    byId("prefix-bar").style.setProperty("--p", prefix.is_on ? hits : 0);
    byId("prefix-tokens").textContent = prefix.is_on ? `${count(prefix.hit_tokens)} tokens` : "";
    this.#showRequests(running, waiting);
  }

  #showSteps({ steps, running, decoded_tokens: decoded }) {
    chart("decode", steps.map(([, tokens]) => tokens));
    chart("prefill", steps.map(([, , tokens]) => tokens));
    const now = performance.now();
    const rate = this.#seen ? (1000 * (decoded - this.#seen.decoded)) / (now - this.#seen.at) : 0;
    byId("rate").textContent = running.count && rate > 0 ? `${count(Math.round(rate))} tokens/s` : "";
    this.#seen = { decoded, at: now };
  }

  #showRequests(running, waiting) {
    const rows = [
      ...running.requests.map((request) => this.#chip(request, false)),
      ...waiting.requests.map((request) => this.#chip(request, true)),
    ];
    const hidden = running.count + waiting.count - rows.length;
    if (hidden > 0) rows.push(made("li", `and ${count(hidden)} more`, "more"));
    byId("requests").replaceChildren(...rows);
    byId("nobody").textContent = "No requests in the server";
    byId("nobody").hidden = rows.length > 0;
  }

  #chip(request, isWaiting) {
    const isOurs = request.id !== null && this.#ownIds.has(request.id);
    const name = isOurs ? "this page" : (request.id ?? "another key's").slice(0, 24);
    const isPrompt = !isWaiting && request.prompt_left > 0;
    const done = isPrompt ? request.prompt_tokens - request.prompt_left : request.generated_tokens;
    const most = isPrompt ? request.prompt_tokens : request.max_new_tokens;
    const doing = isWaiting ? "waits" : isPrompt ? "prompt" : "";
    const chip = made("li", "", ["chip", isWaiting && "waits", isPrompt && "prefill", isOurs && "ours"].filter(Boolean).join(" "));
    const bar = made("i", "");
    bar.style.setProperty("--p", isWaiting ? 0 : share(done, most));
    const cached = request.cached_tokens ? `, ${request.cached_tokens} of them from the prefix cache` : "";
    chip.title = `Sequence ${request.sequence}: prompt ${request.prompt_tokens} tokens${cached}; ${request.generated_tokens} of at most ${request.max_new_tokens} generated`;
    const progress = isWaiting ? `${count(request.prompt_tokens)} in` : `${count(done)}/${count(most)}`;
    chip.append(bar, made("b", name), made("span", [doing, progress].filter(Boolean).join(" ")));
    return chip;
  }
}

/** Bars of the last steps, the newest at the right, and the newest's number. */
function chart(name, values) {
  const top = Math.max(1, ...values);
  const shown = values.slice(-NUM_BARS);
  const first = NUM_BARS - shown.length;
  const bars = shown.map((value, at) => (value ? `M${first + at + 0.5} 20v${-Math.max(1, (20 * value) / top).toFixed(1)}` : ""));
  byId(`${name}-bars`).setAttribute("d", bars.join(""));
  const newest = shown.at(-1) ?? 0;
  byId(name).textContent = count(newest);
  byId(`${name}-chart`).setAttribute("aria-label", `${name} tokens of the last ${shown.length} steps: at most ${Math.max(0, ...shown)}`);
}

function share(part, whole) {
  return whole > 0 ? Math.min(1, part / whole) : 0;
}

function count(number) {
  return number.toLocaleString("en").replaceAll(",", "\u202f");
}

function made(name, text, className = "") {
  const element = document.createElement(name);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}
