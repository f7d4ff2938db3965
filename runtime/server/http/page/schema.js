// The form of answers: any text, any JSON object, or JSON of a schema, which rows of fields or its own text describe.

import { $, button, make } from "./dom.js";

const TYPES = {
  "text": { type: "string" },
  "number": { type: "number" },
  "whole number": { type: "integer" },
  "yes or no": { type: "boolean" },
  "list of texts": { type: "array", items: { type: "string" } },
  "list of numbers": { type: "array", items: { type: "number" } },
};

/** Returns the response_format of a request. `format`: {kind: "object"} or {kind: "schema", schema: its text}. */
export function formField(format) {
  if (format?.kind === "object") return { type: "json_object" };
  if (format?.kind === "schema") return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(format.schema), strict: true } };
  return null;
}

const dialog = $("answer-form"), form = dialog.querySelector("form");
const rows = () => [...$("schema-fields").children];

function addRow(name = "", type = "text", required = true) {
  const names = make("input", { value: name, spellcheck: false, placeholder: "name" });
  names.setAttribute("aria-label", "Name of the field");
  const types = make("select", {}, ...Object.keys(TYPES).map((one) => make("option", { selected: one === type }, one)));
  types.setAttribute("aria-label", "Type of the field");
  const needed = make("input", { type: "checkbox", checked: required });
  const row = make("li", {}, names, types, make("label", { className: "check" }, needed, "required"),
    button("Remove", () => { row.remove(); write(); $("schema-add").focus(); }, { name: "Remove the field" }));
  $("schema-fields").append(row);
  return names;
}

/** Writes the schema of the rows. */
function write() {
  const properties = {}, required = [];
  for (const row of rows()) {
    const [name, needed] = row.querySelectorAll("input");
    if (!name.value.trim()) continue;
    properties[name.value.trim()] = TYPES[row.querySelector("select").value];
    if (needed.checked) required.push(name.value.trim());
  }
  const schema = { type: "object", properties, required, additionalProperties: false };
  form.elements.schema.value = JSON.stringify(schema, null, 2);
  check();
}

/** Makes rows of a schema that they can describe; returns whether they do. */
function read() {
  $("schema-fields").replaceChildren();
  try {
    const { properties = {}, required = [] } = JSON.parse(form.elements.schema.value);
    const fields = Object.entries(properties).map(([name, type]) => [name, Object.keys(TYPES).find((one) => JSON.stringify(TYPES[one]) === JSON.stringify(type)), required.includes(name)]);
    if (fields.some(([, type]) => !type)) return;
    for (const field of fields) addRow(...field);
  } catch { /* the text is shown, with its problem */ }
}

/** Shows what is wrong with the schema's text; returns whether nothing is. */
function check() {
  let problem = "";
  const kind = new FormData(form).get("kind");
  $("schema-parts").hidden = kind !== "schema";
  if (kind === "schema") {
    try {
      const schema = JSON.parse(form.elements.schema.value);
      if (!schema || typeof schema !== "object" || Array.isArray(schema)) problem = "A schema is a JSON object: { … }.";
    } catch (error) {
      problem = form.elements.schema.value.trim() ? `The schema isn't JSON: ${error.message}` : "Add a field, or write a schema.";
    }
  }
  $("schema-problem").textContent = problem;
  $("schema-problem").hidden = !problem;
  return !problem;
}

/** Has the dialog change `settings.format`; calls `changed` then. */
export function editsForm(settings, changed) {
  $("form").addEventListener("click", () => {
    form.elements.kind.value = settings.format?.kind ?? "text";
    form.elements.schema.value = settings.format?.schema ?? "";
    read();
    check();
    $("schema-problem").hidden = true;
    dialog.showModal();
  });
  form.addEventListener("input", (event) => {
    if (event.target.name === "schema") read();
    else if (event.target.closest("#schema-fields")) write();
    check();
  });
  $("schema-add").addEventListener("click", () => { addRow().focus(); });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!check()) return;
    const kind = form.elements.kind.value;
    if (kind === "text") delete settings.format;
    else settings.format = { kind, ...(kind === "schema" ? { schema: form.elements.schema.value } : {}) };
    dialog.close();
    changed();
  });
  $("form-cancel").addEventListener("click", () => dialog.close());
}
