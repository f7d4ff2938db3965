// A chat: its messages, the answer that arrives, and its place in the history. What shows it listens to its events:
// "turns" (messages were added or removed), "turn" (the last one has more), "ended" (an answer is over), "saved".

import { identifier } from "./dom.js";
import { notifyError } from "./notice.js";
import { ask, encoded, events, needsKey, ServerError } from "./server.js";
import { requestFields, settings } from "./settings.js";
import { ConflictError, FullError, store, tellTabs } from "./store.js";

const SAVE_EVERY = 250; // milliseconds, while an answer arrives
const TITLE_CHARACTERS = 60;
const LEFT = "enginewright-left-"; // in localStorage: what a closing tab hadn't saved

/** Returns the text of a user's message as the model gets it: its files first. */
function withFiles({ content, files }) {
  if (!files?.length) return content;
  const fence = (text) => "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return [...files.map(({ name, text }) => `File ${name}:\n${fence(text)}\n${text}\n${fence(text)}`), content].filter(Boolean).join("\n\n");
}

/** Returns a message of a request. The reasoning of earlier answers isn't a part of it. */
function message({ role, content, files, calls, call }) {
  if (role === "user") return { role, content: withFiles({ content, files }) };
  if (role === "tool") return { role, content, tool_call_id: call };
  if (!calls?.length) return { role, content };
  return { role, content, tool_calls: calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } })) };
}

export class Conversation extends EventTarget {
  /** `turns`: messages of {role, content}. A user's may have files. An assistant's also has model, seed, fingerprint,
      usage, context, finish, seconds, problem, code, calls, reasoning and thought: the seconds at which its reasoning
      begins and ends. A tool's has the call that it answers. */
  constructor(chat, turns = []) {
    super();
    this.chat = chat;
    this.turns = turns;
    this.running = null; // the AbortController of the answer that arrives
    this.unsaved = Infinity; // the first message that isn't in the history
    this.writing = Infinity; // the first message of the save that is under way
    this.saving = null;
    this.timer = 0;
    for (const turn of turns) if (turn.role === "assistant" && !turn.problem) turn.finish ??= "closed"; // its tab was
  }

  static fresh(turns = []) {
    const now = Date.now();
    return new Conversation({ id: identifier(), title: "", created: now, updated: now, version: 0, model: "", settings: {} }, turns);
  }

  static async load(id) {
    const row = await store.load(id);
    return row && new Conversation(row.chat, row.turns);
  }

  tell(type) {
    this.dispatchEvent(new Event(type));
  }

  messages(turns) {
    const sent = settings.system ? [{ role: "system", content: settings.system }] : [];
    return [...sent, ...turns.filter((turn) => turn.role !== "assistant" || turn.content || turn.calls?.length).map(message)];
  }

  add(turn) {
    this.turns.push(turn);
    this.changed(this.turns.length - 1);
    this.tell("turns");
  }

  replace(index, turn) {
    this.turns[index] = turn;
    this.changed(index);
  }

  /** Removes the messages from one on. */
  cut(from) {
    this.turns.length = from;
    this.changed(from);
    this.tell("turns");
  }

  stop() {
    this.running?.abort();
  }

  // ---- The answer ----

  /** Has the model answer what there is, or continue its last answer. Resolves to whether a key is missing. */
  async answer(model, { continued = false } = {}) {
    if (this.running) return false;
    const controller = new AbortController(), fields = requestFields();
    const sent = this.messages(this.turns);
    const turn = continued ? this.turns.at(-1) : { role: "assistant", content: "", model };
    // What an answer that is continued has already: its tokens, and its seconds, by a later begin.
    const before = { tokens: turn.usage?.completion_tokens ?? 0, began: performance.now() - (turn.seconds?.last ?? 0) * 1000 };
    if (continued) {
      for (const name of ["finish", "problem", "code"]) delete turn[name];
      delete fields.response_format; // it describes a whole answer
    }
    if (fields.response_format) turn.json = true;
    Object.assign(this.chat, { model, settings: structuredClone(settings) });
    this.running = controller;
    if (!continued) this.turns.push(turn);
    this.changed(this.turns.length - 1);
    this.tell("turns");
    const body = { model, messages: sent, stream: true, stream_options: { include_usage: true }, ...(continued ? { continue_final_message: true } : {}), ...fields };
    let keyMissing = false;
    try {
      const response = await ask("v1/chat/completions", { method: "POST", body: encoded(body), signal: controller.signal });
      await this.read(response, turn, before);
      if (!turn.finish) turn.finish = "stop";
    } catch (error) {
      if (error.name === "AbortError") turn.finish = "stopped";
      else if (error.status === 401 && needsKey) keyMissing = true;
      else fail(turn, error);
    }
    this.running = null;
    if (keyMissing && !continued) this.turns.pop();
    this.changed(this.turns.length - 1);
    this.tell("ended");
    await this.flush();
    return keyMissing;
  }

  async read(response, turn, before) {
    const passed = () => (performance.now() - before.began) / 1000;
    for await (const event of events(response)) {
      if (event.error) throw new ServerError(503, event.error.message, event.error.code);
      if (event.enginewright) turn.seed = event.enginewright.seed;
      turn.fingerprint = event.system_fingerprint;
      if (event.usage) {
        turn.context = event.usage.prompt_tokens + event.usage.completion_tokens;
        turn.usage = { ...event.usage, completion_tokens: event.usage.completion_tokens + before.tokens };
      }
      for (const choice of event.choices) {
        const { content, reasoning, tool_calls: calls } = choice.delta;
        if (reasoning) {
          turn.reasoning = (turn.reasoning ?? "") + reasoning;
          turn.thought = { first: turn.thought?.first ?? passed(), last: passed() };
        }
        if (content) turn.content += content;
        for (const call of calls ?? []) addCall(turn, call);
        if (content || reasoning || calls) turn.seconds = { first: turn.seconds?.first ?? passed(), last: passed() };
        turn.finish = choice.finish_reason ?? turn.finish;
      }
      this.changed(this.turns.length - 1);
      this.tell("turn");
    }
  }

  // ---- The history ----

  /** Notes that messages from one on have to be written, which happens soon. */
  changed(from) {
    this.unsaved = Math.min(this.unsaved, Math.max(from, 0));
    this.chat.updated = Date.now();
    this.chat.title ||= titleOf(this.turns);
    if (!this.timer) this.timer = setTimeout(() => this.flush(), SAVE_EVERY);
  }

  /** Writes what isn't in the history. */
  async flush() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.saving ??= this.write().finally(() => { this.saving = null; });
    await this.saving;
  }

  async write() {
    while (this.unsaved < Infinity && (this.turns.length || this.chat.version)) {
      const from = this.writing = this.unsaved;
      this.unsaved = Infinity;
      try {
        await store.save(this.chat, this.turns, from);
      } catch (error) {
        this.unsaved = Math.min(this.unsaved, from);
        if (!(error instanceof ConflictError)) return sayUnsaved(error);
        this.becomeCopy();
        continue;
      } finally {
        this.writing = Infinity;
      }
      tellTabs(this.chat.id);
      this.tell("saved");
    }
  }

  /** Goes on as a chat of its own: another tab has changed or deleted the one in the history. */
  becomeCopy() {
    const { title } = this.chat;
    Object.assign(this.chat, { id: identifier(), version: 0, title: `${title} (copy)` });
    this.unsaved = 0;
    this.tell("copied");
    notifyError(`Another tab has changed “${title}”. This tab goes on with a copy; both are in the history.`);
  }

  /** Leaves what isn't written yet for the next visit: a closing tab has no time for the database, and a browser
      aborts a save that is under way. */
  leave() {
    const from = Math.min(this.unsaved, this.writing);
    if (from === Infinity || !this.turns.length || store.reason) return;
    const left = { chat: this.chat, from, turns: this.turns.slice(from) };
    try {
      localStorage.setItem(LEFT + this.chat.id, JSON.stringify(left));
    } catch { /* no room: the last moment of an answer is lost */ }
  }
}

function addCall(turn, { index, id, function: part }) {
  turn.calls ??= [];
  const call = (turn.calls[index] ??= { id, name: "", arguments: "" });
  if (part?.name) call.name = part.name;
  call.arguments += part?.arguments ?? "";
}

function fail(turn, error) {
  turn.code = error.code ?? "";
  turn.problem = error.status ? error.message : "The connection was lost. Is the server running? What was written is kept.";
}

function sayUnsaved(error) {
  if (error instanceof FullError) notifyError("The browser's storage is full, so this chat isn't saved. Delete chats from the history, or export this one.");
  else notifyError(`This chat isn't saved (${error.message}). Export it, then reload the page.`);
}

export function titleOf(turns) {
  const first = turns.find((turn) => turn.role === "user");
  const line = (first?.content || first?.files?.[0]?.name || "").trim().split("\n")[0];
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS - 1)}…` : line;
}

/** Takes what closing tabs have left into the history. */
export async function recover() {
  let names = [];
  if (store.reason) return; // they stay where they are, for a visit with a history
  try {
    names = Object.keys(localStorage).filter((name) => name.startsWith(LEFT));
  } catch { /* forbidden */ }
  for (const name of names) {
    try {
      const left = JSON.parse(localStorage.getItem(name));
      // A save of the page that has just ended may finish in between.
      await takeIn(left).catch((error) => { if (!(error instanceof ConflictError)) throw error; return takeIn(left); });
    } catch (error) {
      if (error instanceof FullError) { sayUnsaved(error); continue; } // it stays for the next visit
    }
    localStorage.removeItem(name);
  }
}

async function takeIn({ chat, from, turns }) {
  const row = await store.load(chat.id);
  const newest = row && row.chat.version - chat.version <= 1; // a save may have been under way
  const all = [...(row?.turns ?? []).slice(0, from), ...turns];
  const target = newest || !row ? { ...chat, version: row?.chat.version ?? 0 } : { ...chat, id: identifier(), version: 0, title: `${chat.title} (copy)` };
  await store.save(target, all, newest ? Math.min(from, row.turns.length) : 0);
}
