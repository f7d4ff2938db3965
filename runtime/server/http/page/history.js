// The list of chats: search, rename, delete. What is deleted can be brought back until the next line replaces the offer.

import { $, button, make } from "./dom.js";
import { current, isAnswering, on, open, saveUnsaved, startNew, unsavedRows } from "./chat.js";
import { notify, notifyError } from "./notice.js";
import { store, tellTabs } from "./store.js";
import { tab } from "./tab.js";

const PAUSE = 200; // milliseconds between the last key and a search through all messages
const narrow = matchMedia("(max-width: 900px)");
let rows = [], matches = null, searches = 0, timer = 0, renaming = "";

const DAY = 86400000;
const days = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });
const daysOfYears = new Intl.DateTimeFormat("en", { day: "numeric", month: "short", year: "numeric" });
const times = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

function when(time) {
  const date = new Date(time), now = new Date();
  if (Number.isNaN(date.getTime())) return ""; // of an imported chat, say
  if (date.toDateString() === now.toDateString()) return times.format(date);
  return (now - date < 300 * DAY ? days : daysOfYears).format(date);
}

// ---- Whether it is shown ---------------------------------------------------------------------------------------

export function showHistory(open, { focus = false } = {}) {
  document.body.classList.toggle("history-open", open);
  $("history-toggle").setAttribute("aria-expanded", String(open));
  if (!narrow.matches) tab.set("history", open);
  if (open && focus) $("search").focus();
  if (!open && focus) $("history-toggle").focus();
}

const isShown = () => document.body.classList.contains("history-open");
$("history-toggle").addEventListener("click", () => showHistory(!isShown(), { focus: true }));
$("history-close").addEventListener("click", () => showHistory(false, { focus: true }));
$("history").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !narrow.matches) return;
  event.stopPropagation();
  showHistory(false, { focus: true });
});
narrow.addEventListener("change", () => showHistory(!narrow.matches && tab.get("history", true)));
showHistory(!narrow.matches && tab.get("history", true));

// ---- The list --------------------------------------------------------------------------------------------------

export async function refresh() {
  try {
    const saved = await store.list(), ids = new Set(saved.map((row) => row.id));
    rows = [...unsavedRows().filter((row) => !ids.has(row.id)), ...saved];
  } catch (error) {
    return notifyError(`The history can't be read (${error.message}): reload the page.`);
  }
  draw();
}

function visible() {
  const text = $("search").value.trim().toLowerCase();
  return text ? rows.filter((row) => row.title.toLowerCase().includes(text) || matches?.has(row.id)) : rows;
}

function draw() {
  if (renaming) return;
  const shown = visible(), focused = document.activeElement?.closest?.("#chats li")?.dataset.id;
  $("chats").replaceChildren(...shown.map(rowElement));
  if (focused) $("chats").querySelector(`[data-id="${CSS.escape(focused)}"] button`)?.focus();
  const text = $("search").value.trim();
  $("no-chats").textContent = shown.length ? "" : text ? "No chat has this text." : "Chats appear here. They stay in this browser.";
  $("no-chats").hidden = shown.length > 0;
}

function rowElement(row) {
  const title = row.title || "Chat", item = make("li");
  item.dataset.id = row.id;
  const opens = make("button", { type: "button", className: "open" }, make("span", {}, title), make("small", {}, isAnswering(row.id) ? "answering…" : when(row.updated)));
  if (row.id === current.chat.id) opens.setAttribute("aria-current", "true");
  opens.addEventListener("click", () => choose(row.id));
  const renames = iconButton("pencil", `Rename ${title}`, () => rename(row, item));
  const removes = iconButton("trash", `Delete ${title}`, () => remove(row));
  item.append(opens, renames, removes);
  return item;
}

function iconButton(icon, name, run) {
  const element = button("", run, { name, className: "icon" });
  element.title = name.split(" ")[0];
  element.append($(`icon-${icon}`).content.cloneNode(true));
  return element;
}

async function choose(id) {
  try {
    if (!(await open(id))) notifyError("Another tab has deleted this chat.");
  } catch (error) {
    notifyError(`This chat can't be read (${error.message}): reload the page.`);
  }
  if (narrow.matches) showHistory(false);
  refresh();
}

function rename(row, item) {
  const field = make("input", { value: row.title, maxLength: 200 });
  field.setAttribute("aria-label", "Title of the chat");
  renaming = row.id;
  const end = async (save) => {
    if (!renaming) return;
    renaming = "";
    const title = field.value.trim();
    if (save && title && title !== row.title) await setTitle(row.id, title);
    await refresh();
    $("chats").querySelector(`[data-id="${CSS.escape(row.id)}"] .icon`)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  item.replaceChildren(field);
  field.select();
}

async function setTitle(id, title) {
  try {
    if (id === current.chat.id) {
      current.chat.title = title;
      current.changed(current.turns.length);
      await current.flush();
    } else {
      await store.rename(id, title);
      tellTabs(id);
    }
  } catch (error) {
    notifyError(`It isn't renamed (${error.message}).`);
  }
}

async function remove(row) {
  if (isAnswering(row.id)) return notify("Its answer is still on its way: stop it first.");
  try {
    if (row.id === current.chat.id) await current.flush();
    const whole = await store.load(row.id);
    await store.remove(row.id);
    if (row.id === current.chat.id) startNew();
    tellTabs(row.id);
    await refresh();
    $("search").focus();
    notify(`“${row.title || "Chat"}” is deleted.`, { Undo: () => bringBack(whole) });
    await saveUnsaved(); // there may be room now
  } catch (error) {
    notifyError(`It isn't deleted (${error.message}): reload the page.`);
  }
}

async function bringBack({ chat, turns }) {
  try {
    await store.save({ ...chat, version: 0 }, turns, 0);
  } catch (error) {
    return notifyError(`It can't be brought back (${error.message}).`, { "Try again": () => bringBack({ chat, turns }) });
  }
  tellTabs(chat.id);
  refresh();
}

// ---- Search ----------------------------------------------------------------------------------------------------

$("search").addEventListener("input", () => {
  clearTimeout(timer);
  matches = null;
  draw();
  const text = $("search").value.trim(), number = ++searches;
  if (text) timer = setTimeout(() => searchMessages(text, number), PAUSE);
});

async function searchMessages(text, number) {
  try {
    const ids = await store.search(text, () => number === searches);
    if (number !== searches) return;
    matches = ids;
    draw();
  } catch (error) {
    notifyError(`The history can't be searched (${error.message}): reload the page.`);
  }
}

on("shown", draw);
on("saved", refresh);
on("started", draw);
