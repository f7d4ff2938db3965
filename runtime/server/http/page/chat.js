// The conversation that is shown: its messages, and what a person does with them.

import { $, announce, button, make } from "./dom.js";
import { Conversation } from "./conversation.js";
import { dismiss } from "./notice.js";
import { askForKey } from "./server.js";
import { loadSettings } from "./settings.js";
import { hearTabs } from "./store.js";
import { tab } from "./tab.js";
import { TurnView } from "./turns.js";

const answering = new Map(); // id -> a conversation whose answer arrives, shown or not
const unsaved = new Map(); // id -> a conversation that the browser had no room for
const listeners = { shown: [], saved: [], started: [], ended: [] };
let views = [], frame = 0;

/** The conversation that is shown. */
export let current = Conversation.fresh();

/** Calls back on "shown" (another chat is), "saved" (the history has changed), "started" (an answer is on its way),
    "ended" (it is over). */
export const on = (what, run) => listeners[what].push(run);
const tell = (what) => { for (const run of listeners[what]) run(); };
export const isAnswering = (id) => answering.has(id);

/** Returns the rows of chats that the history lacks: the browser had no room for them. */
export const unsavedRows = () => [...unsaved.values()].map((conversation) => conversation.chat);

/** Tries again to save them. */
export async function saveUnsaved() {
  for (const conversation of [current, ...unsaved.values()]) await keep(conversation);
}

/** Saves a conversation, and holds on to one that can't be saved. */
async function keep(conversation) {
  await conversation.flush();
  const { id } = conversation.chat, before = unsaved.has(id);
  if (conversation.unsaved < Infinity && conversation.turns.length) unsaved.set(id, conversation);
  else unsaved.delete(id);
  if (before !== unsaved.has(id)) tell("saved");
}

const scroller = $("chat");
const toEnd = () => { follows = true; scroller.scrollTop = scroller.scrollHeight; };
let follows = true; // whether the end stays in view as messages grow: until somebody scrolls away from it

scroller.addEventListener("scroll", () => { follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 120; });
new ResizeObserver(() => { if (follows) toEnd(); }).observe($("turns"));

// ---- What is shown ---------------------------------------------------------------------------------------------

const EVENTS = { turns: drawTurns, turn: drawSoon, ended: drawTurns, saved: () => tell("saved"), copied: () => { tab.set("shown", current.chat.id); tell("shown"); } };

/** Shows a conversation in place of the one that is shown; an answer of that one goes on arriving. */
export function show(conversation) {
  if (conversation.chat.id === current.chat.id && conversation !== current && current.running) return;
  for (const [type, run] of Object.entries(EVENTS)) {
    current.removeEventListener(type, run);
    conversation.addEventListener(type, run);
  }
  keep(current);
  current = conversation;
  tab.set("shown", conversation.chat.id);
  views = [];
  $("turns").replaceChildren();
  drawTurns();
  toEnd();
  tell("shown");
}

/** Shows a chat of the history; returns whether it is there. */
export async function open(id) {
  if (id === current.chat.id) return true;
  const conversation = answering.get(id) ?? unsaved.get(id) ?? (await Conversation.load(id));
  if (!conversation) return false;
  if (Object.keys(conversation.chat.settings).length) loadSettings(conversation.chat.settings);
  chooseModel(conversation);
  show(conversation);
  return true;
}

/** Selects the model that last answered in a conversation, if the server still has it. */
function chooseModel({ turns }) {
  const model = turns.findLast((turn) => turn.model)?.model;
  const option = [...$("model").options].find(({ value }) => value === model);
  if (!option || option.selected) return;
  option.selected = true;
  $("model").dispatchEvent(new Event("change"));
}

export function startNew(turns = []) {
  show(Conversation.fresh(turns));
  dismiss();
}

function drawTurns() {
  const { turns } = current;
  while (views.length > turns.length) views.pop().element.remove();
  if (views.length) views.at(-1).draw(); // it may be the last one no more
  const fragment = document.createDocumentFragment();
  for (let index = views.length; index < turns.length; index += 1) {
    views.push(new TurnView(current, index, ACTIONS));
    fragment.append(views[index].element);
  }
  $("turns").append(fragment);
  drawState();
}

function drawSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (current.running) views.at(-1)?.update();
  });
}

function drawState() {
  const { turns, running } = current, context = turns.findLast((turn) => turn.context)?.context ?? 0;
  $("empty").hidden = turns.length > 0;
  document.body.classList.toggle("busy", Boolean(running));
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  for (const id of ["export-markdown", "export-json"]) $(id).disabled = !turns.length;
  const most = Number($("context").dataset.most);
  const full = most > 0 && context > 0.9 * most;
  $("context").textContent = context && most ? `${context.toLocaleString("en")} of ${most.toLocaleString("en")} tokens` : "";
  $("context").classList.toggle("full", full);
  $("restart").hidden = !full || Boolean(running);
}

/** Tells how many tokens the model reads and writes in all. */
export function setContext(most) {
  $("context").dataset.most = most;
  drawState();
}

// ---- What is done ----------------------------------------------------------------------------------------------

async function answer(options = {}) {
  const conversation = current, model = $("model").value;
  const answers = conversation.answer(model, options);
  answering.set(conversation.chat.id, conversation);
  announce("The model answers.");
  toEnd();
  tell("started");
  const keyMissing = await answers;
  for (const [id, one] of answering) if (one === conversation) answering.delete(id);
  tell("saved");
  tell("ended");
  if (conversation !== current) return;
  const turn = conversation.turns.at(-1);
  if (keyMissing) {
    if (!(await askForKey("This server doesn't know that key, or needs one."))) return;
    tell("started");
    return answer(options);
  }
  announce(turn.problem ? `It failed: ${turn.problem}` : turn.finish === "stopped" ? "Stopped." : `${turn.model} said: ${turn.content}`);
}

/** Sends a message. `files`: {name, text} of each. Returns whether it was sent. */
export function send(text, files = []) {
  if (current.running || (!text && !files.length) || !$("model").value) return false;
  current.add({ role: "user", content: text, ...(files.length ? { files } : {}) });
  answer();
  return true;
}

export const stop = () => current.stop();

/** Starts a new chat with the messages from one on, and the same parameters; has a question answered. */
function startAgain(index) {
  if (current.running) return;
  const turns = structuredClone(current.turns.slice(index));
  while (turns.length && turns.at(-1).role === "assistant" && turns.at(-1).problem) turns.pop();
  for (const turn of turns) delete turn.context;
  startNew(turns);
  current.changed(0);
  $("say").focus();
  if (turns.at(-1)?.role === "user") answer();
}

const ACTIONS = {
  continue: () => { $("say").focus(); answer({ continued: true }); },
  edit,
  regenerate(index) {
    if (current.running) return;
    current.cut(index);
    $("say").focus();
    answer();
  },
  results(index, texts) {
    const { calls } = current.turns[index];
    calls.forEach((call, at) => current.add({ role: "tool", name: call.name, call: call.id, content: texts[at] }));
    answer();
  },
  startAgain,
};

/** Has a message edited in its place. A user's message is sent again, and what came after it goes. */
function edit(index) {
  if (current.running) return;
  const turn = current.turns[index], mine = turn.role === "user", view = views[index];
  const field = make("textarea", { value: turn.content, rows: Math.min(12, turn.content.split("\n").length + 1) });
  field.setAttribute("aria-label", `Text of message ${index + 1}`);
  const leave = () => {
    view.draw();
    view.element.querySelector(".actions button")?.focus();
  };
  const save = () => {
    const text = field.value.trim();
    if (!text && !turn.files?.length) return;
    if (mine) {
      current.replace(index, { ...turn, content: text });
      current.cut(index + 1);
      $("say").focus();
      answer();
    } else {
      current.replace(index, { ...turn, content: text, problem: undefined, json: undefined });
      leave();
    }
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    else if (event.key === "Escape") leave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const ends = make("div", { className: "ends" }, button("Cancel", leave, { className: "" }), button(mine ? "Send again" : "Save", save, { className: "main" }));
  view.element.replaceChildren(make("h2", {}, view.author), make("div", { className: "editing" }, field, ends));
  field.focus();
}

$("restart").addEventListener("click", () => startAgain(Math.max(current.turns.findLastIndex((turn) => turn.role === "user"), 0)));

// ---- Other tabs, and the end of this one -----------------------------------------------------------------------

let reading = false;
hearTabs(async (id) => {
  tell("saved");
  if (id !== current.chat.id || current.running || reading || current.unsaved < Infinity) return;
  if (document.querySelector(".editing")) return;
  reading = true;
  const conversation = await Conversation.load(id);
  reading = false;
  if (conversation && id === current.chat.id && !current.running && current.unsaved === Infinity) show(conversation);
});

addEventListener("pagehide", () => {
  for (const conversation of new Set([current, ...answering.values()])) conversation.leave();
});

/** Returns whether something would be lost if the tab were closed. */
export const wouldLose = (keepsNothing) => unsaved.size > 0 || (current.turns.length > 0 && (keepsNothing || (current.unsaved < Infinity && !current.timer && !current.saving)));
