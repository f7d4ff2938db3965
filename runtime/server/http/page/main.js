// The page of `optimize serve`: starts its parts, asks the server for its models, and chooses the first chat.

import { $, make, put } from "./dom.js";
import { current, open, setContext, startNew, wouldLose } from "./chat.js";
import { setMessage } from "./composer.js";
import { recover } from "./conversation.js";
import { forgetEngine, lookAgain, lookAtHealth, showState } from "./engine.js";
import { refresh, showHistory } from "./history.js";
import { notifyError } from "./notice.js";
import { editsForm } from "./schema.js";
import { ask, askForKey, hasKey, needsKey } from "./server.js";
import { settings, settingsChanged, showModelDefaults } from "./settings.js";
import { store } from "./store.js";
import { tab } from "./tab.js";
import "./transfer.js";

const RETRY = 3000; // milliseconds between attempts to reach the server
const narrow = matchMedia("(max-width: 900px)");
const contexts = new Map(); // model -> the most tokens of a request and its answer

// ---- Models ----------------------------------------------------------------------------------------------------

async function chooseModel() {
  const name = $("model").value;
  tab.set("model", name);
  put("empty-model", name);
  document.title = `${name} · Enginewright`;
  setContext(contexts.get(name));
  forgetEngine();
  let props = null;
  try {
    props = (await (await ask("props")).json()).models[name];
  } catch { /* a key that may not ask: fields show nothing */ }
  if (name === $("model").value) showModelDefaults(props);
}
$("model").addEventListener("change", chooseModel);

/** Asks the server for its models, until it answers. */
async function begin() {
  lookAgain();
  $("key").hidden = !needsKey;
  if (needsKey && !hasKey() && !(await askForKey())) return;
  try {
    const all = (await (await ask("v1/models")).json()).data, before = tab.get("model", "");
    const chats = all.filter(({ kind }) => (kind ?? "generate") === "generate"), data = chats.length ? chats : all;
    for (const one of data) contexts.set(one.id, one.max_model_len);
    $("model").replaceChildren(...data.map(({ id }) => make("option", { value: id, selected: id === before }, id)));
    put("promise", `It reads and writes up to ${data[0].max_model_len.toLocaleString("en")} tokens in all. What you write stays on this server and in this browser.`);
    chooseModel();
    await lookAtHealth();
  } catch (error) {
    if (error.status === 401 && needsKey) {
      if (await askForKey("This server doesn't know that key.")) await begin();
      return;
    }
    showState("unreachable");
    setTimeout(begin, RETRY);
  }
}

$("key").addEventListener("click", async () => {
  if (await askForKey("Another key replaces the one in use. It stays in this tab, until that is closed.")) begin();
});

// ---- Chats -----------------------------------------------------------------------------------------------------

$("new").addEventListener("click", () => {
  startNew();
  if (narrow.matches) showHistory(false);
  else $("say").focus();
});

async function firstChat() {
  const id = tab.get("shown", "");
  startNew();
  try {
    await recover();
    if (id) await open(id);
  } catch (error) {
    notifyError(`The history can't be read (${error.message}): reload the page.`);
  }
  await refresh();
  if (store.reason) notifyError(`This browser keeps no history (${store.reason}): chats are lost with the tab. Allow this site to store data, or export what you need.`);
}

addEventListener("beforeunload", (event) => { if (wouldLose(Boolean(store.reason))) event.preventDefault(); });

editsForm(settings, settingsChanged);
settingsChanged();
setMessage(tab.get("draft", ""));
await firstChat();
await begin();
if (!document.querySelector("dialog[open]") && !narrow.matches && current.turns.length === 0) $("say").focus();
