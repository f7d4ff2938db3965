// The element of a message: its text, reasoning, files, tool calls, figures and actions.

import { $, bytes, button, count, make, rounded } from "./dom.js";
import { copy } from "./clipboard.js";
import { codeBlock } from "./code.js";
import { Markdown } from "./markdown.js";

const ENDS = { length: "ended at the limit", stopped: "stopped", closed: "cut off: its tab was closed" };

/** Returns what is told below an answer. */
export function about(turn) {
  const parts = [], { usage, seconds } = turn;
  if (usage) {
    parts.push(count(usage.completion_tokens, "token"));
    if (seconds && usage.completion_tokens > 1 && seconds.last > seconds.first)
      parts.push(`${rounded((usage.completion_tokens - 1) / (seconds.last - seconds.first))} a second`);
    if (seconds?.first !== undefined) parts.push(`first after ${rounded(seconds.first)} s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${usage.prompt_tokens.toLocaleString("en")}${cached ? `, ${cached.toLocaleString("en")} from the cache` : ""}`);
    const ahead = usage.completion_tokens_details;
    const right = ahead?.accepted_prediction_tokens ?? 0, wrong = ahead?.rejected_prediction_tokens ?? 0;
    if (right + wrong) parts.push(`${right} of ${right + wrong} computed ahead were right`);
  }
  if (ENDS[turn.finish]) parts.push(ENDS[turn.finish]);
  if (turn.seed !== undefined) parts.push(`seed ${turn.seed}`);
  return parts;
}

/** Returns a JSON text indented, or null if it isn't JSON. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

const isCut = (turn) => ["length", "stopped", "closed"].includes(turn.finish) || Boolean(turn.problem);

/** Answers that are far away are plain text until they come near. */
const near = new IntersectionObserver((entries) => {
  // A message may be gone since it was seen, as those after an edited one are.
  for (const entry of entries) if (entry.isIntersecting && entry.target.isConnected) entry.target.formats?.();
}, { root: $("chat"), rootMargin: "1200px 0px" });

/** A message's element. `actions`: what its buttons do; each gets the message's index. */
export class TurnView {
  constructor(conversation, index, actions) {
    this.conversation = conversation;
    this.index = index;
    this.actions = actions;
    this.element = make("article");
    this.body = make("div", { className: "body" });
    this.markdown = new Markdown(this.body);
    this.near = false;
    this.draw();
  }

  get turn() {
    return this.conversation.turns[this.index];
  }

  get isLast() {
    return this.index === this.conversation.turns.length - 1;
  }

  get live() {
    return Boolean(this.conversation.running) && this.isLast;
  }

  get author() {
    const { role, model, name } = this.turn;
    return role === "user" ? "You" : role === "tool" ? `Result of ${name}` : model || "Assistant";
  }

  /** Makes all of it anew. */
  draw() {
    const { turn, live } = this;
    this.element.className = turn.role;
    this.element.setAttribute("aria-label", `${this.author}, message ${this.index + 1}`);
    this.element.setAttribute("aria-busy", String(live));
    this.reasoning = null;
    this.element.replaceChildren(make("h2", {}, this.author), this.body);
    this.drawReasoning();
    this.drawBody();
    if (live) return;
    if (turn.files?.length) this.body.before(...turn.files.map(fileElement));
    if (turn.calls?.length) this.element.append(...turn.calls.map((call, at) => this.callElement(call, at)));
    if (turn.problem) this.element.append(this.problem());
    if (turn.role === "assistant") {
      const parts = about(turn).map((part) => make("span", {}, part));
      if (parts.length) this.element.append(make("p", { className: "about" }, ...parts));
    }
    this.element.append(make("div", { className: "actions" }, ...this.buttons()));
  }

  /** Shows more of an answer that arrives. */
  update() {
    this.drawReasoning();
    this.drawBody();
  }

  drawReasoning() {
    const { turn, live } = this;
    if (!turn.reasoning) return;
    if (!this.reasoning) {
      this.reasoning = make("details", { className: "reasoning", open: Boolean(turn.unfolded) }, make("summary"), make("div"));
      this.reasoning.addEventListener("toggle", (event) => { turn.unfolded = event.target.open; });
      this.body.before(this.reasoning);
    }
    const seconds = `${rounded((turn.thought?.last ?? 0) - (turn.thought?.first ?? 0))} s`, [summary, text] = this.reasoning.children;
    summary.textContent = live && !turn.content ? `Reasoning, ${seconds}…` : `Reasoned for ${seconds}`;
    if (text.textContent !== turn.reasoning) text.textContent = turn.reasoning;
  }

  drawBody() {
    const { turn, live } = this;
    if (turn.role === "user") this.body.textContent = turn.content;
    else if (turn.role === "tool") this.body.replaceChildren(codeBlock(indented(turn.content) ?? turn.content, "json", true));
    else if (live && !turn.content) this.markdown.clear(), this.body.append(make("span", { className: "dots" }, "…"));
    else if (live || this.near) this.format();
    else {
      this.markdown.clear();
      if (turn.content) this.body.append(make("p", { className: "plain" }, turn.content));
      this.element.formats = () => {
        near.unobserve(this.element);
        this.near = true;
        this.format();
      };
      near.observe(this.element);
    }
    this.body.hidden = !this.body.hasChildNodes();
  }

  format() {
    const { turn, live } = this, json = turn.json ? (indented(turn.content) ?? turn.content) : null;
    if (this.body.firstChild?.className === "dots") this.markdown.clear();
    if (json === null) this.markdown.update(turn.content, !live);
    else this.body.replaceChildren(codeBlock(json, "json", !live));
  }

  callElement(call, at) {
    const { index, turn, conversation } = this;
    const box = make("div", { className: "call" }, make("h3", {}, `Calls ${call.name}`), codeBlock(indented(call.arguments) ?? call.arguments, "json", true));
    if (!this.isLast || conversation.running) return box;
    const field = make("textarea", { rows: 2, placeholder: "The tool's result, as text or JSON" });
    field.setAttribute("aria-label", `Result of ${call.name}`);
    const results = () => [...this.element.querySelectorAll(".call textarea")].map((one) => one.value);
    box.append(field);
    if (at === turn.calls.length - 1)
      box.append(make("div", { className: "ends" }, button("Send results", () => this.actions.results(index, results()), { className: "main" })));
    return box;
  }

  problem() {
    const box = make("p", { className: "problem" }, this.turn.problem);
    if (this.turn.code === "context_length_exceeded" && this.isLast)
      box.append(" ", button("Start again from the last message", () => this.actions.startAgain(this.lastQuestion()), { className: "" }));
    return box;
  }

  lastQuestion() {
    let at = this.index;
    while (at > 0 && this.conversation.turns[at].role !== "user") at -= 1;
    return at;
  }

  buttons() {
    const { turn, index, actions } = this, where = `message ${index + 1}`;
    const one = (label, run) => button(label, run, { name: `${label}, ${where}` });
    const copies = one("Copy", () => copy(turn.content, copies, this.body));
    if (turn.role === "tool") return [copies];
    const edits = one("Edit", () => actions.edit(index));
    if (turn.role === "user") return [edits, copies, one("New chat from here", () => actions.startAgain(index))];
    const continues = this.isLast && isCut(turn) && turn.content && !turn.json && !turn.calls && turn.code !== "context_length_exceeded";
    return [
      ...(continues ? [button("Continue", () => actions.continue(), { name: `Continue, ${where}`, className: "" })] : []),
      one(turn.problem ? "Try again" : "Regenerate", () => actions.regenerate(index)),
      edits,
      copies,
    ];
  }
}

function fileElement({ name, text }) {
  const size = bytes(new TextEncoder().encode(text).length);
  return make("details", { className: "file" }, make("summary", {}, `${name}, ${size}`), make("pre", { tabIndex: 0 }, text.length > 20000 ? `${text.slice(0, 20000)}\n…` : text));
}
