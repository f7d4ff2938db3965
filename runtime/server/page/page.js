"use strict";
// The page of `optimize serve`: a conversation, and a view of the engine. All text goes into text nodes; the server's
// policy has the browser refuse anything else.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** An element with properties and children; strings become text nodes. */
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Says something to those who don't see the page. */
function announce(text) {
  $("said").textContent = text;
}

// ---- What a tab keeps ------------------------------------------------------------------------------------------

const kept = {
  get(name, otherwise) {
    try {
      return JSON.parse(sessionStorage.getItem(`enginewright-${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(`enginewright-${name}`, JSON.stringify(value));
    } catch { /* full, or forbidden: the page does without */ }
  },
};

// ---- Asking the server -----------------------------------------------------------------------------------------

const needsKey = document.documentElement.dataset.keys === "yes";

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const key = kept.get("key", "");
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `the server said ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* it isn't ours: a gateway's, say */ }
  throw new ServerError(response.status, message);
}

/** Asks for a key; resolves to whether there is a new one. */
function askForKey(why) {
  const dialog = $("ask-key"), field = $("key-field");
  if (why) $("key-why").textContent = why;
  field.value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}

$("ask-key").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  kept.set("key", $("key-field").value.trim());
  $("ask-key").close("given");
});
$("key-cancel").addEventListener("click", () => $("ask-key").close("none"));
$("key").addEventListener("click", async () => {
  if (await askForKey("Another key replaces the one in use. It stays in this tab, until that is closed.")) begin();
});

// ---- The conversation ------------------------------------------------------------------------------------------

/** Turns: {role, content}; an assistant's also has model, seed, fingerprint, usage, finish, seconds, problem, reasoning,
    and thought: the seconds at which its reasoning begins and ends. */
let turns = kept.get("turns", []);
for (const turn of turns) if (turn.role === "assistant" && !turn.problem) turn.finish ??= "stopped"; // with the page
let running = null; // the AbortController of the answer that comes
const settings = { speculate: true, ...kept.get("settings", {}) };
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty"];

/** Settings as fields of a request. */
function parameters() {
  const found = {};
  for (const name of NUMBERS) if (settings[name] !== undefined && settings[name] !== "") found[name] = name === "seed" ? settings[name] : Number(settings[name]);
  if (settings.stop) found.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.request_class) found.request_class = settings.request_class;
  if (!settings.speculate) found.speculate = false;
  return found;
}

/** A request as JSON. A seed has up to 64 bits, more than JavaScript's numbers hold: it stays text, here and below. */
function encoded({ seed, ...body }) {
  const text = JSON.stringify(body);
  return /^\d+$/.test(seed ?? "") ? `${text.slice(0, -1)},"seed":${seed}}` : text;
}

function decoded(text) {
  return JSON.parse(text.replace(/"seed":(\d+)/, '"seed":"$1"'));
}

/** What the model is sent: the system message, and the turns that have a text. */
function messages(before) {
  const found = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns.slice(0, before)) if (turn.content) found.push({ role: turn.role, content: turn.content });
  return found;
}

function keepTurns() {
  kept.set("turns", turns);
}

/** A text with its code, lists and emphasis as elements. Whatever else it has is text. */
function formatted(text) {
  const out = document.createDocumentFragment();
  let list = null, paragraph = null, code = null;
  const ends = () => { list = paragraph = null; };
  for (const line of text.split("\n")) {
    if (code) {
      if (/^\s*```\s*$/.test(line)) code = null;
      else code.append(code.hasChildNodes() ? `\n${line}` : line);
      continue;
    }
    const fence = /^\s*```\s*([\w+#.-]*)\s*$/.exec(line);
    if (fence) {
      ends();
      code = make("code");
      out.append(make("pre", { tabIndex: 0 }, code));
      continue;
    }
    const heading = /^#{1,6}\s+(.*)$/.exec(line), item = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/.exec(line);
    if (heading) {
      ends();
      out.append(make("p", { className: "heading" }, ...inline(heading[1])));
    } else if (item) {
      const tag = item[1] ? "OL" : "UL";
      if (!list || list.tagName !== tag) {
        ends();
        list = make(tag, item[1] ? { start: Number(item[1]) } : {});
        out.append(list);
      }
      list.append(make("li", {}, ...inline(item[2])));
    } else if (!line.trim()) {
      paragraph = null;
    } else {
      if (!paragraph) {
        ends();
        paragraph = make("p");
        out.append(paragraph);
      } else paragraph.append("\n");
      paragraph.append(...inline(line));
    }
  }
  return out;
}

/** A line's pieces: `code`, **strong** and text. */
function inline(line) {
  return line.split(/(`[^`]+`|\*\*[^*]+\*\*)/).filter(Boolean).map((piece) => {
    if (piece.length > 2 && piece.startsWith("`") && piece.endsWith("`")) return make("code", {}, piece.slice(1, -1));
    if (piece.length > 4 && piece.startsWith("**") && piece.endsWith("**")) return make("strong", {}, piece.slice(2, -2));
    return document.createTextNode(piece);
  });
}

const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

/** What is said below an answer. */
function about(turn) {
  const said = [];
  const { usage, seconds } = turn;
  if (usage) {
    said.push(count(usage.completion_tokens, "token"));
    if (seconds && usage.completion_tokens > 1 && seconds.last > seconds.first)
      said.push(`${rounded((usage.completion_tokens - 1) / (seconds.last - seconds.first))} a second`);
    if (seconds?.first !== undefined) said.push(`first after ${rounded(seconds.first)} s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    said.push(`prompt ${usage.prompt_tokens.toLocaleString("en")}${cached ? `, ${cached.toLocaleString("en")} from the cache` : ""}`);
    const guessed = usage.completion_tokens_details;
    const right = guessed?.accepted_prediction_tokens ?? 0, wrong = guessed?.rejected_prediction_tokens ?? 0;
    if (right + wrong) said.push(`${right} of ${right + wrong} computed ahead were right`);
  }
  if (turn.finish === "length") said.push("ended at the limit");
  if (turn.finish === "stopped") said.push("stopped");
  if (turn.seed !== undefined) said.push(`seed ${turn.seed}`);
  return said;
}

function rounded(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function action(label, name, run) {
  const button = make("button", { type: "button", className: "quiet" }, label);
  button.setAttribute("aria-label", name);
  button.addEventListener("click", run);
  return button;
}

/** The reasoning of an answer, folded unless it was unfolded, with the time that it took. */
function reasoning(turn, live) {
  const seconds = `${rounded(turn.thought.last - turn.thought.first)} s`;
  const folded = make("details", { className: "reasoning", open: Boolean(turn.unfolded) },
    make("summary", {}, live ? `Reasoning, ${seconds}…` : `Reasoned for ${seconds}`), make("div", {}, turn.reasoning));
  folded.addEventListener("toggle", () => { turn.unfolded = folded.open; });
  return folded;
}

/** The element of a turn, made anew. */
function shown(index) {
  const turn = turns[index], mine = turn.role === "user";
  const article = make("article", { className: mine ? "user" : "assistant" });
  const who = mine ? "You" : turn.model || "Assistant";
  article.setAttribute("aria-label", `${who}, message ${index + 1}`);
  const body = make("div", { className: "body" });
  if (mine) body.append(turn.content);
  else body.append(formatted(turn.content));
  const live = running && index === turns.length - 1 && !mine;
  article.append(make("h3", {}, who), turn.reasoning ? reasoning(turn, live && !turn.content) : null, body);
  article.setAttribute("aria-busy", String(Boolean(live)));
  if (live && !turn.content) body.append(make("span", { className: "dots", ariaLabel: "The answer has not begun" }, "…"));
  if (turn.problem) article.append(make("p", { className: "problem" }, turn.problem));
  if (!live) {
    if (!mine) {
      const said = make("p", { className: "about" }, ...about(turn).map((piece) => make("span", {}, piece)));
      if (said.hasChildNodes()) article.append(said);
    }
    const where = `message ${index + 1}`;
    article.append(make("div", { className: "actions" },
      action("Edit", `Edit ${where}`, () => edit(index)),
      mine ? null : action(turn.problem ? "Try again" : "Regenerate", `Regenerate ${where}`, () => regenerate(index)),
      action("Copy", `Copy ${where}`, () => copy(turn.content))));
  }
  return article;
}

function showAll() {
  $("turns").replaceChildren(...turns.map((_, index) => shown(index)));
  $("empty").hidden = turns.length > 0;
  for (const id of ["export-markdown", "export-json"]) $(id).disabled = !turns.length;
  keepTurns();
}

function showLast() {
  const at = turns.length - 1, log = $("chat");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  $("turns").children[at].replaceWith(shown(at));
  if (near) log.scrollTop = log.scrollHeight;
}

function busy(controller) {
  running = controller;
  document.body.classList.toggle("busy", Boolean(controller));
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
}

/** The events of a stream, as they come. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the stream has no end");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const line = part.split("\n").find((one) => one.startsWith("data: "));
        if (!line) continue; // a comment, which keeps the connection open
        if (line === "data: [DONE]") return;
        yield decoded(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Has the model answer what there is. */
async function answer() {
  if (running) return;
  const controller = new AbortController(), turn = { role: "assistant", content: "", model: $("model").value };
  const body = { model: turn.model, messages: messages(turns.length), stream: true, stream_options: { include_usage: true }, ...parameters() };
  turns.push(turn);
  busy(controller);
  showAll();
  $("chat").scrollTop = $("chat").scrollHeight;
  announce("The model answers.");
  lookSoon();
  const began = performance.now();
  const passed = () => (performance.now() - began) / 1000;
  let frame = 0;
  try {
    const response = await ask("v1/chat/completions", { method: "POST", body: encoded(body), signal: controller.signal });
    for await (const event of events(response)) {
      if (event.error) throw new ServerError(503, event.error.message);
      if (event.enginewright) turn.seed = event.enginewright.seed;
      turn.fingerprint = event.system_fingerprint;
      if (event.usage) turn.usage = event.usage;
      for (const choice of event.choices) {
        const { content, reasoning } = choice.delta;
        if (reasoning) {
          turn.reasoning = (turn.reasoning ?? "") + reasoning;
          turn.thought = { first: turn.thought?.first ?? passed(), last: passed() };
        }
        if (content) turn.content += content;
        if (content || reasoning) turn.seconds = { first: turn.seconds?.first ?? passed(), last: passed() };
        turn.finish = choice.finish_reason ?? turn.finish;
      }
      if (!frame) frame = requestAnimationFrame(() => { frame = 0; showLast(); });
    }
  } catch (error) {
    if (error.name === "AbortError") turn.finish = "stopped";
    else if (error.status === 401 && needsKey) {
      turns.pop();
      turn.finish = "key";
    } else turn.problem = error.status ? error.message : "The connection was lost. Is the server running?";
  }
  cancelAnimationFrame(frame);
  busy(null);
  const log = $("chat"), near = log.scrollHeight - log.scrollTop - log.clientHeight < 160;
  showAll();
  if (near) log.scrollTop = log.scrollHeight;
  announce(turn.problem ? `It failed: ${turn.problem}` : turn.finish === "stopped" ? "Stopped." : `${turn.model} said: ${turn.content}`);
  if (turn.finish === "key" && (await askForKey("This server doesn't know that key, or needs one."))) {
    await begin();
    await answer();
  }
}

function regenerate(index) {
  if (running) return;
  turns = turns.slice(0, index);
  $("say").focus();
  answer();
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied.");
  } catch {
    announce("The browser doesn't let this page copy.");
  }
}

/** Has a turn edited in its place. A turn of the user is sent again, and what came after it goes. */
function edit(index) {
  if (running) return;
  const turn = turns[index], mine = turn.role === "user", article = $("turns").children[index];
  const field = make("textarea", { value: turn.content, rows: Math.min(12, turn.content.split("\n").length + 1) });
  field.setAttribute("aria-label", `Text of message ${index + 1}`);
  const save = () => {
    const text = field.value.trim();
    if (!text) return;
    turns[index] = mine ? { role: "user", content: text } : { ...turn, content: text, problem: undefined };
    if (mine) turns = turns.slice(0, index + 1);
    showAll();
    if (mine) {
      $("say").focus();
      answer();
    } else $("turns").children[index].querySelector(".actions button").focus();
  };
  const cancel = () => {
    article.replaceWith(shown(index));
    $("turns").children[index].querySelector(".actions button").focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    else if (event.key === "Escape") cancel();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const saves = make("button", { type: "button", className: "main" }, mine ? "Send again" : "Save");
  const cancels = make("button", { type: "button" }, "Cancel");
  saves.addEventListener("click", save);
  cancels.addEventListener("click", cancel);
  article.replaceChildren(make("h3", {}, mine ? "You" : turn.model), make("div", { className: "editing" }, field, make("div", { className: "ends" }, cancels, saves)));
  field.focus();
}

function send() {
  const field = $("say"), text = field.value.trim();
  if (!text || running) return;
  field.value = "";
  grow();
  turns.push({ role: "user", content: text });
  answer();
}

/** The message field is as high as its text, up to a limit. */
function grow() {
  const field = $("say");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 220)}px`;
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("say").addEventListener("input", grow);
$("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => { running?.abort(); $("say").focus(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
});
$("new").addEventListener("click", () => {
  running?.abort();
  turns = [];
  showAll();
  $("say").focus();
});
for (const idea of $("ideas").children) idea.addEventListener("click", () => {
  $("say").value = idea.textContent;
  send();
});

// ---- Export ----------------------------------------------------------------------------------------------------

function download(name, kind, text) {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  $("export").open = false;
}

$("export-json").addEventListener("click", () => {
  const found = { exported: new Date().toISOString(), server: location.origin, parameters: parameters(), messages: [] };
  if (settings.system) found.messages.push({ role: "system", content: settings.system });
  for (const { role, content, reasoning, model, fingerprint, seed, finish, usage } of turns)
    found.messages.push({ role, content, reasoning, model, system_fingerprint: fingerprint, seed, finish_reason: finish, usage });
  download("conversation.json", "application/json", `${JSON.stringify(found, null, 2)}\n`);
});
$("export-markdown").addEventListener("click", () => {
  const parts = ["# Conversation\n"];
  if (settings.system) parts.push(`## System\n\n${settings.system}\n`);
  for (const turn of turns) {
    parts.push(`## ${turn.role === "user" ? "User" : turn.model || "Assistant"}\n\n${turn.content}\n`);
    if (turn.role !== "user" && about(turn).length) parts.push(`_${about(turn).join(" · ")}_\n`);
  }
  download("conversation.md", "text/markdown", parts.join("\n"));
});
document.addEventListener("click", (event) => { if (!$("export").contains(event.target)) $("export").open = false; });
$("export").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  $("export").open = false;
  $("export").querySelector("summary").focus();
});

// ---- Parameters ------------------------------------------------------------------------------------------------

const form = $("settings").querySelector("form");

function saySettings() {
  const said = Object.entries(parameters()).filter(([name]) => name !== "speculate").map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  if (settings.system) said.unshift("system message");
  $("settings-said").textContent = said.length ? `Parameters: ${said.join(", ")}` : "Parameters";
}
function fillSettings() {
  for (const field of form.elements) {
    if (field.type === "checkbox") field.checked = settings[field.name];
    else if (field.name) field.value = settings[field.name] ?? "";
  }
}
form.addEventListener("input", (event) => {
  const field = event.target;
  settings[field.name] = field.type === "checkbox" ? field.checked : field.value;
  kept.set("settings", settings);
  saySettings();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  $("settings").close();
});
$("reset").addEventListener("click", () => {
  for (const name of Object.keys(settings)) delete settings[name];
  settings.speculate = true;
  kept.set("settings", settings);
  fillSettings();
  saySettings();
});
$("set").addEventListener("click", () => { fillSettings(); $("settings").showModal(); });

// ---- The engine ------------------------------------------------------------------------------------------------

const STATES = ["free", "in use", "shared", "kept"];
const CURVE_SECONDS = 120;
let samples = []; // [seconds, tokens a second]
let lastLook = null, timer = 0, maySee = true;

const engineShown = () => !document.body.classList.contains("engine-closed");
const narrow = matchMedia("(max-width: 900px)");

function showEngine(open) {
  document.body.classList.toggle("engine-closed", !open);
  $("toggle").setAttribute("aria-expanded", String(open));
  $("toggle").textContent = narrow.matches ? (open ? "Show chat" : "Show engine") : "Engine";
  if (open) lookSoon();
}
$("toggle").addEventListener("click", () => showEngine(!engineShown()));
narrow.addEventListener("change", () => showEngine(!narrow.matches));

function lookSoon() {
  clearTimeout(timer);
  timer = setTimeout(look, 0);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) lookSoon(); });

let looking = false;
/** Looks at the engine, and again a second later while somebody sees it. */
async function look() {
  if (looking) return;
  looking = true;
  let pause = running ? 500 : 1000;
  try {
    if (!document.hidden && engineShown() && maySee && $("model").value) {
      const model = $("model").value;
      const found = await (await ask(`live?model=${encodeURIComponent(model)}`)).json();
      if (model === $("model").value) showLive(found);
    }
  } catch (error) {
    pause = 3000;
    if (error.status === 403) {
      maySee = false;
      note("This key doesn't show the engine: that takes one with admin = true.");
      if (!narrow.matches) showEngine(false);
    } else if (error.status === 401) note("The engine is shown to those who have a key.");
    else {
      note("The server doesn't answer.");
      showState("unreachable", "");
    }
  }
  if (!maySee) {
    pause = 10000;
    await lookAtHealth();
  }
  looking = false;
  clearTimeout(timer);
  timer = setTimeout(look, pause);
}

/** What everybody may know: which models answer. */
async function lookAtHealth() {
  try {
    const { models } = await (await fetch("health")).json();
    if (!document.hidden) showState(models[$("model").value], "");
  } catch {
    showState("unreachable", "");
  }
}

function note(text) {
  if ($("engine-note").textContent !== text) $("engine-note").textContent = text;
  $("engine-note").hidden = !text;
  $("engine-views").hidden = Boolean(text);
}

function put(id, text) {
  const element = typeof id === "string" ? $(id) : id;
  if (element.textContent !== text) element.textContent = text;
}

function showLive({ model, models, engine }) {
  const state = models[model].state;
  showState(state, models[model].target);
  if (!engine) return note(state === "ready" ? "The engine doesn't answer now." : `The model is ${state}.`);
  note("");
  if (lastLook && (lastLook.model !== model || engine.time < lastLook.time)) { lastLook = null; samples = []; }
  if (lastLook && engine.time > lastLook.time) {
    const passed = engine.time - lastLook.time;
    samples.push([engine.time, (engine.tokens - lastLook.tokens) / passed]);
    samples = samples.filter(([when]) => engine.time - when <= CURVE_SECONDS);
    put("rate", figure((engine.tokens - lastLook.tokens) / passed));
    put("prompt-rate", figure((engine.prompt_tokens - lastLook.prompt_tokens) / passed));
    drawCurve(engine.time);
  }
  const steps = lastLook ? engine.steps - lastLook.steps : 0;
  if (steps > 0 && engine.running && lastLook.running) put("step", `${milliseconds((engine.time - lastLook.time) / steps)} ms`);
  lastLook = { model, time: engine.time, tokens: engine.tokens, prompt_tokens: engine.prompt_tokens, steps: engine.steps, running: engine.running };
  put("running", engine.running.toLocaleString("en"));
  put("waiting", engine.waiting.toLocaleString("en"));
  const batch = engine.batch;
  put("batch", batch ? `The last step: ${stepSaid(batch)}.` : "No step is running.");
  $("batch-legend").hidden = !engine.requests.length;
  showRequests(engine.requests, engine.running + engine.waiting);
  showBlocks(engine.blocks);
  const use = engine.prefix_cache;
  put("prefix", use.tokens
    ? `${percent(use.reused / use.tokens)} of ${count(use.tokens, "prompt token")} were cached.` : "The prefix cache hasn't been asked yet.");
  showSpeculation(engine.speculation);
  showClasses(engine.classes);
}

function stepSaid({ decodes, drafted, prompt }) {
  const parts = [[decodes, "answer"], [drafted, "token ahead", "tokens ahead"], [prompt, "prompt token"]];
  return parts.filter(([n]) => n).map((part) => count(...part)).join(", ") || "nothing";
}

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}\u00a0%`;
const figure = (value) => (value <= 0 ? "0" : value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));

function drawCurve(now) {
  const most = Math.max(1, ...samples.map(([, rate]) => rate));
  const points = samples.map(([when, rate]) => `${(240 * (1 - (now - when) / CURVE_SECONDS)).toFixed(1)},${(38 - 35 * Math.max(rate, 0) / most).toFixed(1)}`);
  const svg = $("curve");
  svg.querySelector("polyline").setAttribute("points", points.join(" "));
  const first = points.length ? points[0].split(",")[0] : "240";
  svg.querySelector("polygon").setAttribute("points", `${first},40 ${points.join(" ")} 240,40`);
}

const MOST_ROWS = 6;

function showRequests(requests, all) {
  const list = $("requests"), rows = requests.slice(0, MOST_ROWS);
  while (list.children.length > rows.length) list.lastElementChild.remove();
  while (list.children.length < rows.length)
    list.append(make("li", {}, make("span", { className: "what" }), make("span", { className: "bar" }, make("i", { className: "k-cached" }), make("i", { className: "k-read" }), make("i", { className: "k-written" })), make("span", { className: "how" })));
  rows.forEach((one, index) => {
    const [what, bar, how] = list.children[index].children;
    put(what, `#${one.id}${one.class ? ` ${one.class}` : ""}`);
    const total = Math.max(one.prompt + one.written, 1);
    const widths = [Math.min(one.cached, one.read), Math.max(one.read - one.cached, 0), one.written];
    widths.forEach((width, i) => { bar.children[i].style.width = `${(100 * width) / total}%`; });
    const done = { waits: "waits", pauses: "pauses", reads: `reads ${one.read}/${one.prompt}`, writes: `${one.written} written` }[one.state];
    put(how, `${done} · ${count(one.blocks, "block")}`);
  });
  const more = all - rows.length;
  put("more", more > 0 ? `and ${count(more, "more", "more")}` : "");
  $("more").hidden = more <= 0;
}

function showBlocks(groups) {
  const maps = $("maps"), names = Object.keys(groups);
  if (maps.dataset.names !== names.join("\n")) {
    maps.dataset.names = names.join("\n");
    maps.replaceChildren(...names.map((name) => {
      const canvas = make("canvas", { className: "map" });
      canvas.setAttribute("role", "img");
      const legend = make("p", { className: "legend" });
      STATES.forEach((state, i) => legend.append(make("span", {}, make("i", { className: `b-${i}` }), make("b"), ` ${state}`)));
      return make("figure", {}, names.length > 1 ? make("figcaption", {}, name) : null, canvas, legend, make("p", { className: "note" }));
    }));
  }
  names.forEach((name, index) => {
    const { runs, total, block_size: size, evictions } = groups[name], box = maps.children[index];
    const counts = [0, 0, 0, 0];
    for (const [state, length] of runs) counts[state] += length;
    box.querySelectorAll(".legend b").forEach((b, i) => put(b, counts[i].toLocaleString("en")));
    box.querySelector("canvas").setAttribute("aria-label", `${count(total, "block")}: ${STATES.map((state, i) => `${counts[i]} ${state}`).join(", ")}`);
    const each = drawMap(box.querySelector("canvas"), runs, total);
    const squares = each > 1 ? `A square is ${each} blocks of` : "A square is a block of";
    put(box.lastElementChild, `${squares} ${count(size, "token")}; ${evictions.toLocaleString("en")} evicted so far.`);
  });
}

/** Draws blocks as squares, several in one where there are many; returns how many. */
function drawMap(canvas, runs, total) {
  const width = canvas.clientWidth || 320, most = 1600;
  const each = Math.ceil(total / most), cells = Math.ceil(total / each);
  let side = 12;
  while (side > 4 && Math.ceil(cells / Math.floor((width + 1) / (side + 1))) * (side + 1) > 150) side -= 1;
  const columns = Math.floor((width + 1) / (side + 1)), height = Math.ceil(cells / columns) * (side + 1) - 1;
  const pitch = (width + 1) / columns;
  const ratio = devicePixelRatio || 1, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const same = JSON.stringify([width, ratio, dark, total, runs]);
  if (canvas.dataset.drawn === same) return each;
  canvas.dataset.drawn = same;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colors = STATES.map((_, i) => style.getPropertyValue(`--b${i}`));
  context.scale(ratio, ratio);
  let run = 0, left = runs.length ? runs[0][1] : 0;
  for (let cell = 0; cell < cells; cell++) {
    const counts = [0, 0, 0, 0];
    let need = Math.min(each, total - cell * each);
    const size = need;
    while (need && run < runs.length) {
      const take = Math.min(need, left);
      counts[runs[run][0]] += take;
      need -= take;
      left -= take;
      if (!left) left = ++run < runs.length ? runs[run][1] : 0;
    }
    let x = Math.round((cell % columns) * pitch);
    const y = Math.floor(cell / columns) * (side + 1), wide = Math.round(((cell % columns) + 1) * pitch) - 1 - x;
    for (const state of [1, 2, 3, 0]) {
      const part = (wide * counts[state]) / size;
      context.fillStyle = colors[state];
      if (part) context.fillRect(x, y, part, side);
      x += part;
    }
  }
  return each;
}

function showSpeculation(found) {
  $("speculation").hidden = !found;
  if (!found) return;
  const { drafted, accepted, sources } = found;
  put("hits", drafted ? `${percent(accepted / drafted)} of ${count(drafted, "token")} ahead were right.` : "No token was computed ahead yet.");
  $("hits-bar").firstElementChild.style.width = drafted ? `${(100 * accepted) / drafted}%` : "0";
  put("sources", Object.entries(sources).filter(([, of]) => of.drafted).map(([name, of]) => `${name.replaceAll("_", " ")}: ${of.accepted} of ${of.drafted}`).join(" · "));
}

const milliseconds = (seconds) => (seconds * 1000 >= 100 ? Math.round(seconds * 1000).toLocaleString("en") : (seconds * 1000).toFixed(1));

function showClasses(classes) {
  const times = (pair, target) => [
    pair ? `${milliseconds(pair[0])} · ${milliseconds(pair[1])}` : "–",
    target ? make("small", {}, `target ${milliseconds(target)}`) : null,
  ];
  $("classes").replaceChildren(...classes.map((one) => {
    const cell = (...children) => make("td", {}, ...children);
    const name = make("th", { scope: "row" }, one.name || "no class", make("small", {}, `${one.ended.toLocaleString("en")} ended`));
    return make("tr", {}, name, cell(one.running.toLocaleString("en"), make("small", {}, `${one.waiting.toLocaleString("en")} waiting`)), cell(...times(one.ttft, one.ttft_target)), cell(...times(one.tpot, one.tpot_target)));
  }));
  if (!classes.length) $("classes").append(make("tr", {}, make("td", { colSpan: 4, className: "note" }, "No request has come yet.")));
  $("class-names").replaceChildren(...classes.filter((one) => one.name).map((one) => make("option", { value: one.name })));
}

// ---- The beginning ---------------------------------------------------------------------------------------------

function showState(state, target) {
  $("state").dataset.state = state;
  put("state", state === "ready" && target ? `ready · ${target}` : state);
}

function chosen() {
  const name = $("model").value;
  kept.set("model", name);
  put("empty-model", name);
  document.title = `${name} · Enginewright`;
  lastLook = null;
  samples = [];
  lookSoon();
}
$("model").addEventListener("change", chosen);

/** Fetches what a page has to know. */
async function begin() {
  if (!maySee && !narrow.matches) showEngine(true); // another key may show it
  maySee = true;
  $("key").hidden = !needsKey;
  if (needsKey && !kept.get("key", "")) {
    if (!(await askForKey())) return;
  }
  try {
    const { data } = await (await ask("v1/models")).json();
    const names = data.map((one) => one.id), before = kept.get("model", "");
    $("model").replaceChildren(...names.map((name) => make("option", { value: name, selected: name === before }, name)));
    chosen();
    put("promise", `It reads and writes up to ${data[0].max_model_len.toLocaleString("en")} tokens in all. What you write stays on this server.`);
    await lookAtHealth();
  } catch (error) {
    if (error.status === 401 && needsKey) {
      if (await askForKey("This server doesn't know that key.")) await begin();
      return;
    }
    showState("unreachable", "");
    note("The server doesn't answer.");
    setTimeout(begin, 3000);
    return;
  }
  if (!needsKey) showDefaults();
}

/** Fields show what the model itself recommends. */
async function showDefaults() {
  try {
    const { models } = await (await ask("props")).json();
    const own = models[$("model").value]?.default_generation_settings ?? {};
    for (const name of NUMBERS) form.elements[name].placeholder = own[name] ?? (name === "temperature" ? 1 : "");
  } catch { /* they stay empty */ }
}
$("model").addEventListener("change", () => { if (!needsKey) showDefaults(); });

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", lookSoon);
addEventListener("resize", lookSoon);
showEngine(!narrow.matches);
showAll();
saySettings();
begin().then(() => { if (!document.querySelector("dialog[open]") && !narrow.matches) $("say").focus(); });
