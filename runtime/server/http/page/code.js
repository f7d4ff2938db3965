// Blocks of code: their language, colours by highlight.js, and a button that copies them.

import { button, make } from "./dom.js";
import { copy } from "./clipboard.js";

const MOST_CHARACTERS = 60000;

/** Builds elements where highlight.js would write HTML. It is what highlight.js calls an emitter. */
class ElementEmitter {
  constructor() {
    this.root = document.createDocumentFragment();
    this.open = [this.root];
  }
  addText(text) {
    if (text) this.open.at(-1).append(text);
  }
  openNode(scope) {
    const element = make("span", { className: `hl-${scope.split(".")[0].replaceAll("_", "-")}` });
    this.open.at(-1).append(element);
    this.open.push(element);
  }
  closeNode() {
    if (this.open.length > 1) this.open.pop();
  }
  startScope(scope) {
    this.openNode(scope);
  }
  endScope() {
    this.closeNode();
  }
  __addSublanguage(emitter) {
    this.open.at(-1).append(emitter.root);
  }
  finalize() {
    this.open.length = 1;
  }
  toHTML() {
    return "";
  }
}

let highlighter = null, loading = null;

function load() {
  loading ??= import("./vendor/highlight/highlight.min.js").then((module) => {
    highlighter = module.default;
    highlighter.configure({ __emitter: ElementEmitter });
  });
  return loading;
}

function colour(element, text, language) {
  if (!highlighter.getLanguage(language)) return;
  const { _emitter: emitter } = highlighter.highlight(text, { language, ignoreIllegals: true });
  if (emitter.root.textContent === text) element.replaceChildren(emitter.root); // colours change no character
}

/** Returns a block of code. `complete`: it gets its colours, which is too slow to do for each piece that arrives. */
export function codeBlock(text, language, complete) {
  const code = make("code", {}, text), name = language || "text";
  const pre = make("pre", { tabIndex: 0 }, code);
  pre.setAttribute("aria-label", `Code, ${name}`);
  pre.setAttribute("role", "group");
  const copies = button("Copy", () => copy(text, copies, code), { name: `Copy the code, ${name}` });
  if (complete && language && text.length <= MOST_CHARACTERS) {
    if (highlighter) colour(code, text, language);
    else load().then(() => colour(code, text, language), () => { loading = null; });
  }
  return make("div", { className: "code" }, make("div", { className: "code-head" }, make("span", {}, name), copies), pre);
}
