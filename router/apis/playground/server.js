// Speaks to the server: requests with the key, errors as sentences, server-sent events.
//
// All addresses are relative to the page, which may lie below a path of a proxy. The key stays in sessionStorage: it is
// gone with the tab, and nowhere in an address.

const KEY = "lockstep-api-key";
const MOST_OF_AN_EVENT = 4 * 1024 * 1024; // characters; whoever sends more in one event is not our server
const MOST_OF_A_SENTENCE = 600;
let keyHere = null; // where the browser keeps nothing

/** What went wrong, as one sentence for people. */
export class ServerError extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status; // of HTTP; 0 where there was none
  }
}

export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? keyHere;
  } catch {
    return keyHere;
  }
}

/** Keep a key until the tab is closed; null forgets it. */
export function keep(given) {
  keyHere = given;
  try {
    if (given === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, given);
    keyHere = null;
  } catch {
    // it stays in `keyHere`
  }
}

/** Why a text can be no key, or null. */
export function whyNoKey(text) {
  if (!text) return "Enter a key.";
  return /\p{Cc}/u.test(text) ? "A key has no control characters: enter it again." : null;
}

/** The answer to a request, which is a success. Throws ServerError, or AbortError once `signal` says so. */
export async function ask(path, { json, signal, requestId, withKey = key() } = {}) {
  const headers = {};
  if (withKey) headers.authorization = `Bearer ${bytesOf(withKey)}`;
  if (requestId) headers["x-request-id"] = requestId;
  if (json !== undefined) headers["content-type"] = "application/json";
  const options = { method: json === undefined ? "GET" : "POST", headers, body: json, signal, cache: "no-store" };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached: check that it still runs.");
  }
  if (!answer.ok) throw new ServerError(await sentence(answer, Boolean(withKey)), answer.status);
  return answer;
}

/** A key as a header carries it: the bytes of its UTF-8, each as one character. */
function bytesOf(text) {
  return Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");
}

/** A name for a request, by which the running batch shows that it is ours. */
export function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(6));
  return `pg-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

async function sentence(answer, hadKey) {
  if (answer.status === 401) {
    return hadKey
      ? "The server does not accept this API key: check it and enter it again."
      : "This server asks for an API key.";
  }
  let message;
  try {
    message = messageIn(await answer.json());
  } catch {
    // not JSON: a proxy's page, which is for nobody
  }
  message ??= `The server answered ${answer.status} ${answer.statusText}`.trim();
  const seconds = answer.headers.get("retry-after");
  if (/^\d+$/.test(seconds ?? "") && !/try again/i.test(message)) message += `: try again in ${seconds} s`;
  return ended(message);
}

/** What an error says, in TGI's shape or OpenAI's; undefined for anything else. */
export function messageIn(body) {
  const error = body?.error;
  const message = typeof error === "string" ? error : error?.message;
  return typeof message === "string" && message ? message.slice(0, MOST_OF_A_SENTENCE) : undefined;
}

/** A sentence with its full stop. */
export function ended(text) {
  const told = text.replace(/^Input validation error: (.)/, (_, first) => first.toUpperCase());
  return /[.!?…]$/.test(told) ? told : `${told}.`;
}

/** The data of each server-sent event. Throws ServerError where the connection is lost. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      if (rest.length > MOST_OF_AN_EVENT) throw new ServerError("The server sent an event without end.");
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {}); // whoever has read enough lets the connection go
  }
}
