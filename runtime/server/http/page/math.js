// Formulas, set by KaTeX, which is loaded when the first one is shown.
// KaTeX builds elements itself; no text becomes markup.

import { make } from "./dom.js";

const MOST_CHARACTERS = 5000;
const OPTIONS = { output: "html", throwOnError: true, trust: false, strict: "ignore", maxExpand: 500, maxSize: 20 };

let loading = null;

function load() {
  loading ??= import("./vendor/katex/katex.min.js").then(() => {
    const sheet = make("link", { rel: "stylesheet", href: new URL("./vendor/katex/katex.min.css", import.meta.url).href });
    document.head.append(sheet);
  });
  return loading;
}

/** Returns an element with a formula; one that KaTeX doesn't know stays as its source. */
export function math(source, display) {
  const element = make(display ? "div" : "span", { className: display ? "math display" : "math" }, source);
  if (source.length > MOST_CHARACTERS) return element;
  if (globalThis.katex) set(element, source, display);
  else load().then(() => set(element, source, display), () => { loading = null; });
  return element;
}

function set(element, source, display) {
  const shown = document.createElement("span");
  try {
    globalThis.katex.render(source, shown, { ...OPTIONS, displayMode: display });
  } catch {
    return; // its source is shown
  }
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", source);
  if (display) element.tabIndex = 0; // it may scroll
  element.replaceChildren(...shown.childNodes);
}
