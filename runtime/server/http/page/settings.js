// The parameters of requests, system-message presets and tools: the dialog, and the fields of a request.

import { $, make } from "./dom.js";
import { notifyError } from "./notice.js";
import { formField } from "./schema.js";
import { tab } from "./tab.js";

const DEFAULTS = { speculate: true, reasoning: "" };
const PRESETS = "enginewright-presets";
const OUR_PRESETS = {
  "Brief": "Answer in at most three sentences.",
  "Step by step": "Work through the question step by step, check each step, and give the result last.",
  "Translator": "Translate what the user writes into English. Write the translation alone.",
  "Code reviewer": "You review code. Name each defect with its line, its consequence and the smallest change that repairs it.",
};

/** The parameters of the chat that is shown. */
export const settings = { ...DEFAULTS, ...tab.get("settings", {}) };

const form = $("settings").querySelector("form");
const NUMBERS = [...form.querySelectorAll("input[type=number]")].map((field) => field.name);

/** Replaces all parameters, by those of another chat. */
export function loadSettings(values) {
  for (const name of Object.keys(settings)) delete settings[name];
  Object.assign(settings, DEFAULTS, values);
  settingsChanged();
}

export function settingsChanged() {
  tab.set("settings", settings);
  $("reasoning").value = settings.reasoning;
  describe();
}

/** Returns the sampling parameters that are set. */
export function samplingFields() {
  const fields = {};
  for (const name of NUMBERS) if (settings[name] !== undefined && settings[name] !== "") fields[name] = name === "seed" ? settings[name] : Number(settings[name]);
  if (settings.stop) fields.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.request_class) fields.request_class = settings.request_class;
  if (!settings.speculate) fields.speculate = false;
  return fields;
}

/** Returns the fields of a request besides its model and messages. */
export function requestFields() {
  const fields = samplingFields();
  if (settings.reasoning && !$("reasoning").disabled) fields.reasoning_effort = settings.reasoning;
  const format = formField(settings.format);
  if (format) fields.response_format = format;
  const tools = toolList();
  if (tools?.length) fields.tools = tools;
  return fields;
}

/** Returns the tools as they were written, null if that isn't a JSON list. */
function toolList() {
  if (!settings.tools?.trim()) return [];
  try {
    const tools = JSON.parse(settings.tools);
    if (!Array.isArray(tools)) return null;
    return tools.map((tool) => (tool && typeof tool === "object" && !tool.type ? { type: "function", function: tool } : tool));
  } catch {
    return null;
  }
}

function describe() {
  const parts = Object.entries(samplingFields()).filter(([name]) => name !== "speculate").map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  if (toolList()?.length) parts.unshift("tools");
  if (settings.system) parts.unshift("system message");
  $("settings-summary").textContent = parts.length ? `Parameters: ${parts.join(", ")}` : "Parameters";
  $("form").classList.toggle("on", Boolean(settings.format));
  $("form-summary").textContent = settings.format ? "JSON form: on" : "JSON form";
}

function fill() {
  for (const field of form.elements) {
    if (field.type === "checkbox") field.checked = settings[field.name];
    else if (field.name) field.value = settings[field.name] ?? "";
  }
  $("preset-name").value = "";
  listPresets();
}

// ---- Presets of the system message -----------------------------------------------------------------------------

function presets() {
  try {
    return { ...OUR_PRESETS, ...JSON.parse(localStorage.getItem(PRESETS)) };
  } catch {
    return { ...OUR_PRESETS };
  }
}

function keepPresets(all) {
  const added = Object.fromEntries(Object.entries(all).filter(([name, text]) => OUR_PRESETS[name] !== text));
  try {
    localStorage.setItem(PRESETS, JSON.stringify(added));
  } catch {
    notifyError("The browser has no room for this preset: delete one, or keep the text elsewhere.");
  }
  listPresets();
}

function listPresets() {
  const all = presets(), shown = Object.keys(all).find((name) => all[name] === settings.system) ?? "";
  $("presets").replaceChildren(make("option", { value: "" }, "Choose a preset"), ...Object.keys(all).map((name) => make("option", { value: name, selected: name === shown }, name)));
  $("preset-delete").disabled = !shown || Object.hasOwn(OUR_PRESETS, shown);
}

function setSystem(text) {
  settings.system = text;
  form.elements.system.value = text;
  settingsChanged();
  listPresets();
}

$("presets").addEventListener("change", () => { if ($("presets").value) setSystem(presets()[$("presets").value]); });
$("preset-save").addEventListener("click", () => {
  const name = $("preset-name").value.trim();
  if (!name || !settings.system) return $(name ? "system" : "preset-name").focus();
  keepPresets({ ...presets(), [name]: settings.system });
  $("preset-name").value = "";
});
$("preset-delete").addEventListener("click", () => {
  const all = presets();
  delete all[$("presets").value];
  keepPresets(all);
});

// ---- The dialog ------------------------------------------------------------------------------------------------

form.addEventListener("input", (event) => {
  const field = event.target;
  if (!field.name) return;
  settings[field.name] = field.type === "checkbox" ? field.checked : field.value;
  settingsChanged();
  if (field.name === "system") listPresets();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const wrong = toolList() === null;
  $("tools-problem").hidden = !wrong;
  if (wrong) form.elements.tools.focus();
  else $("settings").close();
});
$("reset").addEventListener("click", () => {
  loadSettings({ format: settings.format, reasoning: settings.reasoning });
  fill();
});
$("set").addEventListener("click", () => { fill(); $("settings").showModal(); });
$("reasoning").addEventListener("change", () => {
  settings.reasoning = $("reasoning").value;
  settingsChanged();
});

/** Shows what the model itself recommends, and whether its reasoning can be switched. `props`: of the server, or null. */
export function showModelDefaults(props) {
  const defaults = props?.default_generation_settings ?? {};
  for (const name of NUMBERS) form.elements[name].placeholder = defaults[name] ?? (name === "temperature" && props ? 1 : "");
  const switches = props?.reasoning_switches ?? ["enable_thinking", "reasoning_effort"]; // unknown: it can be tried
  $("reasoning").disabled = !switches.length;
  $("reasoning").title = switches.length ? "" : "This model's template has no switch for reasoning";
  for (const option of $("reasoning").options) option.hidden = ["low", "medium", "high"].includes(option.value) && !switches.includes("reasoning_effort");
}
