// Export and import. A history is a file of lines: one that names the format, then one JSON object for each chat. So a
// history of any size is read and written piece by piece.

import { $, bytes, count, download, identifier } from "./dom.js";
import { current } from "./chat.js";
import { titleOf } from "./conversation.js";
import { refresh } from "./history.js";
import { notify, notifyError } from "./notice.js";
import { samplingFields, settings } from "./settings.js";
import { FullError, store } from "./store.js";
import { about } from "./turns.js";

const FORMAT = "enginewright-history", VERSION = 1;
const MOST_LINE = 64e6; // characters of a chat
const ROLES = new Set(["user", "assistant", "tool"]);
const menu = $("export");

// ---- Export ----------------------------------------------------------------------------------------------------

$("export-json").addEventListener("click", () => {
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const { role, content, files, reasoning, calls, call, name, model, fingerprint, seed, finish, usage } of current.turns)
    messages.push({ role, content, files, reasoning, tool_calls: calls, tool_call_id: call, name, model, system_fingerprint: fingerprint, seed, finish_reason: finish, usage });
  const exported = { exported: new Date().toISOString(), server: location.origin, title: current.chat.title, parameters: samplingFields(), messages };
  download("conversation.json", "application/json", [`${JSON.stringify(exported, null, 2)}\n`]);
  menu.open = false;
});

$("export-markdown").addEventListener("click", () => {
  const parts = [`# ${current.chat.title || "Conversation"}\n`];
  if (settings.system) parts.push(`## System\n\n${settings.system}\n`);
  for (const turn of current.turns) {
    const author = turn.role === "user" ? "User" : turn.role === "tool" ? `Result of ${turn.name}` : turn.model || "Assistant";
    parts.push(`## ${author}\n\n${turn.content}\n`);
    for (const { name, text } of turn.files ?? []) parts.push(`File ${name}:\n\n~~~~~~\n${text}\n~~~~~~\n`);
    for (const call of turn.calls ?? []) parts.push(`Calls ${call.name}:\n\n~~~~~~json\n${call.arguments}\n~~~~~~\n`);
    if (turn.role === "assistant" && about(turn).length) parts.push(`_${about(turn).join(" · ")}_\n`);
  }
  download("conversation.md", "text/markdown", [parts.join("\n")]);
  menu.open = false;
});

$("export-all").addEventListener("click", async () => {
  menu.open = false;
  try {
    await current.flush();
    const rows = await store.list(), parts = [`${JSON.stringify({ format: FORMAT, version: VERSION })}\n`];
    for (const { id } of rows) {
      const row = await store.load(id);
      if (row) parts.push(new Blob([`${JSON.stringify({ ...row.chat, version: undefined, turns: row.turns })}\n`])); // a blob may lie on the disk
    }
    download("history.jsonl", "application/jsonl", parts);
    notify(`${count(rows.length, "chat")} exported as history.jsonl.`);
  } catch (error) {
    notifyError(`The history can't be exported (${error.message}): reload the page, and try again.`);
  }
});

// ---- Import ----------------------------------------------------------------------------------------------------

const NO_HISTORY = "it isn't a history of this page: choose a file that “Export all chats” or “This chat as JSON” has made";

/** A file isn't a history; the message says why, and what to do. */
class FormatError extends Error {}

const isText = (value) => typeof value === "string";
const isNumber = (value) => Number.isFinite(value);
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isTimes = (value) => isObject(value) && isNumber(value.first) && isNumber(value.last);
const isFiles = (value) => Array.isArray(value) && value.every((one) => isObject(one) && isText(one.name) && isText(one.text));
const isCalls = (value) => Array.isArray(value) && value.every((one) => isObject(one) && isText(one.name) && isText(one.arguments) && (one.id === undefined || isText(one.id)));
const isUsage = (value) => isObject(value) && isNumber(value.prompt_tokens) && isNumber(value.completion_tokens);
const isFlag = (value) => typeof value === "boolean";

/** A message's fields besides its role and content, and what each must be. */
const FIELDS = {
  call: isText, calls: isCalls, code: isText, context: isNumber, files: isFiles, finish: isText, fingerprint: isText, json: isFlag,
  model: isText, name: isText, problem: isText, reasoning: isText, seconds: isTimes, seed: isText, thought: isTimes, usage: isUsage,
};

/** The names that fields have in an exported chat, and in requests. */
const RENAMED = { tool_calls: "calls", tool_call_id: "call", system_fingerprint: "fingerprint", finish_reason: "finish", reasoning_content: "reasoning" };

function importedTurn(message, where) {
  if (!isObject(message) || !ROLES.has(message.role)) throw new FormatError(`${where} isn't a message of a user, an assistant or a tool`);
  const turn = { role: message.role, content: message.content ?? "" };
  if (!isText(turn.content)) throw new FormatError(`${where} has content that isn't text`);
  for (const [name, value] of Object.entries(message)) {
    const field = RENAMED[name] ?? name;
    const plain = field === "calls" && Array.isArray(value) ? value.map((one) => ({ id: one?.id, ...(isObject(one?.function) ? one.function : one) })) : value;
    if (Object.hasOwn(FIELDS, field) && plain !== null && FIELDS[field](plain)) turn[field] = plain;
  }
  return turn;
}

/** Returns a chat of a parsed line or file. Raises FormatError. */
function importedChat(value, where) {
  const messages = value?.turns ?? value?.messages;
  if (!isObject(value) || !Array.isArray(messages)) throw new FormatError(`${where} isn't a chat`);
  const system = messages.filter((message) => message?.role === "system");
  const turns = messages.filter((message) => message?.role !== "system").map((message, index) => importedTurn(message, `${where}, message ${index + 1},`));
  const now = Date.now();
  const own = isObject(value.settings) ? value.settings : isObject(value.parameters) ? value.parameters : {};
  const plain = Object.entries(own).filter(([, one]) => isText(one) || isNumber(one) || isFlag(one));
  const chat = {
    id: isText(value.id) && value.id.length <= 100 ? value.id : identifier(),
    title: isText(value.title) && value.title ? value.title.slice(0, 200) : titleOf(turns),
    created: isNumber(value.created) ? value.created : now,
    updated: isNumber(value.updated) ? value.updated : now,
    model: isText(value.model) ? value.model : "",
    settings: { ...Object.fromEntries(plain), ...(isFormat(own.format) ? { format: own.format } : {}), ...(isText(system[0]?.content) ? { system: system[0].content } : {}) },
    version: 0,
  };
  return { chat, turns };
}

function isFormat(value) {
  return isObject(value) && (value.kind === "object" || (value.kind === "schema" && isText(value.schema) && parsed(value.schema, "") !== null));
}

function parsed(line, where) {
  try {
    return JSON.parse(line);
  } catch {
    if (where) throw new FormatError(`${where} isn't JSON`);
    return null;
  }
}

/** Yields the lines of a file, each with its number and the share of the file that was read. Raises FormatError. */
async function* lines(file) {
  const reader = file.stream().pipeThrough(new TextDecoderStream("utf-8", { fatal: true })).getReader();
  let pieces = [], length = 0, number = 0, read = 0;
  try {
    for (;;) {
      const { value = "", done } = await next(reader);
      read += value.length;
      const parts = value.split("\n");
      for (const [at, part] of parts.entries()) {
        pieces.push(part);
        length += part.length;
        if (length > MOST_LINE) throw new FormatError(number ? `line ${number + 1} is too long for a chat` : NO_HISTORY);
        if (at === parts.length - 1 && !done) break;
        const line = pieces.join("");
        pieces = [];
        length = 0;
        number += 1;
        if (line.trim()) yield { line, number, share: Math.min(1, read / file.size) };
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw new FormatError(error.name === "TypeError" ? "it isn't text" : "it can't be read: choose it again");
  }
}

/** Yields the chats of a file. Raises FormatError. */
async function* chats(file) {
  let first = true;
  for await (const { line, number, share } of lines(file)) {
    const header = first ? parsed(line, "") : null;
    if (first && header?.format !== FORMAT) {
      yield { ...(await singleChat(file)), share: 1 };
      return;
    }
    if (first && header.version !== VERSION) throw new FormatError(`it has version ${header.version} of the format, and this page reads version ${VERSION}: reload the page from a newer server`);
    if (!first) yield { ...importedChat(parsed(line, `line ${number}`), `line ${number}`), share };
    first = false;
  }
  if (first) throw new FormatError("it is empty");
}

/** Reads a file that is one chat, as "This chat as JSON" writes it. */
async function singleChat(file) {
  const value = file.size > MOST_LINE ? null : parsed(await file.text(), "");
  if (!Array.isArray(value?.messages)) throw new FormatError(NO_HISTORY);
  return importedChat(value, "it");
}

let stopped = false;

async function importFile(file) {
  stopped = false;
  let added = 0, known = 0;
  const progress = (what, share) => notify(`${what} ${file.name}, ${bytes(file.size)}: ${Math.floor(100 * share)} %`, { Stop: () => { stopped = true; } });
  let shown = -1;
  const say = (what, share) => { if (Math.floor(100 * share) !== shown) progress(what, share); shown = Math.floor(100 * share); };
  try {
    for await (const { share } of chats(file)) { // all of it is looked at before any of it is written
      say("Checking", share);
      if (stopped) return notify("The import is stopped; nothing was imported.");
    }
    const ids = new Map((await store.list()).map((row) => [row.id, row.updated]));
    for await (const { chat, turns, share } of chats(file)) {
      say("Importing", share);
      if (stopped) return notify(`The import is stopped; ${count(added, "chat")} were imported.`);
      if (ids.get(chat.id) === chat.updated) known += 1;
      else {
        if (ids.has(chat.id)) Object.assign(chat, { id: identifier(), title: `${chat.title} (imported)` });
        await store.save(chat, turns, 0);
        added += 1;
      }
    }
    notify(`${count(added, "chat")} imported${known ? `; ${known} of the file were here already` : ""}.`);
  } catch (error) {
    const imported = added ? ` ${count(added, "chat")} of it were imported.` : "";
    if (error instanceof FullError) notifyError(`The browser's storage is full: delete chats, then import ${file.name} again.${imported}`);
    else notifyError(`${file.name} isn't imported: ${error.message}.${imported}`);
  } finally {
    refresh();
  }
}

$("import").addEventListener("click", () => {
  menu.open = false;
  $("import-file").click();
});
$("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (file) await importFile(file);
  event.target.value = "";
});

// ---- The menu --------------------------------------------------------------------------------------------------

document.addEventListener("click", (event) => { if (!menu.contains(event.target)) menu.open = false; });
menu.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  menu.open = false;
  menu.querySelector("summary").focus();
});
