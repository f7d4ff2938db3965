// Helpers that every part of the page uses: elements, announcements, figures.
// All text goes into text nodes. The server's policy has the browser refuse anything else.

export const $ = (id) => document.getElementById(id);

/** Makes an element with properties and children; strings become text nodes, null is left out. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Makes a button. `name` is its accessible name where the label alone isn't clear. */
export function button(label, run, { name = "", className = "quiet" } = {}) {
  const element = make("button", { type: "button", className }, label);
  if (name) element.setAttribute("aria-label", name);
  element.addEventListener("click", run);
  return element;
}

/** Sets an element's text, and leaves the document alone if it has that text already. */
export function put(where, text) {
  const element = typeof where === "string" ? $(where) : where;
  if (element.textContent !== text) element.textContent = text;
}

/** Tells screen readers something that the page shows elsewhere. */
export function announce(text) {
  $("said").textContent = text;
}

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

export function rounded(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** Returns a file size in words. */
export function bytes(size) {
  const units = ["bytes", "KB", "MB", "GB"];
  let at = 0;
  while (size >= 1000 && at < units.length - 1) { size /= 1000; at += 1; }
  return `${at ? size.toFixed(size < 10 ? 1 : 0) : size} ${units[at]}`;
}

/** Has the browser save a file. `parts` are strings or blobs. */
export function download(name, kind, parts) {
  const url = URL.createObjectURL(new Blob(parts, { type: kind }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

/** Returns a random identifier. (crypto.randomUUID doesn't exist over plain http.) */
export function identifier() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
