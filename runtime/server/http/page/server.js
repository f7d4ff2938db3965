// Requests to the server, its streams, and the dialog that asks for an API key.

import { $ } from "./dom.js";
import { tab } from "./tab.js";

export const needsKey = document.documentElement.dataset.keys === "yes";
export const hasKey = () => Boolean(tab.get("key", ""));

/** The server refused a request. `code` is its own word for the reason, where it has one. */
export class ServerError extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function ask(path, options = {}) {
  const key = tab.get("key", "");
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let error = { message: `the server said ${response.status}` };
  try {
    error = (await response.json()).error;
  } catch { /* it isn't ours: a gateway's, say */ }
  throw new ServerError(response.status, error.message, error.code ?? "");
}

/** Returns a request as JSON. A seed has up to 64 bits, more than JavaScript's numbers hold: it stays text. */
export function encoded({ seed, ...body }) {
  const text = JSON.stringify(body);
  return /^\d+$/.test(seed ?? "") ? `${text.slice(0, -1)},"seed":${seed}}` : text;
}

function decoded(text) {
  return JSON.parse(text.replace(/"seed":(\d+)/, '"seed":"$1"'));
}

/** Yields the events of a stream as they arrive. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the stream has no end");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const line = part.split("\n").find((one) => one.startsWith("data: "));
        if (!line) continue; // a comment, which keeps the connection open
        if (line === "data: [DONE]") return;
        yield decoded(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Asks for a key; resolves to whether there is a new one. */
export function askForKey(why) {
  const dialog = $("ask-key"), field = $("key-field");
  if (why) $("key-why").textContent = why;
  field.value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "entered"), { once: true });
  });
}

$("ask-key").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  tab.set("key", $("key-field").value.trim());
  $("ask-key").close("entered");
});
$("key-cancel").addEventListener("click", () => $("ask-key").close("none"));
