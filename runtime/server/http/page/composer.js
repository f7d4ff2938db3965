// The message field, with files that are attached to a message.

import { $, bytes, button, make } from "./dom.js";
import { current, on, send, stop } from "./chat.js";
import { notifyError } from "./notice.js";
import { tab } from "./tab.js";

const MOST_BYTES = 2e6;
let files = [];

// ---- Files -----------------------------------------------------------------------------------------------------

/** Returns the text of a file. Raises an error that says what is wrong with it. */
async function textOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${bytes(file.size)}: attach at most ${bytes(MOST_BYTES)}`);
  let data;
  try {
    data = await file.arrayBuffer();
  } catch {
    throw new Error(`${file.name} can't be read: choose it again`);
  }
  let text = "";
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch { /* it isn't text, as below */ }
  if (!text && data.byteLength) throw new Error(`${file.name} isn't text in UTF-8: attach text, code, CSV, JSON or the like`);
  if (text.includes("\0")) throw new Error(`${file.name} isn't a text file: attach text, code, CSV, JSON or the like`);
  if (!text.trim()) throw new Error(`${file.name} is empty: attach another file`);
  return text;
}

async function attach(list) {
  const problems = [];
  for (const file of list) {
    try {
      files.push({ name: file.name, text: await textOf(file) });
    } catch (error) {
      problems.push(error.message);
    }
  }
  if (problems.length) notifyError(`${problems.join(". ")}.`);
  drawFiles();
}

function drawFiles() {
  $("files").replaceChildren(...files.map((file) => make("li", {}, `${file.name}, ${bytes(file.text.length)}`, button("×", () => {
    files = files.filter((one) => one !== file);
    drawFiles();
    $("say").focus();
  }, { name: `Remove ${file.name}` }))));
  $("files").hidden = !files.length;
}

$("attach").addEventListener("click", () => $("attach-files").click());
$("attach-files").addEventListener("change", async (event) => {
  await attach([...event.target.files]);
  event.target.value = "";
  $("say").focus();
});
$("composer").addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
$("composer").addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});

// ---- The field -------------------------------------------------------------------------------------------------

/** The message field is as high as its text, up to a limit. */
function grow() {
  const field = $("say");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 220)}px`;
}

export function setMessage(text) {
  $("say").value = text;
  tab.set("draft", text);
  grow();
}

function submit() {
  if (!send($("say").value.trim(), files)) return;
  files = [];
  drawFiles();
  setMessage("");
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("say").addEventListener("input", () => { tab.set("draft", $("say").value); grow(); });
$("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
$("stop").addEventListener("click", () => { stop(); $("say").focus(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && current.running && !document.querySelector("dialog[open]")) stop();
});
for (const idea of $("ideas").children) idea.addEventListener("click", () => { setMessage(idea.textContent); submit(); });
on("started", () => setMessage($("say").value));
