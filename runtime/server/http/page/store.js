// The history, in IndexedDB: a row for each chat, and a row for each of its messages.
// Where the browser refuses a database, a store in memory takes its place, and `reason` says why.

const NAME = "enginewright", VERSION = 1;
const PATIENCE = 10000; // milliseconds
const LAST = [[]]; // sorts after every number and text

/** Another tab has written the chat since this one read it, or deleted it. */
export class ConflictError extends Error {}

/** The browser has no room for more. */
export class FullError extends Error {}

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const finished = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = () => reject(transaction.cause ?? (transaction.error?.name === "QuotaExceededError" ? new FullError("the browser's storage is full") : transaction.error));
});

function cancel(transaction, cause) {
  transaction.cause = cause;
  transaction.abort();
}

/** The messages of a chat, from one on. */
const range = (id, from = 0) => IDBKeyRange.bound([id, from], [id, LAST]);

/** Calls `visit` with each value that a cursor reaches, until it returns false. */
function walk(request, visit) {
  return new Promise((resolve, reject) => {
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      const cursor = request.result;
      if (cursor && visit(cursor.value) !== false) cursor.continue();
      else resolve();
    };
  });
}

class DatabaseStore {
  reason = "";

  constructor(database) {
    this.database = database;
  }

  begin(mode = "readonly") {
    const transaction = this.database.transaction(["chats", "messages"], mode, mode === "readonly" ? {} : { durability: "relaxed" });
    const [chats, messages] = ["chats", "messages"].map((name) => transaction.objectStore(name));
    const done = finished(transaction);
    done.catch(() => {}); // it is awaited later
    return { transaction, chats, messages, done };
  }

  /** Returns the chats' rows, the latest first. */
  async list() {
    const rows = await settled(this.begin().chats.getAll());
    return rows.sort((one, other) => other.updated - one.updated);
  }

  /** Returns a chat with its messages, or null if there is no such chat. */
  async load(id) {
    const { chats, messages } = this.begin();
    const [chat, turns] = await Promise.all([settled(chats.get(id)), settled(messages.getAll(range(id)))]);
    return chat ? { chat, turns: turns.map((row) => row.turn) } : null;
  }

  /** Writes a chat's row and its messages from one on; messages after the last one go. Sets the row's new version.
      Raises ConflictError, FullError. */
  async save(chat, turns, from) {
    const { transaction, chats, messages, done } = this.begin("readwrite");
    const version = chat.version + 1;
    const before = chats.get(chat.id);
    before.onsuccess = () => {
      if ((before.result?.version ?? 0) !== chat.version) return cancel(transaction, new ConflictError("another tab has changed this chat"));
      chats.put({ ...chat, version });
      turns.slice(from).forEach((turn, index) => messages.put({ chat: chat.id, at: from + index, turn }));
      messages.delete(range(chat.id, turns.length));
    };
    await done;
    chat.version = version;
  }

  async rename(id, title) {
    const { chats, done } = this.begin("readwrite");
    const row = await settled(chats.get(id));
    if (row) chats.put({ ...row, title, version: row.version + 1 });
    await done;
  }

  async remove(id) {
    const { chats, messages, done } = this.begin("readwrite");
    chats.delete(id);
    messages.delete(range(id));
    await done;
  }

  /** Returns the ids of chats that have a text in a message; `wanted` returns false when nobody waits any more. */
  async search(text, wanted) {
    const ids = new Set(), needle = text.toLowerCase();
    await walk(this.begin().messages.openCursor(), ({ chat, turn }) => {
      if (!ids.has(chat) && turn.content.toLowerCase().includes(needle)) ids.add(chat);
      return wanted();
    });
    return ids;
  }
}

/** The same in memory, for a browser that keeps nothing. */
class MemoryStore {
  chats = new Map();

  constructor(reason) {
    this.reason = reason;
  }
  async list() {
    return [...this.chats.values()].map((one) => one.chat).sort((one, other) => other.updated - one.updated);
  }
  async load(id) {
    return structuredClone(this.chats.get(id) ?? null);
  }
  async save(chat, turns) {
    chat.version += 1;
    this.chats.set(chat.id, structuredClone({ chat, turns }));
  }
  async rename(id, title) {
    if (this.chats.has(id)) this.chats.get(id).chat.title = title;
  }
  async remove(id) {
    this.chats.delete(id);
  }
  async search(text) {
    const needle = text.toLowerCase();
    return new Set([...this.chats].filter(([, { turns }]) => turns.some((turn) => turn.content.toLowerCase().includes(needle))).map(([id]) => id));
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("chats", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: ["chat", "at"] });
    };
    request.onblocked = () => reject(new Error("another tab has an older version of this page open: close it and reload"));
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
  });
}

/** Opens the history. A browser that never answers doesn't keep the page from starting. */
async function open() {
  const late = new Promise((_, reject) => { setTimeout(() => reject(new Error("it doesn't answer")), PATIENCE); });
  try {
    return new DatabaseStore(await Promise.race([opened(), late]));
  } catch (error) {
    return new MemoryStore(error.message || "it is switched off");
  }
}

export const store = await open();

/** Tells the other tabs that a chat has changed, and hears it from them. */
const channel = new BroadcastChannel("enginewright");
export const tellTabs = (id) => channel.postMessage(id);
export const hearTabs = (heard) => channel.addEventListener("message", (event) => heard(event.data));
