// The request that was just made, as a curl command and as a Python program. They never hold the key: it is read from
// the environment variable API_KEY.

const JSON_WORDS = { true: "true", false: "false", null: "null" };
const PYTHON_WORDS = { true: "True", false: "False", null: "None" };
const WIDTH = 80; // lists and objects that are no longer stay on one line

/** A value as JSON, 64-bit integers too. `indent` breaks what is long into lines. */
export function literal(value, { words = JSON_WORDS, indent = null } = {}) {
  if (value === null || typeof value === "boolean") return words[value];
  if (typeof value !== "object") return typeof value === "string" ? JSON.stringify(value) : String(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const deeper = indent === null ? null : `${indent}  `;
  const told = (one) => literal(one, { words, indent: deeper });
  const parts = Array.isArray(value)
    ? value.map(told)
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${told(one)}`);
  const line = open + parts.join(", ") + close;
  if (indent === null || (line.length <= WIDTH && !line.includes("\n"))) return line;
  return `${open}\n${parts.map((part) => deeper + part).join(",\n")}\n${indent}${close}`;
}

/** request: { url, body, isStream, hasKey }. */
export function curl({ url, body, isStream, hasKey }) {
  return [
    `curl ${isStream ? "-N " : ""}${quoted(url)} \\`,
    "  -H 'content-type: application/json' \\",
    ...(hasKey ? ['  -H "authorization: Bearer $API_KEY" \\'] : []),
    `  -d ${quoted(literal(body, { indent: "" }))}`,
  ].join("\n");
}

/** The same as Python: with `requests` for TGI's API, with OpenAI's own library for chats. */
export function python(request) {
  return request.isChat ? chatProgram(request) : completionProgram(request);
}

function completionProgram({ url, body, isStream, hasKey }) {
  return [
    ...(isStream ? ["import json"] : []),
    ...(hasKey ? ["import os"] : []),
    ...(isStream || hasKey ? [""] : []),
    "import requests",
    "",
    "answer = requests.post(",
    `    ${JSON.stringify(url)},`,
    ...(hasKey ? ["    headers={\"authorization\": f\"Bearer {os.environ['API_KEY']}\"},"] : []),
    `    json=${literal(body, { words: PYTHON_WORDS, indent: "    " })},`,
    ...(isStream ? ["    stream=True,"] : []),
    "    timeout=300,",
    ")",
    "if not answer.ok:",
    "    raise SystemExit(answer.text)",
    ...(isStream ? STREAMED : ['print(answer.json()["generated_text"])']),
  ].join("\n");
}

const STREAMED = [
  "for line in answer.iter_lines():",
  '    if line.startswith(b"data:"):',
  "        event = json.loads(line[5:])",
  '        if "error" in event:',
  '            raise SystemExit(event["error"])',
  '        if not event["token"]["special"]:',
  '            print(event["token"]["text"], end="", flush=True)',
  "print()",
];

// What OpenAI's library takes by name; the rest goes along as `extra_body`.
const OPENAI_NAMES = new Set([
  "model", "messages", "stream", "max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty",
  "presence_penalty", "logit_bias", "logprobs", "top_logprobs", "stream_options", "response_format",
]);

function chatProgram({ url, body, isStream, hasKey }) {
  const told = (value) => literal(value, { words: PYTHON_WORDS, indent: "    " });
  const named = Object.entries(body).filter(([name]) => OPENAI_NAMES.has(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI_NAMES.has(name)));
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(url.replace(/\/chat\/completions$/, ""))}, api_key=${hasKey ? 'os.environ["API_KEY"]' : '"none"'})`,
    "answer = client.chat.completions.create(",
    ...named.map(([name, value]) => `    ${name}=${told(value)},`),
    ...(Object.keys(others).length ? [`    extra_body=${told(others)},`] : []),
    ")",
    ...(isStream
      ? [
          "for chunk in answer:",
          "    if chunk.choices:",
          '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
          "print()",
        ]
      : ["print(answer.choices[0].message.content)"]),
  ].join("\n");
}

/** One word for a shell, whatever is in it. */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
