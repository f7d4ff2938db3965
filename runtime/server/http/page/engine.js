// The view of the engine: what its steps, blocks and classes do, about once a second while somebody sees it.

import { $, count, make, put } from "./dom.js";
import { current, on } from "./chat.js";
import { ask } from "./server.js";

// ---- The engine ------------------------------------------------------------------------------------------------

const STATES = ["free", "in use", "shared", "kept"];
const CURVE_SECONDS = 120;
let samples = []; // [seconds, tokens a second]
let lastLook = null, timer = 0, maySee = true, target = "";

const isShown = () => !document.body.classList.contains("engine-closed");
const narrow = matchMedia("(max-width: 900px)");

/** Shows the engine, next to the chat or, where there is no room, in its place. */
function showEngine(open) {
  document.body.classList.toggle("engine-closed", !open);
  $("toggle").setAttribute("aria-expanded", String(open));
  if (open) lookSoon();
}
$("toggle").addEventListener("click", () => showEngine(!isShown()));
$("engine-close").addEventListener("click", () => { showEngine(false); $("toggle").focus(); });
narrow.addEventListener("change", () => { if (narrow.matches) showEngine(false); });

function lookSoon() {
  clearTimeout(timer);
  timer = setTimeout(look, 0);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) lookSoon(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", lookSoon);
addEventListener("resize", lookSoon);
on("started", lookSoon);
on("ended", lookSoon); // it may have failed because the engine did

let looking = false;
/** Looks at the engine, or only at whether it answers, and again a second or three later. */
async function look() {
  if (looking) return;
  looking = true;
  let pause = 3000;
  if (!document.hidden && isShown() && maySee && $("model").value) pause = await lookAtEngine();
  else if (!document.hidden) await lookAtHealth();
  looking = false;
  clearTimeout(timer);
  timer = setTimeout(look, pause);
}

/** Returns the milliseconds until the next look. */
async function lookAtEngine() {
  const model = $("model").value;
  try {
    const live = await (await ask(`live?model=${encodeURIComponent(model)}`)).json();
    if (model === $("model").value) showLive(live);
    return current.running ? 500 : 1000;
  } catch (error) {
    if (error.status === 403) {
      maySee = false;
      note("This key doesn't show the engine: that takes one with admin = true.");
      return 0;
    }
    if (error.status === 401) note("The engine is shown to those who have a key.");
    else {
      note("The server doesn't answer.");
      showState("unreachable");
    }
    return 3000;
  }
}

/** Shows whether the model answers, which everybody may know. */
export async function lookAtHealth() {
  try {
    const { models } = await (await fetch("health")).json();
    showState(models[$("model").value] ?? "", target);
  } catch {
    showState("unreachable");
  }
}

/** Shows the state of the model. `where`: the target that it runs on, if that is known. */
export function showState(state, where = "") {
  target = where;
  $("state").dataset.state = state;
  $("state").title = state;
  put("state", state === "ready" && target ? `ready · ${target}` : state);
}

/** Another model is chosen. */
export function forgetEngine() {
  lastLook = null;
  samples = [];
  target = "";
  lookSoon();
}

/** Another key may show the engine. */
export function lookAgain() {
  maySee = true;
  note("");
  $("engine-views").hidden = true; // until there are figures
}

function note(text) {
  if ($("engine-note").textContent !== text) $("engine-note").textContent = text;
  $("engine-note").hidden = !text;
  $("engine-views").hidden = Boolean(text);
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

function showSpeculation(speculation) {
  $("speculation").hidden = !speculation;
  if (!speculation) return;
  const { drafted, accepted, sources } = speculation;
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
