// An answer's Markdown as elements. marked reads the text into tokens; elements are made of them here, and a token's
// text goes into text nodes alone. HTML in an answer is text, a picture is a link, and a link goes to the web or to mail.

import { make } from "./dom.js";
import { codeBlock } from "./code.js";
import { math } from "./math.js";
import { Marked } from "./vendor/marked/marked.esm.js";

const MOST_CHARACTERS = 400000, LONGEST_LINE = 10000; // above, a text is shown as it is: marked's time is quadratic
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", hellip: "…",
  mdash: "—", ndash: "–", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", bull: "•", middot: "·", deg: "°", plusmn: "±",
  times: "×", divide: "÷", le: "≤", ge: "≥", ne: "≠", larr: "←", rarr: "→", uarr: "↑", darr: "↓", euro: "€", pound: "£" };

/** marked's tokenizer without HTML: tags are text, except for a line break, which models write into tables. */
const TOKENIZER = {
  html() {},
  tag(source) {
    const match = /^<br\s*\/?>/i.exec(source);
    return match ? { type: "br", raw: match[0] } : undefined;
  },
};

const formula = (match, display) => match && { type: "math", raw: match[0], text: match[1].trim(), display };
const marked = new Marked({ gfm: true, breaks: true, tokenizer: TOKENIZER, extensions: [
  {
    name: "math", level: "block",
    start: (source) => source.match(/\$\$|\\\[/)?.index,
    tokenizer: (source) => formula(/^ {0,3}(?:\$\$((?:[^$\\]|\\[\s\S])+)\$\$)[ \t]*(?:\n|$)/.exec(source)
      ?? /^ {0,3}\\\[([\s\S]+?)\\\][ \t]*(?:\n|$)/.exec(source), true) ?? undefined,
  },
  {
    name: "inline-math", level: "inline",
    start: (source) => source.match(/\$|\\\(|\\\[/)?.index,
    tokenizer(source) {
      return formula(/^\$\$((?:[^$\\]|\\[\s\S])+?)\$\$/.exec(source) ?? /^\\\[([\s\S]+?)\\\]/.exec(source), true)
        ?? formula(/^\\\(([\s\S]+?)\\\)/.exec(source) ?? /^\$(?=\S)((?:[^$\\\n]|\\.)+?)(?<=\S)\$(?!\d)/.exec(source), false)
        ?? undefined;
    },
  },
] });

/** Replaces character references by their characters. */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,8}));/g, (whole, decimal, hexadecimal, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const point = decimal ? Number(decimal) : parseInt(hexadecimal, 16);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : "\ufffd";
  });
}

/** Returns an address as a URL, or null if it isn't one that a link may have. */
function address(href) {
  try {
    const url = new URL(decoded(href));
    return SCHEMES.has(url.protocol) ? url : null;
  } catch {
    return null;
  }
}

function link(href, children, raw) {
  const url = address(href);
  if (!url) return [raw];
  return [make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, ...children)];
}

const HEADINGS = ["h3", "h4", "h5", "h6", "h6", "h6"];
const same = (tag) => (token) => [make(tag, {}, ...inline(token.tokens))];

/** Token type -> the nodes of a token. */
const INLINE = {
  br: () => [make("br")],
  checkbox: (token) => {
    const box = make("input", { type: "checkbox", checked: token.checked, disabled: true });
    box.setAttribute("aria-label", token.checked ? "done" : "not done");
    return [box, " "];
  },
  codespan: (token) => [make("code", {}, token.text)],
  del: same("del"),
  em: same("em"),
  escape: (token) => [token.text],
  image: (token) => link(token.href, [`${token.text || "picture"} (picture)`], token.raw),
  "inline-math": (token) => [math(token.text, token.display)],
  link: (token) => link(token.href, inline(token.tokens), token.raw),
  math: (token) => [math(token.text, token.display)],
  strong: same("strong"),
  text: (token) => (token.tokens ? inline(token.tokens) : [decoded(token.text)]),
};

const BLOCKS = {
  blockquote: (token) => [make("blockquote", {}, ...blocks(token.tokens))],
  code: (token, complete) => [codeBlock(token.text, (token.lang ?? "").trim().split(/\s/)[0].toLowerCase().replace(/[^\w+#.-]/g, ""), complete)],
  def: () => [],
  heading: (token) => [make(HEADINGS[token.depth - 1], {}, ...inline(token.tokens))],
  hr: () => [make("hr")],
  list: (token) => {
    const list = make(token.ordered ? "ol" : "ul", token.ordered && token.start !== "" ? { start: Number(token.start) } : {});
    for (const item of token.items) list.append(make("li", item.task ? { className: "task" } : {}, ...blocks(item.tokens)));
    return [list];
  },
  paragraph: (token) => [make("p", {}, ...inline(token.tokens))],
  space: () => [],
  table: (token) => {
    const cell = (tag) => (one) => make(tag, { className: one.align ? `to-${one.align}` : "", ...(tag === "th" ? { scope: "col" } : {}) }, ...inline(one.tokens));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...token.header.map(cell("th")))),
      make("tbody", {}, ...token.rows.map((row) => make("tr", {}, ...row.map(cell("td"))))));
    const box = make("div", { className: "scroll", tabIndex: 0 }, table);
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Table");
    return [box];
  },
};

function inline(tokens) {
  return tokens.flatMap((token) => INLINE[token.type]?.(token) ?? [token.raw]);
}

function blocks(tokens, complete = true) {
  return tokens.flatMap((token) => BLOCKS[token.type]?.(token, complete) ?? INLINE[token.type]?.(token) ?? [token.raw]);
}

function tokensOf(text) {
  if (text.length > MOST_CHARACTERS || text.split("\n").some((line) => line.length > LONGEST_LINE)) return null;
  try {
    return marked.lexer(text);
  } catch {
    return null; // thousands of nested quotes are more than the stack holds
  }
}

/** An element that shows Markdown. While text arrives, only the blocks that changed are made again. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.parts = []; // [source of a block, its nodes]
  }

  clear() {
    this.parts = [];
    this.element.replaceChildren();
  }

  /** `complete`: no more text follows. */
  update(text, complete) {
    const tokens = tokensOf(text);
    if (!tokens) {
      this.clear();
      this.element.append(make("p", { className: "plain" }, text));
      return;
    }
    if (tokens.some((token) => token.type === "def")) this.clear(); // it changes links that are shown already
    let same = 0;
    const closed = (at) => complete || at < tokens.length - 1;
    while (same < this.parts.length && same < tokens.length && this.parts[same].raw === tokens[same].raw && this.parts[same].closed === closed(same)) same += 1;
    if (same === 0) this.clear();
    for (const part of this.parts.splice(same)) for (const node of part.nodes) node.remove();
    for (let at = same; at < tokens.length; at += 1) {
      const nodes = blocks([tokens[at]], closed(at)).map((node) => (typeof node === "string" ? document.createTextNode(node) : node));
      this.element.append(...nodes);
      this.parts.push({ raw: tokens[at].raw, closed: closed(at), nodes });
    }
  }
}
